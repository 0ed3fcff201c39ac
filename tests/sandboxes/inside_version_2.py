"""Run in a machine whose kernel has control groups of version 2 alone: print what bounds a sandbox there, and does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import msgspec

from openforgerl.sandboxes import ProcessSandboxes, SandboxOptions, cgroups
from openforgerl.types import SandboxLimits, SandboxSpec

PROGRAMS = Path(__file__).parents[1] / "attacks" / "programs"
SPEC = SandboxSpec(run_id="r", files={"/tmp/programs": str(PROGRAMS)})
SMALL, MANY = SandboxLimits(memory_mb=48, processes=24), SandboxLimits(memory_mb=400, processes=24)


async def main() -> dict[str, object]:
    found = cgroups.detect()
    said: dict[str, object] = {"place": None if found is None else str(found.memory)}
    backend = ProcessSandboxes(SandboxOptions(start_timeout=120), Path(sys.argv[1]))
    async with backend.create(msgspec.structs.replace(SPEC, limits=SMALL), "a") as sandbox:
        said |= {name: str(text) for name, text in dict(sandbox.report["limits"]).items()}  # type: ignore[call-overload]
        for how in ("heap", "memfd", "shared"):
            end = await sandbox.exec(["python3", "/tmp/programs/fill_memory.py", how, "80"], env={}, timeout=120)
            said[how] = "oom" if end.oom else "refused" if b"Error" in end.stderr else end.stdout.decode()
    # without a group each process counts whole, what they share too
    async with backend.create(msgspec.structs.replace(SPEC, limits=MANY), "b") as sandbox:
        end = await sandbox.exec(["python3", "/tmp/programs/fork_many.py", "60", "0"], env={}, timeout=120)
        said["forks"] = int(end.stdout)
        await sandbox.kill_agent()
        said["after"] = (await sandbox.exec(["true"], env={}, timeout=60)).code
    said["left"] = [str(path) for path in Path("/sys/fs/cgroup").rglob("openforgerl*")]
    return said


print("SAID", os.geteuid(), json.dumps(asyncio.run(main())), flush=True)
