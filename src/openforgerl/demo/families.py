"""Families of terminal work: from (family, split, seed, phrasing) to a whole task and its expert.

Everything is derived from those four values, so a bundled task directory can be rebuilt, and the
scripted teacher knows its steps from the directory's `[metadata]` alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from openforgerl.demo.phrasing import HELD_OUT_PHRASING, PHRASINGS
from openforgerl.demo.words import Draw, pool_of
from openforgerl.errors import TaskError

HELD_OUT_FAMILIES: tuple[str, ...] = ("copy-into", "append-count")
"""Never trained on; each combines what two trained families do."""

HARD_FAMILIES: tuple[str, ...] = ("replace", "sum")
"""Beyond the demo's model within the demo's time, so neither trained on nor measured; bundled for larger ones."""

SPLIT_POOLS: dict[str, str] = {
    "sft": "train",
    "rl": "train",
    "validation": "validation",
    "heldout": "heldout",
    "heldout-phrasing": "heldout",
    "heldout-family": "heldout",
    "hard": "heldout",
}
"""Which pool of name combinations each split draws from."""


@dataclass(frozen=True, slots=True)
class Step:
    """One tool call of the expert."""

    tool: str
    arguments: dict[str, str]


@dataclass(frozen=True, slots=True)
class Expert:
    """What a competent agent does: calls in order, then `final` as its answer."""

    steps: tuple[Step, ...]
    final: str = "Done."


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One task before it is laid on disk. `checks` are lines of the verifier's shell dialect (see bundle)."""

    names: tuple[str, ...]
    """The combination of names that decides the pool."""
    slots: dict[str, str]
    """Values for the wording's placeholders."""
    files: dict[str, str]
    """Start state: path under the work directory to text."""
    checks: tuple[tuple[str, ...], ...]
    """("file", path, text) · ("gone", path) · ("folder", path)."""
    pi: tuple[Step, ...]
    """Expert calls with pi's tools bash, read and write."""
    react: tuple[Step, ...] = field(default=())
    """Expert calls with a shell alone; the same as `pi` when empty."""
    partial: str = ""
    """A shell script that does only half of the work; graded 0."""


def _bash(command: str) -> Step:
    return Step("bash", {"command": command})


def _write(path: str, content: str) -> Step:
    return Step("write", {"path": path, "content": content})


def _kept(files: dict[str, str], *changed: str) -> tuple[tuple[str, ...], ...]:
    return tuple(("file", path, text) for path, text in files.items() if path not in changed)


def _copy(draw: Draw) -> Puzzle:
    a, b = draw.file(), draw.file()
    files = {a: draw.lines(2), draw.file(): draw.lines(1)}
    return Puzzle(
        names=(a, b),
        slots={"a": a, "b": b},
        files=files,
        checks=(("file", b, files[a]), *_kept(files)),
        pi=(_bash(f"cp {a} {b}"),),
        partial=f"mv {a} {b}",
    )


def _rename(draw: Draw) -> Puzzle:
    a, b = draw.file(), draw.file()
    files = {a: draw.lines(2), draw.file(): draw.lines(1)}
    return Puzzle(
        names=(a, b),
        slots={"a": a, "b": b},
        files=files,
        checks=(("file", b, files[a]), ("gone", a), *_kept(files, a)),
        pi=(_bash(f"mv {a} {b}"),),
        partial=f"cp {a} {b}",
    )


def _move(draw: Draw) -> Puzzle:
    a, d = draw.file(), draw.noun()
    files = {a: draw.lines(2), f"{d}/{draw.file()}": draw.lines(1)}
    return Puzzle(
        names=(a, d),
        slots={"a": a, "d": d},
        files=files,
        checks=(("file", f"{d}/{a}", files[a]), ("gone", a), *_kept(files, a)),
        pi=(_bash(f"mv {a} {d}/"),),
        partial=f"cp {a} {d}/",
    )


def _copy_into(draw: Draw) -> Puzzle:
    a, d = draw.file(), draw.noun()
    files = {a: draw.lines(2), f"{d}/{draw.file()}": draw.lines(1)}
    return Puzzle(
        names=(a, d),
        slots={"a": a, "d": d},
        files=files,
        checks=(("file", f"{d}/{a}", files[a]), *_kept(files)),
        pi=(_bash(f"cp {a} {d}/"),),
        partial=f"mv {a} {d}/",
    )


def _delete(draw: Draw) -> Puzzle:
    a, b = draw.file(), draw.file()
    files = {name: draw.lines(1) for name in (a, b, draw.file())}
    return Puzzle(
        names=(a, b),
        slots={"a": a, "b": b},
        files=files,
        checks=(("gone", a), ("gone", b), *_kept(files, a, b)),
        pi=(_bash(f"rm {a} {b}"),),
        partial=f"rm {a}",
    )


def _tree(draw: Draw) -> Puzzle:
    parts = draw.nouns(draw.rng.choice((2, 2, 3)))
    path = "/".join(parts)
    files = {draw.file(): draw.lines(1)}
    return Puzzle(
        names=tuple(parts),
        slots={"p": path},
        files=files,
        checks=(("folder", path), *_kept(files)),
        pi=(_bash(f"mkdir -p {path}"),),
        partial=f"mkdir {parts[0]}",
    )


def _write_text(draw: Draw) -> Puzzle:
    a, words = draw.file(), draw.nouns(draw.rng.choice((2, 2, 3)))
    text, files = " ".join(words), {draw.file(): draw.lines(1)}
    return Puzzle(
        names=(a, *words),
        slots={"a": a, "t": text},
        files=files,
        checks=(("file", a, text), *_kept(files)),
        pi=(_write(a, text),),
        react=(_bash(f"echo {text} > {a}"),),
        partial=f"echo {words[0]} > {a}",
    )


def _append(draw: Draw) -> Puzzle:
    a, w = draw.file(), draw.noun()
    files = {a: draw.lines(2), draw.file(): draw.lines(1)}
    return Puzzle(
        names=(a, w),
        slots={"a": a, "w": w},
        files=files,
        checks=(("file", a, f"{files[a]}{w}"), *_kept(files, a)),
        pi=(_bash(f"echo {w} >> {a}"),),
        partial=f"echo {w} > {a}",
    )


def _count(draw: Draw) -> Puzzle:
    a, b, n = draw.file(), draw.file(), draw.rng.randint(3, 9)
    files = {a: draw.lines(n), draw.file(): draw.lines(1)}
    return Puzzle(
        names=(a, b),
        slots={"a": a, "b": b},
        files=files,
        checks=(("file", b, str(n)), *_kept(files)),
        pi=(_bash(f"wc -l < {a} > {b}"),),
        partial=f"wc -l {a} > {b}",
    )


def _append_count(draw: Draw) -> Puzzle:
    a, b, n = draw.file(), draw.file(), draw.rng.randint(3, 9)
    files = {a: draw.lines(n), b: draw.lines(1), draw.file(): draw.lines(1)}
    return Puzzle(
        names=(a, b),
        slots={"a": a, "b": b},
        files=files,
        checks=(("file", b, f"{files[b]}{n}"), *_kept(files, b)),
        pi=(_bash(f"wc -l < {a} >> {b}"),),
        partial=f"wc -l < {a} > {b}",
    )


def _line(draw: Draw) -> Puzzle:
    a, b, n = draw.file(), draw.file(), draw.rng.randint(4, 9)
    k, files = draw.rng.randint(2, n), {a: draw.lines(n), draw.file(): draw.lines(1)}
    return Puzzle(
        names=(a, b, str(k)),
        slots={"a": a, "b": b, "k": str(k)},
        files=files,
        checks=(("file", b, files[a].splitlines()[k - 1]), *_kept(files)),
        pi=(_bash(f"sed -n {k}p {a} > {b}"),),
        partial=f"head -n {k} {a} > {b}",
    )


def _replace(draw: Draw) -> Puzzle:
    a, (x, y) = draw.file(), draw.nouns(2)
    files = {a: f"{draw.noun()}={x}\n{draw.noun()}={draw.noun()}\n", draw.file(): f"{x}\n"}
    return Puzzle(
        names=(x, y, a),
        slots={"a": a, "x": x, "y": y},
        files=files,
        checks=(("file", a, files[a].replace(f"={x}\n", f"={y}\n")), *_kept(files, a)),
        pi=(_bash(f"sed -i s/{x}/{y}/ {a}"),),
        partial=f"sed s/{x}/{y}/ {a}",
    )


def _sort(draw: Draw) -> Puzzle:
    a, b, words = draw.file(), draw.file(), draw.nouns(draw.rng.randint(3, 5))
    if words == sorted(words):
        words.reverse()
    files = {a: "".join(f"{word}\n" for word in words), draw.file(): draw.lines(1)}
    return Puzzle(
        names=(a, b),
        slots={"a": a, "b": b},
        files=files,
        checks=(("file", b, "\n".join(sorted(words))), *_kept(files)),
        pi=(_bash(f"sort {a} > {b}"),),
        partial=f"cp {a} {b}",
    )


def _find(draw: Draw) -> Puzzle:
    w, b, paths = draw.noun(), draw.file(), [draw.file() for _ in range(3)]
    files = {path: draw.lines(2) for path in paths}
    found = draw.rng.choice(paths)
    files[found] += f"{w}\n"
    look = _bash(f"grep -l {w} *")
    return Puzzle(
        names=(w, b),
        slots={"w": w, "b": b},
        files=files,
        checks=(("file", b, found), *_kept(files)),
        pi=(look, _write(b, found)),
        react=(look, _bash(f"echo {found} > {b}")),
        partial=f"grep {w} {found} > {b}",
    )


def _sum(draw: Draw) -> Puzzle:
    a, b = draw.file(), draw.file()
    numbers = [draw.rng.randint(2, 40) for _ in range(draw.rng.randint(3, 5))]
    files = {a: "".join(f"{number}\n" for number in numbers), draw.file(): draw.lines(1)}
    return Puzzle(
        names=(a, b),
        slots={"a": a, "b": b},
        files=files,
        checks=(("file", b, str(sum(numbers))), *_kept(files)),
        pi=(_bash(f"printf %d $(($(paste -sd+ {a}))) > {b}"),),
        partial=f"cat {a} > {b}",
    )


def _lookup(draw: Draw) -> Puzzle:
    a, b, k, v = draw.file(), draw.file(), draw.noun(), draw.noun()
    files = {a: f"{k}={v}\n", draw.file(): draw.lines(1)}
    return Puzzle(
        names=(k, a, b),
        slots={"k": k, "a": a, "b": b},
        files=files,
        checks=(("file", b, v), *_kept(files)),
        pi=(Step("read", {"path": a}), _write(b, v)),
        react=(_bash(f"cat {a}"), _bash(f"echo {v} > {b}")),
        partial=f"cp {a} {b}",
    )


FAMILIES: dict[str, Callable[[Draw], Puzzle]] = {
    "copy": _copy,
    "rename": _rename,
    "move": _move,
    "delete": _delete,
    "tree": _tree,
    "write": _write_text,
    "append": _append,
    "count": _count,
    "line": _line,
    "replace": _replace,
    "sort": _sort,
    "find": _find,
    "sum": _sum,
    "lookup": _lookup,
    "copy-into": _copy_into,
    "append-count": _append_count,
}
TRAINING_FAMILIES: tuple[str, ...] = tuple(name for name in FAMILIES if name not in HELD_OUT_FAMILIES + HARD_FAMILIES)


def families_of(split: str) -> tuple[str, ...]:
    """The families that a split holds; no family is in two of the three sets."""
    return {"heldout-family": HELD_OUT_FAMILIES, "hard": HARD_FAMILIES}.get(split, TRAINING_FAMILIES)


def build(family: str, split: str, seed: int) -> Puzzle:
    """Draw the task of `family` for `seed` whose combination of names lies in the split's pool.

    Raises TaskError for an unknown family or split, and for a family that the split does not hold.
    """
    if family not in FAMILIES or split not in SPLIT_POOLS:
        raise TaskError(f"no demo family {family!r} with split {split!r}; see families.FAMILIES and SPLIT_POOLS")
    if family not in families_of(split):
        raise TaskError(f"split {split!r} holds the families {', '.join(families_of(split))}; not {family!r}")
    draws = Random(f"{family}/{seed}")
    while True:
        puzzle = FAMILIES[family](Draw(draws))
        if pool_of(family, puzzle.names) == SPLIT_POOLS[split]:
            return puzzle


def instruction(family: str, puzzle: Puzzle, phrasing: int) -> str:
    """The task in words. `phrasing` 0 to 2 are for training, 3 is held out."""
    if not 0 <= phrasing <= HELD_OUT_PHRASING:
        raise TaskError(f"phrasing {phrasing} of family {family!r} does not exist; use 0 to {HELD_OUT_PHRASING}")
    return PHRASINGS[family][phrasing].format_map(puzzle.slots)


SHELL_TOOLS: Mapping[str, tuple[str, str]] = {
    "react": ("bash", "command"),
    "codex": ("exec_command", "cmd"),
    "claude-code": ("Bash", "command"),
}
"""Harness whose expert uses the shell alone → that tool's name and its parameter."""


def expert(puzzle: Puzzle, harness: str) -> Expert:
    """The expert's calls in the tools of `harness`: pi's three, or the one tool that runs a shell command.

    Raises TaskError for a harness whose tools no expert speaks.
    """
    if harness == "pi":
        return Expert(puzzle.pi)
    if harness not in SHELL_TOOLS:
        raise TaskError(f"no expert speaks the tools of {harness!r}; harnesses: pi, {', '.join(SHELL_TOOLS)}")
    tool, parameter = SHELL_TOOLS[harness]
    steps = puzzle.react or puzzle.pi
    return Expert(tuple(Step(tool, {parameter: step.arguments["command"]}) for step in steps))


def expert_steps(task_dir: Path, harness: str) -> Expert:
    """The expert for a bundled task, re-derived from its `[metadata]`.

    Raises TaskError when the directory was not made by this generator.
    """
    try:
        metadata = tomllib.loads((task_dir / "task.toml").read_text("utf-8"))["metadata"]
        family, split, seed = metadata["family"], metadata["split"], metadata["seed"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"{task_dir}: no demo task ([metadata] needs family, split and seed)") from error
    return expert(build(family, split, seed), harness)
