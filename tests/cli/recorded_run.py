"""A run folder with graded attempts, recorded through the real renderer, whose answers a real engine sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.orchestrator.assembly import keep_tokenizer
from openforgerl.rendering import load_renderer
from openforgerl.store import Database, RunStore
from openforgerl.trajectory import SamplePolicy, attribute, build, build_samples
from openforgerl.types import (
    Attempt,
    CallStatus,
    CallTiming,
    Failure,
    FinishReason,
    ModelCall,
    Origin,
    Outcome,
    Rollout,
    Sampling,
    Source,
    Stage,
    Verdict,
)
from openforgerl.wire.chat import ChatDialect

FAILED = Failure(stage=Stage.RUN, kind="crash", origin=Origin.HARNESS, message="gone", retryable=True)


def solved(reward: float = 1.0) -> Verdict:
    return Verdict(reward=reward, passed=reward == 1.0)


async def sampled_calls(model: Path, session: str, turns: int, system: str = "Be good.") -> list[ModelCall]:
    """A conversation of `turns` answers, each of at most 8 tokens drawn from the model."""
    renderer, dialect = load_renderer(model), ChatDialect()
    engine = TorchEngine(model, threads=1)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"go {session}"}]
    calls: list[ModelCall] = []
    try:
        for index in range(turns):
            conversation = dialect.parse(json.dumps({"messages": messages}).encode()).conversation
            found = attribute(calls, conversation, headers={}, opening=not calls)
            prompt = renderer.render(conversation, restored=found.restored, clock=0.0, kwargs={})
            ids, logprobs, finish = list[int](), list[float](), FinishReason.STOP
            sampling = Sampling(max_tokens=8, seed=index, temperature=0.8)
            async for chunk in engine.generate(prompt, sampling, affinity=session):
                ids += chunk.ids
                logprobs += chunk.logprobs or ()
                finish = chunk.finish or finish
            call_id = f"{session}-c{index}"
            parser = renderer.parser(conversation, prompt, seed=call_id)
            parser.feed(ids)
            _, answer = parser.finish()
            call = ModelCall(
                call_id=call_id,
                session_id=session,
                index=index,
                dialect="chat",
                thread=found.thread,
                role=found.role,
                role_evidence=found.evidence,
                parent_call_id=found.parent_call_id,
                status=CallStatus.COMPLETE,
                conversation=conversation,
                prompt=prompt,
                sampled_ids=tuple(ids),
                logprobs=tuple(logprobs),
                weights_version=0,
                sampling_applied=sampling,
                finish_reason=finish,
                answer=answer,
                timing=CallTiming(received=float(index)),
            )
            calls.append(call)
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "more"}]
    finally:
        await engine.close()
    return calls


async def record(folder: Path, model: Path, plan: Sequence[tuple[str, str, Sequence[Outcome]]]) -> None:
    """A run with one rollout for each (task, purpose, outcomes of its attempts)."""
    folder.mkdir()
    keep_tokenizer(folder, model)
    database = Database.open(folder / "run.sqlite")
    try:
        store = RunStore(database)
        await store.put_run("run", "digest")
        for number, (task, purpose, outcomes) in enumerate(plan):
            rollout = Rollout(
                rollout_id=f"r{number}",
                run_id="run",
                task=task,
                task_digest="d",
                harness="react",
                group_id=task,
                index=number,
                seed=number,
                purpose=purpose,
            )
            await store.plan([rollout])
            for attempt_number, outcome in enumerate(outcomes):
                attempt = Attempt(
                    attempt_id=f"r{number}-a{attempt_number}",
                    rollout_id=rollout.rollout_id,
                    number=attempt_number,
                    started_at=0.0,
                )
                await store.begin_attempt(attempt)
                samples = None
                if isinstance(outcome, Verdict):
                    calls = await sampled_calls(model, attempt.attempt_id, 2)
                    await store.import_calls(attempt.attempt_id, calls)
                    samples = build_samples(
                        build(attempt.attempt_id, calls),
                        rollout=rollout,
                        source=Source.POLICY,
                        policy=SamplePolicy(),
                    )
                done = msgspec.structs.replace(attempt, outcome=outcome, finished_at=1.0)
                await store.commit(done, samples)
    finally:
        await database.close()


PLAN: tuple[tuple[str, str, tuple[Outcome, ...]], ...] = (
    ("copy", "train", (solved(),)),
    ("copy", "train", (FAILED, solved(0.0))),
    ("move", "train", (solved(),)),
    ("move", "train", (FAILED,)),
    ("move", "eval:base", (solved(0.5),)),
)
"""Three graded attempts for training, one that failed and was tried again, one that failed for good, one evaluated."""


def make_run(folder: Path, model: Path) -> Path:
    """The run of `PLAN`."""
    asyncio.run(record(folder, model, PLAN))
    return folder
