"""Images: named by what they are made of, built from a task's Dockerfile, and what an attempt then finds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from openforgerl.errors import InputError
from openforgerl.sandboxes import SandboxOptions
from openforgerl.sandboxes.container import ContainerSandboxes
from openforgerl.sandboxes.container_engine import find_engine
from openforgerl.sandboxes.container_options import ContainerOptions
from openforgerl.sandboxes.images import BaseRecipe, base_reference, build_task, task_reference
from openforgerl.tasks import needs_image, read_task
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import SandboxSpec

TOML = """
schema_version = "1.4"
[task]
name = "images/built"
[agent]
timeout_sec = 30
[verifier]
timeout_sec = 20
[environment]
workdir = "/workspace"
"""
DOCKERFILE = """
FROM debian:12-slim
ENV FLAVOUR="of the image"
WORKDIR /workspace
COPY given.txt /workspace/given.txt
RUN echo "made by RUN" > /opt/made.txt && echo local > here.txt && ln -s given.txt link && echo doomed > doomed
"""
PROGRAM = (
    "cd /workspace; { cat /opt/made.txt here.txt link; echo $FLAVOUR; } > out && rm doomed && echo more >> here.txt"
)
EXPECTED = "made by RUN\nlocal\ngiven\nof the image\n"


def write_task(root: Path, dockerfile: str = DOCKERFILE) -> Path:
    task = root / "task"
    (task / "environment").mkdir(parents=True)
    (task / "tests").mkdir()
    (task / "task.toml").write_text(TOML)
    (task / "instruction.md").write_text("Copy what the image holds.")
    (task / "environment/Dockerfile").write_text(dockerfile)
    (task / "environment/given.txt").write_text("given\n")
    (task / "tests/expected").write_text(EXPECTED)
    (task / "tests/test.sh").write_text(
        "#!/bin/bash\nmkdir -p /logs/verifier\nreward=0\ncd /workspace\n"
        '[ -f /opt/made.txt ] && [ ! -e doomed ] && [ "$(tail -n 1 here.txt)" = more ] && cmp -s out /tests/expected '
        "&& reward=1\necho $reward > /logs/verifier/reward.txt\n"
    )
    return task


def test_a_name_holds_what_it_is_made_of(tmp_path: Path) -> None:
    one = read_task(write_task(tmp_path / "1"))
    other = read_task(write_task(tmp_path / "2", DOCKERFILE.replace("doomed\n", "doomed2\n")))
    assert task_reference(one, None) == task_reference(one, None)
    assert len({task_reference(one, None), task_reference(one, "base"), task_reference(other, None)}) == 3
    more = BaseRecipe(packages=("curl", "git"))
    assert more.reference() == BaseRecipe(packages=("git", "curl")).reference() != base_reference()


@pytest.mark.parametrize(
    ("dockerfile", "needed"),
    [
        ("FROM x\nWORKDIR /workspace\nCOPY given.txt .\n", False),
        (DOCKERFILE, True),
        ("FROM x\nADD given.txt /\n", True),
    ],
)
def test_only_what_runs_needs_an_image(tmp_path: Path, dockerfile: str, needed: bool) -> None:
    assert needs_image(read_task(write_task(tmp_path, dockerfile))) is needed


@pytest.mark.container
def test_a_task_that_runs_commands_is_built_and_played(tmp_path: Path) -> None:
    """Its files, its variables and the links in its work directory are there; what the agent removed stays removed."""
    task = write_task(tmp_path)
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "script.json").write_text('{"answers": [{"text": "hi", "times": 0}]}')
    script = f'python3 -I /home/agent/call.py "$1" "$2"\n{PROGRAM}\n'
    call = (
        "import json, sys, urllib.request as u\n"
        "body = json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}).encode()\n"
        "headers = {'Authorization': 'Bearer ' + sys.argv[2], 'Content-Type': 'application/json'}\n"
        "u.urlopen(u.Request(sys.argv[1] + '/chat/completions', body, headers)).read()\n"
    )
    files = {"/home/agent/run.sh": script, "/home/agent/call.py": call}
    config = tmp_path / "config.toml"
    config.write_text(
        'backend = "container"\n[harness]\nname = "command"\n[harness.command]\n'
        'argv = ["/bin/bash", "/home/agent/run.sh", "{base_url}", "{key}"]\n[harness.command.files]\n'
        + "".join(
            f"{json.dumps(p)} = {json.dumps(t.replace('{', '{{').replace('}', '}}'))}\n" for p, t in files.items()
        )
        + "[sandbox.container]\nreplace_from = true\n"
    )
    openforgerl = Path(sys.executable).with_name("openforgerl")
    command = [openforgerl, "eval", task, "--engine", f"scripted:{tmp_path / 'script.json'}", "-s", "attempts=1"]
    command += ["--tokenizer", tmp_path / "tiny", "--run", tmp_path / "run", "-c", config]
    for words in ([openforgerl, "images", "build", task, "-c", config], command):
        done = subprocess.run(words, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run/eval.json").read_text())["pass_at_1"]["value"] == 1.0


@pytest.mark.container
async def test_a_build_that_fails_says_how(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path, "FROM x\nRUN echo the reason; false\n"))
    with pytest.raises(InputError, match=r"(?s)images/built.*the reason"):
        await build_task(find_engine(ContainerOptions()), task, base_reference())


@pytest.mark.container
async def test_an_image_that_is_not_here_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    options = SandboxOptions(container=ContainerOptions(image="localhost/openforgerl/no-such"))
    with pytest.raises(InputError, match="openforgerl images build"):
        ContainerSandboxes.check(options)
    with pytest.raises(InputError, match="openforgerl images build"):
        async with ContainerSandboxes(options, tmp_path).create(SandboxSpec(run_id="r"), "a"):
            pass
    assert await asyncio.to_thread(lambda: list(tmp_path.rglob("*.json"))) == []
