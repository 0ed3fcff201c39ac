"""Writes calls and attempts in a loop and says what was acknowledged; made to be killed.

    python crash_writer.py DATABASE FIRST_NUMBER

After each acknowledged write one line goes to stdout (`begin 7`, `finish 7`, `commit 7`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

from openforgerl.store import CallStore, Database, RunStore
from openforgerl.types import Sample, SampleSet, Source, Totals

_spec = importlib.util.spec_from_file_location("builders", Path(__file__).with_name("builders.py"))
assert _spec is not None and _spec.loader is not None
builders = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(builders)


def acknowledge(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def one(calls: CallStore, runs: RunStore, number: int) -> None:
    call = builders.call(number, request={"messages": [{"role": "user", "content": f"{number} " * 200}]})
    await calls.begin(builders.intent(call))
    acknowledge(f"begin {number}")
    await calls.finish(call)
    acknowledge(f"finish {number}")
    await runs.plan([builders.rollout(number)])
    attempt = builders.attempt(f"r{number}")
    await runs.begin_attempt(attempt)
    sample = Sample(
        sample_id=f"sample {number}",
        attempt_id=attempt.attempt_id,
        rollout_id=attempt.rollout_id,
        group_id="g",
        ids=call.prompt.ids,
        spans=(),
        logprobs=(),
        source=Source.POLICY,
    )
    await runs.commit(builders.passed(attempt), SampleSet(samples=(sample,), totals=Totals(sampled=0, trained=0)))
    acknowledge(f"commit {number}")


async def main(path: str, first: int) -> None:
    async with Database.open(path) as database:
        calls, runs = CallStore(database), RunStore(database)
        await runs.put_run("run", "digest")
        acknowledge("open")
        numbers = iter(range(first, 10**9))

        async def worker() -> None:
            for number in numbers:
                await one(calls, runs, number)

        await asyncio.gather(*(worker() for _ in range(4)))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
