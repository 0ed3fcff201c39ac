"""What veRL is given of a rollout, without veRL: rows, engine, legs and the words of its command line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforgerl.engines.options import EngineOptions
from openforgerl.errors import ConfigError, EngineError, ExactnessError, InputError
from openforgerl.store import Database, RunStore
from openforgerl.training.borrowed import BorrowedEngine
from openforgerl.training.configs import GrpoConfig, SftConfig
from openforgerl.training.legs import Legs
from openforgerl.training.options import GrpoOptions, LearnerOptions, OptimizerOptions, SftOptions
from openforgerl.training.rows import rows_of
from openforgerl.training.verl.command import arguments, grpo_overrides, sft_overrides
from openforgerl.types import (
    Attempt,
    Chunk,
    FinishReason,
    PlacedImage,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    Source,
    Task,
    Verdict,
)

MakeSample = Callable[..., Sample]


def test_a_row_is_cut_where_training_begins(make_sample: MakeSample) -> None:
    sample = make_sample("s", range(10, 20), [(3, 5), (8, 9)], masked=[(6, 8)], logprobs=[-1, -2, -3, -4, -5])
    (row,) = rows_of([sample], version=0)
    assert row.prompt_ids == (10, 11, 12)
    assert row.response_ids == (13, 14, 15, 16, 17, 18, 19)
    assert row.response_mask == (1, 1, 0, 0, 0, 1, 0)
    assert row.response_logprobs == (-1, -2, 0, -3, -4, -5, 0)


def test_what_is_masked_before_training_begins_is_prompt(make_sample: MakeSample) -> None:
    (row,) = rows_of([make_sample("s", range(6), [(4, 6)], masked=[(1, 3)], logprobs=[-9, -9, -1, -2])], version=0)
    assert row.prompt_ids == (0, 1, 2, 3)
    assert (row.response_mask, row.response_logprobs) == ((1, 1), (-1, -2))


def test_the_row_with_most_trained_tokens_speaks_for_the_rollout(make_sample: MakeSample) -> None:
    """veRL reads the advantage of the last row at its first trained token: it must have one."""
    samples = [
        make_sample("long", range(9), [(2, 8)], logprobs=[-1.0] * 6),
        make_sample("nothing", range(9), [], masked=[(2, 5)], logprobs=[-1.0] * 3),
        make_sample("short", range(9), [(4, 5)], logprobs=[-1.0]),
    ]
    assert [row.sample_id for row in rows_of(samples, version=0)] == ["short", "long"]


@pytest.mark.parametrize("samples", [[], ["one"]])
def test_a_rollout_that_trains_nothing_keeps_its_place(samples: list[str], make_sample: MakeSample) -> None:
    made = [make_sample(name, (7, 8, 9), [], masked=[(1, 3)], logprobs=[-1, -1]) for name in samples]
    (row,) = rows_of(made, version=3)
    assert row.prompt_ids + row.response_ids == ((7, 8) if samples else (0, 0))
    assert (row.response_mask, row.versions) == ((0,), (3, 3))


def test_versions_are_those_of_trained_tokens(make_sample: MakeSample) -> None:
    sample = make_sample("s", range(9), [(2, 4), (5, 6)], masked=[(7, 8)], logprobs=[-1.0] * 4)
    spans = [msgspec.structs.replace(span, weights_version=v) for span, v in zip(sample.spans, (3, 5, 1), strict=True)]
    (row,) = rows_of([msgspec.structs.replace(sample, spans=tuple(spans))], version=9)
    assert row.versions == (3, 5)


def test_what_may_not_be_trained_is_refused(make_sample: MakeSample) -> None:
    good = make_sample("s", range(4), [(1, 3)], logprobs=[-1, -1])
    image = PlacedImage(sha256="0" * 64, start=0, count=1, grid=(1, 1, 1))
    for bad, error in (
        (msgspec.structs.replace(good, source=Source.TEACHER), ExactnessError),
        (msgspec.structs.replace(good, logprobs=None), ExactnessError),
        (msgspec.structs.replace(good, images=(image,)), InputError),
        (make_sample("first", range(4), [(0, 3)], logprobs=[-1, -1, -1]), InputError),
    ):
        with pytest.raises(error, match=bad.sample_id):
            rows_of([bad], version=0)


@dataclass
class Answer:
    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None = "completed"
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Servers:
    """Gives the listed answers in turn; remembers what it was asked."""

    answers: list[Answer | Exception | float]
    asked: list[tuple[str, list[int], dict[str, Any]]] = field(default_factory=list[Any])

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Answer:
        self.asked.append((request_id, prompt_ids, sampling_params))
        answer = self.answers.pop(0)
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return Answer([], None)
        if isinstance(answer, Exception):
            raise answer
        return answer


def engine_on(*answers: Answer | Exception | float, context: int = 100) -> tuple[BorrowedEngine, Servers]:
    servers = Servers(list(answers))
    return BorrowedEngine(servers.generate, context_length=context, stop_ids=(2, 0), retry_seconds=0.001), servers


async def chunks_of(engine: BorrowedEngine, sampling: Sampling, deadline: float | None = None) -> Sequence[Chunk]:
    answer = engine.generate(Prompt(ids=(5, 6, 7)), sampling, affinity="attempt-1", deadline=deadline)
    return [chunk async for chunk in answer]


async def test_an_answer_that_an_update_cuts_short_is_continued_under_the_new_weights() -> None:
    engine, servers = engine_on(
        Answer([11, 12], [-1.0, -2.0], "aborted", {"global_steps": 4}),
        Answer([], [], "aborted", {"global_steps": 4}),
        Answer([13, 2], [-3.0, -4.0], "completed", {"global_steps": 5}),
    )
    chunks = await chunks_of(engine, Sampling(max_tokens=10, seed=8))
    assert [(c.ids, c.logprobs, c.weights_version, c.finish) for c in chunks] == [
        ((11, 12), (-1.0, -2.0), 4, None),
        ((13, 2), (-3.0, -4.0), 5, FinishReason.STOP),
    ]
    assert [(name, ids, params["max_tokens"], params["seed"]) for name, ids, params in servers.asked] == [
        ("attempt-1", [5, 6, 7], 10, 8),
        ("attempt-1", [5, 6, 7, 11, 12], 8, 10),
        ("attempt-1", [5, 6, 7, 11, 12], 8, 10),
    ]
    assert engine.weights_version == 5


async def test_what_is_asked_of_the_servers() -> None:
    engine, servers = engine_on(Answer([2], [-1.0]))
    await chunks_of(engine, Sampling(temperature=0.5, top_p=0.9, top_k=7, presence_penalty=0.25, max_tokens=4))
    assert servers.asked[0][2] == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.0, "presence_penalty": 0.25,
        "max_tokens": 4, "logprobs": True, "stop_token_ids": [2, 0],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "most", "finish"),
    [
        (Answer([9, 9, 9], [-1.0] * 3), 3, FinishReason.LENGTH),
        (Answer([9, 9, 9], [-1.0] * 3, "aborted"), 3, FinishReason.LENGTH),  # nothing is left to sample
        (Answer([9], [-1.0]), 3, FinishReason.LENGTH),  # the server's own bound
        (Answer([9, 0], [-1.0] * 2), 3, FinishReason.STOP),
    ],
)
async def test_why_an_answer_ended(answer: Answer, most: int, finish: FinishReason) -> None:
    engine, _ = engine_on(answer)
    assert (await chunks_of(engine, Sampling(max_tokens=most)))[-1].finish == finish


async def test_the_context_bounds_the_answer() -> None:
    engine, servers = engine_on(Answer([9, 9], [-1.0] * 2), context=5)
    await chunks_of(engine, Sampling(max_tokens=10))
    assert servers.asked[0][2]["max_tokens"] == 2


@pytest.mark.parametrize(
    "answer", [RuntimeError("actor died"), Answer([9, 9, 9, 9], [-1.0] * 4), Answer([9, 9], [-1.0])]
)
async def test_servers_that_fail_or_lie_are_our_failure(answer: Answer | Exception) -> None:
    engine, _ = engine_on(answer)
    with pytest.raises(EngineError, match="veRL's inference server"):
        await chunks_of(engine, Sampling(max_tokens=3))


async def test_past_the_deadline_nothing_is_waited_for() -> None:
    engine, _ = engine_on(30.0)
    chunks = await chunks_of(engine, Sampling(max_tokens=3), deadline=time.time() + 0.05)
    assert [(chunk.ids, chunk.finish) for chunk in chunks] == [((), FinishReason.ABORTED)]


async def commit(store: RunStore, purpose: str, step: int, version: int) -> None:
    name = f"{purpose}-{step}".replace(":", "-")
    rollout = Rollout(
        rollout_id=name, run_id="run", task="t", task_digest="", harness="h", group_id=name, index=0, seed=0,
        purpose=purpose, step=step,
    )  # fmt: skip
    await store.plan([rollout])
    attempt = Attempt(attempt_id=f"{name}-a0", rollout_id=name, number=0, started_at=0.0, weights_version=version)
    await store.begin_attempt(attempt)
    await store.commit(msgspec.structs.replace(attempt, outcome=Verdict(reward=0.0, passed=False)), None)


async def test_a_run_that_went_further_than_its_checkpoint_starts_a_new_leg(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "run.sqlite")
    task = Task(name="t", digest="", path="", instruction="")
    try:
        store = RunStore(database)
        await store.put_run("run", "digest", {})
        assert (await Legs.resume(store, 0, "verl")).place(1, task) == ("train", 0)
        await commit(store, "train", 1, 0)
        await commit(store, "eval:base", 0, 9)  # somebody else's
        # Killed before a step was made of it: the same ids, so that what is finished is not run again.
        assert (await Legs.resume(store, 0, "verl")).place(1, task) == ("train", 0)
        await commit(store, "train", 2, 1)
        legs = await Legs.resume(store, 0, "verl")
        assert legs.place(1, task) == ("train:1.0", 0)
        assert legs.place(1, task) == ("train:1.1", 1)
        assert legs.place(2, task) == ("train:1.0", 0)
        await commit(store, "train:1.0", 1, 0)
        assert (await Legs.resume(store, 0, "verl")).place(1, task) == ("train:1.0", 0)
        await commit(store, "train:1.0", 2, 1)
        assert (await Legs.resume(store, 0, "verl")).place(1, task) == ("train:2.0", 0)
        assert (await Legs.resume(store, 1, "verl")).place(2, task) == ("train:1.0", 0)
        # Weights that were only measured are of a past that never was, too.
        await commit(store, legs.validation(2), 2, 2)
        assert legs.validation(2) == "eval:verl.1.2"
        assert (await Legs.resume(store, 1, "verl")).validation(2) == "eval:verl.2.2"
    finally:
        await database.close()


def config_of(tmp_path: Path, table: dict[str, Any] | None = None, **train: Any) -> GrpoConfig:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    return GrpoConfig(engine=EngineOptions(path=str(tmp_path)), train=GrpoOptions(**train), verl=table or {})


def test_one_config_in_verls_words(tmp_path: Path) -> None:
    options = {"steps": 7, "groups_per_step": 4, "updates_per_step": 2, "group_size": 5, "clip_high": 0.3}
    words = grpo_overrides(config_of(tmp_path, **options), tmp_path / "run", tasks=9)
    for key, value in {
        "trainer.total_training_steps": 7,
        "data.train_batch_size": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.rollout.n": 5,
        "actor_rollout_ref.actor.clip_ratio_high": 0.3,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref.rollout.max_model_len": 4096,
        "trainer.v1.sampler.sync_refill_failed_groups": True,
    }.items():
        assert words[key] == value


def test_the_table_wins_and_a_plus_adds_what_verl_does_not_list(tmp_path: Path) -> None:
    table = {
        "trainer": {"device": "cpu", "save_freq": 5, "nnodes": 3},
        "actor_rollout_ref": {"model": {"override_config": {"+attn_implementation": "eager"}}},
    }
    words = grpo_overrides(config_of(tmp_path, table), tmp_path / "run", tasks=9)
    assert (words["trainer.save_freq"], words["trainer.nnodes"]) == (5, 3)
    assert words["actor_rollout_ref.rollout.name"] == "openforgerl_torch"  # the CPU's, because of the device
    chosen = [(key, value) for key, value in words.items() if key.endswith("attn_implementation")]
    assert chosen == [("+actor_rollout_ref.model.override_config.attn_implementation", "eager")]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("plain/path-1.json", "plain/path-1.json"),
        ("with space", "'with space'"),
        ("it's", "'it\\'s'"),
        ("ends\\", "'ends\\\\'"),
        ("", "''"),
        ("true", "'true'"),
        ("1e3", "'1e3'"),
        (True, "true"),
        (None, "null"),
        (1e-6, "1e-06"),
        (["a", 1], "[a,1]"),
        ({"a": {"b": "c d"}}, "{a:{b:'c d'}}"),
    ],
)
def test_values_in_hydras_grammar(value: Any, word: str) -> None:
    assert arguments({"key": value}) == [f"key={word}"]


@pytest.mark.parametrize(
    ("train", "named"),
    [
        ({"groups_per_step": 10}, "groups_per_step"),
        ({"shuffle_rewards": True}, "shuffle_rewards"),
        ({"aggregation": "prompt_mean"}, "prompt_mean"),
        ({"learner": LearnerOptions(optimizer=OptimizerOptions(kind="muon"))}, "muon"),
        ({"groups_per_step": 5, "updates_per_step": 2}, "updates_per_step"),
    ],
)
def test_what_verl_cannot_do_is_said(train: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        grpo_overrides(config_of(tmp_path, **train), tmp_path / "run", tasks=9)


def test_sft_in_verls_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    options = SftOptions(learner=LearnerOptions(optimizer=OptimizerOptions(lr=1e-4)), steps=9, batch_samples=3)
    words = sft_overrides(SftConfig(sft=options), tmp_path / "rows.parquet", tmp_path / "out", tmp_path)
    assert words["data.custom_cls.name"] == "ExactRows"
    assert (words["optim.lr"], words["trainer.total_training_steps"], words["data.train_batch_size"]) == (1e-4, 9, 3)
    with pytest.raises(ConfigError, match="muon"):
        sft_overrides(SftConfig(), tmp_path / "rows.parquet", tmp_path / "out", tmp_path)
