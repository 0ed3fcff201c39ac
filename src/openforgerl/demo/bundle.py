"""Lay the demo's tasks on disk as Harbor directories: `python -m openforgerl.demo.bundle [--check]`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import click

from openforgerl.demo import families
from openforgerl.demo.phrasing import HELD_OUT_PHRASING

_FIRST_SEEDS: dict[str, int] = {
    "sft": 1000,
    "rl": 2000,
    "validation": 3000,
    "heldout": 8000,
    "heldout-phrasing": 9000,
    "heldout-family": 10000,
    "hard": 7000,
}
TASKS_PER_FAMILY: dict[str, int] = {
    "sft": 3,
    "rl": 10,
    "validation": 1,
    "heldout": 3,
    "heldout-phrasing": 1,
    "heldout-family": 4,
    "hard": 2,
}

_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "openforgerl-demo/{name}"
keywords = ["terminal", "demo"]

[metadata]
family = "{family}"
split = "{split}"
phrasing = {phrasing}
seed = {seed}

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
workdir = "/workspace"
"""

_DOCKERFILE = """\
FROM debian:12-slim
WORKDIR /workspace
COPY workspace/ /workspace/
"""

_SOLVE = """\
#!/bin/bash
set -eu
cd /workspace
{commands}
"""

_TEST = """\
#!/bin/bash
# Grades the state left under /workspace: reads plain files there, follows no link, runs nothing of it.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
work=/workspace
verdict=/logs/verifier
reward=1

fail() {{
    echo "not as asked: $1"
    reward=0
}}

# True when neither the work directory nor any part of the path is a symbolic link.
solid() {{
    local path=$work part parts
    [ ! -L "$path" ] || return 1
    IFS=/ read -r -a parts <<< "$1"
    for part in "${{parts[@]}}"; do
        path=$path/$part
        [ ! -L "$path" ] || return 1
    done
}}

# The text of a plain file, at most 64 KiB of it, without its last newlines.
text() {{
    head -c 65536 < "$work/$1" | tr '\\000' '?'
}}

file() {{
    if ! solid "$1" || [ ! -f "$work/$1" ] || [ ! -r "$work/$1" ]; then
        fail "$1 is no readable plain file"
    elif [ "$(text "$1")" != "$2" ]; then
        fail "$1 does not hold the expected text"
    fi
}}

gone() {{
    if [ -e "$work/$1" ] || [ -L "$work/$1" ]; then
        fail "$1 is still there"
    fi
}}

folder() {{
    if ! solid "$1" || [ ! -d "$work/$1" ]; then
        fail "$1 is no folder"
    fi
}}

{checks}

mkdir -p "$verdict"
echo "$reward" > "$verdict/reward.txt"
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bundled task stands in the plan."""

    family: str
    split: str
    seed: int
    phrasing: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.family}-{self.seed % 1000:02d}"


def plan() -> Iterator[Place]:
    """Every bundled task. The held-out wording stands in its own split and nowhere else."""
    for split, count in TASKS_PER_FAMILY.items():
        for number, family in enumerate(families.families_of(split)):
            for place in range(count):
                phrasing = (number + place) % HELD_OUT_PHRASING
                if split == "heldout-phrasing":
                    phrasing = HELD_OUT_PHRASING
                yield Place(family, split, _FIRST_SEEDS[split] + place, phrasing)


def _solution(puzzle: families.Puzzle) -> str:
    commands: list[str] = []
    for step in puzzle.pi:
        if step.tool == "bash":
            commands.append(step.arguments["command"])
        elif step.tool == "write":
            content, path = step.arguments["content"], step.arguments["path"]
            commands.append(f"printf '%s' {shlex.quote(content)} > {shlex.quote(path)}")
    return "\n".join(commands)


def _check_line(check: tuple[str, ...]) -> str:
    kind, *arguments = check
    if kind == "file":
        arguments[1] = arguments[1].rstrip("\n")
    return " ".join((kind, *map(shlex.quote, arguments)))


def task_files(place: Place) -> dict[str, str]:
    """Relative path to text of every file of a task directory."""
    puzzle = families.build(place.family, place.split, place.seed)
    fields = {"name": place.name, "family": place.family, "split": place.split}
    contents = {
        "task.toml": _TASK_TOML.format(**fields, phrasing=place.phrasing, seed=place.seed),
        "instruction.md": families.instruction(place.family, puzzle, place.phrasing) + "\n",
        "environment/Dockerfile": _DOCKERFILE,
        "solution/solve.sh": _SOLVE.format(commands=_solution(puzzle)),
        "tests/test.sh": _TEST.format(checks="\n".join(map(_check_line, puzzle.checks))),
    }
    return contents | {f"environment/workspace/{path}": text for path, text in puzzle.files.items()}


def bundle_files() -> dict[str, str]:
    """Relative path to text of the whole bundle."""
    return {f"{place.name}/{path}": text for place in plan() for path, text in task_files(place).items()}


def bundled_tasks() -> Path:
    """The directory that holds the bundled task directories."""
    return Path(str(files("openforgerl.demo").joinpath("tasks")))


def differences(root: Path) -> list[str]:
    """Paths under `root` that are missing, differ from the generator's, or are not its own."""
    wanted = bundle_files()
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    wrong = [path for path, text in wanted.items() if path not in found or found[path].read_text("utf-8") != text]
    return sorted(wrong + [path for path in found if path not in wanted])


@click.command()
@click.option("--root", type=click.Path(path_type=Path), default=None, help="Where; default is the package.")
@click.option("--check", is_flag=True, help="Only compare with what is there.")
def main(root: Path | None, check: bool) -> None:
    """Write the bundled tasks, or check that they are what the generator makes."""
    root = root or bundled_tasks()
    if not check:
        for path, text in bundle_files().items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8")
            target.chmod(0o755 if target.suffix == ".sh" else 0o644)
    if wrong := differences(root):
        raise click.ClickException(f"{len(wrong)} files differ from the generator: {', '.join(wrong[:5])}")
    click.echo(f"{len(list(plan()))} tasks under {root}")


if __name__ == "__main__":
    main()
