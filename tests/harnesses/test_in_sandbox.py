"""The harnesses as they really run: in the process sandbox, the model server their only neighbour."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from openforgerl.harnesses import CommandOptions, HarnessOptions
from openforgerl.harnesses.command import CommandHarness
from openforgerl.harnesses.pi import PiHarness
from openforgerl.harnesses.react import ReactHarness
from openforgerl.protocols import Harness, Sandbox
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.process import ProcessSandboxes
from openforgerl.types import Exit, HarnessContext, SandboxSpec

pytestmark = pytest.mark.sandbox


@pytest.fixture
def run(tmp_path: Path, chat: Any, make_context: Callable[..., HarnessContext]) -> Any:
    async def carry_out(
        harness: Harness, look: Callable[[Sandbox], Any], instruction: str = "Copy a.txt to b.txt."
    ) -> Exit:
        (tmp_path / "a.txt").write_text("hello\n")
        spec = SandboxSpec(
            run_id="r",
            layers=tuple(harness.layers()),
            files={"/workspace/a.txt": str(tmp_path / "a.txt")},
            endpoint=("127.0.0.1", urlsplit(chat.url).port or 0),
        )
        plan = harness.plan(make_context(base_urls={"chat": "http://127.0.0.1:8080/v1"}, instruction=instruction))
        async with ProcessSandboxes(SandboxOptions(), tmp_path / "state").create(spec, "a") as sandbox:
            for path, text in plan.files.items():
                await sandbox.write(path, text.encode())
            done = await sandbox.exec(plan.argv, env=plan.env, stdin=plan.stdin.encode(), timeout=60)
            await look(sandbox)
            return done

    carry_out.context = make_context()  # type: ignore[attr-defined]
    return carry_out


def as_shipped(name: str) -> dict[str, Any]:
    """The prompt that the demo's base model was made for."""
    return json.loads(resources.files("openforgerl.demo").joinpath("prompts.json").read_text())[name]


@pytest.mark.node
async def test_pi(chat: Any, make: Any, run: Any, pi_cache: Path) -> None:
    # Nothing on stderr: pi puts the two outputs together in the order of arrival, which varies.
    chat.script = [
        make.bash("cp a.txt b.txt; id -u; pwd; touch /opt/pi/x 2>/dev/null || echo no"),
        {"content": "Done."},
    ]

    async def look(sandbox: Sandbox) -> None:
        assert await sandbox.read("/workspace/b.txt", limit=100) == b"hello\n"

    done = await run(PiHarness(HarnessOptions(cache=str(pi_cache))), look)
    assert (done.code, done.stdout, done.stderr) == (0, b"Done.\n", b"")
    _, headers, first = chat.requests[0]
    assert headers["user-agent"].startswith("pi/1.6.0 ")
    assert first["messages"][0] == {"role": "system", "content": as_shipped("pi")["system"]}
    assert json.dumps(first["tools"]) == json.dumps(as_shipped("pi")["tools"])
    uid, workdir, writable = chat.bodies[1]["messages"][-1]["content"].splitlines()
    assert uid != "0"
    assert (workdir, writable) == ("/workspace", "no")


@pytest.mark.node
async def test_pi_starts_from_the_shared_compile_cache(chat: Any, run: Any, pi_cache: Path) -> None:
    chat.script = [{"content": "Done."}]
    pi = PiHarness(HarnessOptions(cache=str(pi_cache)))

    async def look(sandbox: Sandbox) -> None:
        plan = pi.plan(run.context)
        env = {**plan.env, "NODE_DEBUG_NATIVE": "COMPILE_CACHE"}
        done = await sandbox.exec([*plan.argv[:2], "--version"], env=env, timeout=60, output_limit=1 << 20)
        said = done.stderr + done.stdout
        assert b"was accepted" in said
        assert b"was rejected" not in said

    await run(pi, look)


async def test_react(chat: Any, make: Any, run: Any) -> None:
    chat.script = [make.bash("cp a.txt b.txt; id -u; pwd"), {"content": "Done."}]

    async def look(sandbox: Sandbox) -> None:
        assert await sandbox.read("/workspace/b.txt", limit=100) == b"hello\n"

    done = await run(ReactHarness(), look)
    assert (done.code, done.stdout, done.stderr) == (0, b"Done.\n", b"")
    _, headers, first = chat.requests[0]
    assert headers["user-agent"] == "openforgerl-react/1"
    assert first["messages"][0] == {"role": "system", "content": as_shipped("react")["system"]}
    assert json.dumps(first["tools"]) == json.dumps(as_shipped("react")["tools"])
    assert chat.bodies[1]["messages"][-1]["content"].splitlines()[1] == "/workspace"


async def test_command(chat: Any, run: Any) -> None:
    chat.script = [{"content": "Hi."}]
    script = (
        "import json, sys, urllib.request as u\n"
        "data = json.dumps({{'messages': [{{'role': 'user', 'content': sys.argv[1]}}]}}).encode()\n"
        "headers = {{'authorization': 'Bearer {key}', 'content-type': 'application/json'}}\n"
        "r = u.Request('{base_url}/chat/completions', data, headers)\n"
        "print(json.load(u.urlopen(r))['choices'][0]['message']['content'])\n"
    )
    options = CommandOptions(
        argv=("/usr/bin/python3", "{home}/agent.py", "{instruction}"), files={"/home/agent/agent.py": script}
    )

    async def look(sandbox: Sandbox) -> None:
        assert b"the-key" in await sandbox.read("/home/agent/agent.py", limit=10_000)

    done = await run(CommandHarness(HarnessOptions(command=options)), look)
    assert (done.code, done.stdout) == (0, b"Hi.\n")
    assert chat.bodies[0]["messages"] == [{"role": "user", "content": "Copy a.txt to b.txt."}]
    assert chat.requests[0][1]["authorization"] == "Bearer the-key"
