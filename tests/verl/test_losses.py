"""The same samples through both trainers: advantages, loss and gradient of veRL's own functions and of our learner."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.config import omega_conf_to_dataclass

from openforgerl.engines.options import EngineOptions
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.training.algorithms import group_advantages
from openforgerl.training.configs import GrpoConfig
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import ClippedPolicy
from openforgerl.training.options import GrpoOptions, LearnerOptions
from openforgerl.training.rows import rows_of
from openforgerl.training.verl.command import arguments, grpo_overrides
from openforgerl.training.verl.resolving import resolve
from openforgerl.types import Sample, Source, Span

pytestmark = pytest.mark.verl

REWARDS = {"a": [0.0, 1.0, 0.25, 0.0], "b": [0.5, 0.5, 0.5, 1.0]}
VOCABULARY = 61


def tiny() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.15, eos_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float().eval()


def rollouts() -> dict[tuple[str, int], list[Sample]]:
    """Two groups of four; rollouts of one to three sequences that share prefixes, some of it masked."""
    draw = random.Random(11)
    made: dict[tuple[str, int], list[Sample]] = {}
    for group, rewards in REWARDS.items():
        shared = [draw.randrange(VOCABULARY) for _ in range(12)]
        for index in range(len(rewards)):
            name = f"{group}{index}"
            made[group, index] = [sample(draw, f"{name}-{row}", name, group, shared) for row in range(1 + index % 3)]
    return made


def sample(draw: random.Random, name: str, rollout: str, group: str, shared: list[int]) -> Sample:
    ids = [*shared, *(draw.randrange(VOCABULARY) for _ in range(draw.randrange(12, 30)))]
    cuts = sorted(draw.sample(range(12, len(ids) + 1), 6))
    states = ("trained", "masked", "trained")
    spans = tuple(
        Span(start=start, stop=stop, call_id=name, offset=0, state=state, reason=None if state == "trained" else "test")  # type: ignore[arg-type]
        for start, stop, state in zip(cuts[::2], cuts[1::2], states, strict=True)
    )
    tokens = sum(span.stop - span.start for span in spans)
    return Sample(
        sample_id=name, attempt_id=f"{rollout}-a0", rollout_id=rollout, group_id=group, ids=tuple(ids), spans=spans,
        # Far from the model's own, so that some tokens are clipped on either side.
        logprobs=tuple(draw.uniform(-6.0, -2.0) for _ in range(tokens)), source=Source.POLICY,
    )  # fmt: skip


def padded(rows: list[tuple[float, ...]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


def verl_loss(model: Any, actor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """veRL's loss with gradient, and its advantages of every row, from the rows that our manager would put."""
    keys: list[str] = []
    rows: list[Any] = []
    scores: list[tuple[float, ...]] = []
    for (group, index), samples in rollouts().items():
        for number, row in enumerate(rows_of(samples, version=0)):
            keys.append(f"{group}_{index}_{number}")
            rows.append(row)
            scores.append((*(0.0,) * (len(row.response_ids) - 1), REWARDS[group][index]))
    mask = padded([row.response_mask for row in rows])
    batch = {"token_level_rewards": padded(scores), "response_mask": mask}
    data = DataProto(batch=TensorDict(batch, batch_size=len(rows)))
    data.non_tensor_batch["uid"] = np.array([key.partition("_")[0] for key in keys], dtype=object)
    data = compute_advantage_for_multi_trajectories(data, keys, "grpo", config=None)
    logprobs = []
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1]
        logprobs.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(row.response_ids)[:, None])[:, 0])
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=padded([row.response_logprobs for row in rows]),
        log_prob=torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True),
        advantages=data.batch["advantages"],
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    return loss, data.batch["advantages"].max(1).values + data.batch["advantages"].min(1).values


def test_one_config_one_loss(tmp_path: Path) -> None:
    """`[train]` of one config, read by both trainers; veRL's actor config is the one that its workers would get."""
    write_tiny_model(tmp_path / "model")
    config = GrpoConfig(
        engine=EngineOptions(path=str(tmp_path / "model")),
        train=GrpoOptions(aggregation="token_mean", groups_per_step=2, clip_low=0.15, clip_high=0.3, clip_dual=2.5),
        verl={"trainer": {"device": "cpu"}},
    )
    overrides = arguments(grpo_overrides(config, tmp_path / "run", tasks=8))
    actor = omega_conf_to_dataclass(resolve("ppo_trainer", overrides).actor_rollout_ref.actor)
    model = tiny()
    loss, advantages = verl_loss(model, actor)
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}

    learner = Learner(tiny(), LearnerOptions())
    ours: list[Sample] = []
    expected: list[float] = []
    for (group, index), samples in rollouts().items():
        advantage = group_advantages(REWARDS[group]).values[index]
        ours += [msgspec.structs.replace(one, advantage=advantage) for one in samples]
        expected += [advantage] * len(samples)
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-6, rtol=0)
    objective = ClippedPolicy.of(config.train)
    gradients = learner.gradients(ours, objective)
    metrics = learner.step(ours, objective)
    assert metrics.clip_fraction and metrics.dual_clip_fraction  # the batch is not a trivial one
    assert metrics.loss == pytest.approx(loss.item(), abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-6, rtol=1e-4)
