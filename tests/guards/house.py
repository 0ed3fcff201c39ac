"""Finds what the house forbids (DESIGN §4): sizes, names, swallowed errors, mutable module state, leaks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 500, 80, 8
HIDING_NAMES = re.compile(r"^(utils?|helpers?|common|misc|manager|handler|stuff)$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
PRIVATE_PLACES = re.compile(
    "|".join(f"/{top}/{rest}" for top, rest in (("work", r"(main|shared|\.\w+)"), ("farm", "in")))
)


def findings(source: str, name: str) -> Iterator[str]:
    """One line for each thing wrong with a Python source text."""
    lines = source.count("\n") + 1
    if lines > MAX_FILE:
        yield f"{name}: {lines} lines (at most {MAX_FILE})"
    if HIDING_NAMES.match(Path(name).stem):
        yield f"{name}: the name hides a missing noun"
    for number, line in enumerate(source.splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"{name}:{number}: unfinished: {line.strip()}"
    tree = ast.parse(source)
    for node in tree.body:
        yield from _module_state(node, name)
    for node in ast.walk(tree):
        yield from _function(node, name)
        if isinstance(node, ast.ExceptHandler) and all(isinstance(inner, ast.Pass) for inner in node.body):
            yield f"{name}:{node.lineno}: an error is swallowed without a word"


def _function(node: ast.AST, name: str) -> Iterator[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    size = (node.end_lineno or node.lineno) - node.lineno + 1
    if size > MAX_FUNCTION:
        yield f"{name}:{node.lineno}: {node.name} has {size} lines (at most {MAX_FUNCTION})"
    arguments = node.args
    count = sum(
        argument.arg not in ("self", "cls")
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    )
    if count > MAX_PARAMETERS:
        yield f"{name}:{node.lineno}: {node.name} takes {count} parameters (at most {MAX_PARAMETERS})"


def _module_state(node: ast.stmt, name: str) -> Iterator[str]:
    """A lower-case module variable bound to a mutable literal is state that every test would share."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    value = getattr(node, "value", None)
    mutable = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
    for target in targets:
        if mutable and isinstance(target, ast.Name) and target.id.lstrip("_").islower() and target.id != "__all__":
            yield f"{name}:{node.lineno}: {target.id} is mutable module state"
