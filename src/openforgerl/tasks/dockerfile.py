"""A Dockerfile as instructions: continuation lines joined, comments gone, variables filled in."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping

import msgspec

from openforgerl.errors import TaskError

_VARIABLE = re.compile(r"(\\)?\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)|(.))?", re.DOTALL)

_HERE_DOCUMENT = re.compile(r"<<-?[\"']?([A-Za-z_][A-Za-z0-9_]*)[\"']?")


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction: its name in capitals, the rest of its text, and the 1-based line it starts on."""

    line: int
    name: str
    rest: str


def parse(text: str) -> list[Instruction]:
    """All instructions in order, here-documents skipped over. Raises `TaskError` on a line that is none."""
    instructions: list[Instruction] = []
    pending, start = "", 0
    until: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if until:
            if line.strip() == until[0]:
                until.pop(0)
            continue
        if line.lstrip().startswith("#") or (pending and not line.strip()):
            continue  # comments and blank lines may stand inside a continuation
        start = start or number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        whole = (pending + line).strip()
        if whole:
            name, *rest = whole.split(None, 1)
            if not name.isalpha():
                raise TaskError(f"Dockerfile line {start}: {whole[:60]!r} is no instruction")
            instruction = Instruction(line=start, name=name.upper(), rest=rest[0] if rest else "")
            instructions.append(instruction)
            until = _HERE_DOCUMENT.findall(instruction.rest) if instruction.name in ("RUN", "COPY", "ADD") else []
        pending, start = "", 0
    if pending or until:
        raise TaskError(f"Dockerfile ends inside {'a here-document' if until else f'the line continued at {start}'}")
    return instructions


def workdir_of(text: str) -> str | None:
    """The working directory that the Dockerfile ends in; None when it sets none.

    Reads any Dockerfile, also those that need a container. Raises `TaskError` when the directory's name rests
    on a variable of the base image.
    """
    workdir: str | None = None
    env: dict[str, str] = {}
    for instruction in parse(text):
        if instruction.name == "ENV" or (instruction.name == "ARG" and "=" in instruction.rest):
            env.update(environment(instruction, env, strict=False))
        elif instruction.name == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir or "/", fill(instruction, instruction.rest, env)))
    return workdir


def environment(instruction: Instruction, known: Mapping[str, str], *, strict: bool = True) -> dict[str, str]:
    """The variables of one ENV instruction, in either spelling. Not `strict`: unknown names stay as written."""
    rest = instruction.rest
    first = rest.split(None, 1)[0] if rest else ""
    if "=" not in first:
        name, _, value = rest.partition(" ")
        if not name or not value.strip():
            raise TaskError(f"Dockerfile line {instruction.line}: ENV needs NAME=value")
        return {name: fill(instruction, value.strip(), known, strict=strict)}
    result: dict[str, str] = {}
    for word in words(instruction, rest):
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise TaskError(f"Dockerfile line {instruction.line}: ENV {word!r} needs the form NAME=value")
        result[name] = fill(instruction, value, known, strict=strict)
    return result


def words(instruction: Instruction, text: str) -> list[str]:
    """Shell words; `TaskError` on an open quote."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise TaskError(f"Dockerfile line {instruction.line}: {error} in {text[:60]!r}") from error


def fill(instruction: Instruction, text: str, known: Mapping[str, str], *, strict: bool = True) -> str:
    """`$NAME` and `${NAME}` from `known`; `TaskError` (if `strict`) on a name that no ENV set, and other forms."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        name = match[2] or match[3]
        if name is None or name not in known:
            if not strict:
                return match[0]
            raise TaskError(f"Dockerfile line {instruction.line}: {match[0]!r} is not set by an ENV above it")
        return known[name]

    return _VARIABLE.sub(value, text)
