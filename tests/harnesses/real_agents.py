"""A real harness in a real sandbox against the real proxy and store; only the model is scripted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from openforgerl.engines.script import Script
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.errors import OpenForgeError
from openforgerl.harnesses.catalogue import install
from openforgerl.protocols import Harness
from openforgerl.proxy import InProcessSessions, ProxyOptions, ProxyServer, control_token
from openforgerl.rendering import ChatRenderer
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.process import ProcessSandboxes
from openforgerl.store import CallStore, Database
from openforgerl.types import (
    Ending,
    Exit,
    HarnessContext,
    Limits,
    ModelCall,
    Rollout,
    Sampling,
    SandboxLimits,
    SandboxSpec,
    Task,
)

CONTEXT = 200_000
"""Tokens; the tiny model's tokenizer makes several times as many of a prompt as a large one would."""
UNLIMITED = Limits()
INSTRUCTION = "Copy a.txt to b.txt."


@dataclass
class Ran:
    exit: Exit
    ending: Ending
    calls: list[ModelCall]
    samples: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """What it printed, for a failing test."""
        return (self.exit.stdout + b"\n" + self.exit.stderr).decode(errors="replace")[-4000:]


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    """A scripted answer with one call."""
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


def cached(cache: Path, name: str) -> str:
    """The cache, with harness `name` in it."""
    install(name, cache, lambda line: print(line))
    return str(cache)


async def run_agent(
    folder: Path,
    renderer: ChatRenderer,
    harness: Harness,
    *answers: dict[str, Any],
    instruction: str = INSTRUCTION,
    want: tuple[str, ...] = ("/workspace/b.txt",),
    timeout: float = 240,
    memory_mb: int = 4096,
    limits: Limits = UNLIMITED,
) -> Ran:
    """One attempt, as `rollout` makes it: open a session, write the plan's files, run, seal, look."""
    (folder / "a.txt").write_text("hello\n")
    engine = ScriptedEngine(
        Script.decode(json.dumps({"answers": list(answers)})), renderer, model_name="policy", context_length=CONTEXT
    )
    options = ProxyOptions(control_token_file=str(folder / "control.token"))
    async with Database.open(folder / "run.sqlite") as database:
        store = CallStore(database)
        async with ProxyServer(engine=engine, renderer=renderer, store=store, options=options) as proxy:
            sessions = InProcessSessions(proxy)
            session = await sessions.open(
                "s1", sampling=Sampling(max_tokens=4000), limits=limits, metadata={}, template_kwargs={}
            )
            url = urlsplit(session.base_urls["chat"])
            spec = SandboxSpec(
                run_id="r",
                layers=tuple(harness.layers()),
                files={"/workspace/a.txt": str(folder / "a.txt")},
                endpoint=(url.hostname or "", url.port or 0),
                limits=SandboxLimits(memory_mb=memory_mb),
            )
            inside = {
                name: f"http://127.0.0.1:{spec.endpoint_port}{urlsplit(base).path}"
                for name, base in session.base_urls.items()
            }
            plan = harness.plan(context(inside, session.key, instruction))
            async with ProcessSandboxes(SandboxOptions(), folder / "state").create(spec, "a") as sandbox:
                for path, text in plan.files.items():
                    await sandbox.write(path, text.encode())
                services = [
                    asyncio.create_task(sandbox.exec(argv, env=plan.env, timeout=timeout)) for argv in plan.services
                ]
                exit = await sandbox.exec(plan.argv, env=plan.env, stdin=plan.stdin.encode(), timeout=timeout)
                for service in services:
                    service.cancel()
                await asyncio.gather(*services, return_exceptions=True)
                files: dict[str, bytes] = {}
                for path in want:
                    try:
                        files[path] = await sandbox.read(path, limit=10_000_000)
                    except (OpenForgeError, OSError) as error:
                        files[path] = f"unreadable: {error}".encode()
            await sessions.seal("s1")
            calls = list(await sessions.calls("s1"))
            samples = await samples_of(proxy, folder)
    return Ran(exit, harness.ending(exit, calls), calls, samples, files)


def context(base_urls: dict[str, str], key: str, instruction: str = INSTRUCTION) -> HarnessContext:
    task = Task(name="t", digest="d", path="/nowhere", instruction=instruction)
    rollout = Rollout(
        rollout_id="r",
        run_id="run",
        task="t",
        task_digest="d",
        harness="x",
        group_id="g",
        index=0,
        seed=1,
        purpose="try",
    )
    return HarnessContext(
        task=task,
        rollout=rollout,
        base_urls=base_urls,
        key=key,
        model="policy",
        context_length=CONTEXT,
        max_output_tokens=4000,
        home="/home/agent",
        workdir="/workspace",
    )


async def samples_of(proxy: ProxyServer, folder: Path) -> dict[str, Any]:
    """The training samples, as a trainer gets them over the control port."""
    host, port = proxy.control_address
    headers = {"Authorization": f"Bearer {control_token(folder / 'control.token')}"}
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{host}:{port}/v1/sessions/s1/samples", headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return await answer.json()
