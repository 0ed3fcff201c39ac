"""Every kind of failure that the source can give, read from the source itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

RAISERS = {"StageError": 1, "_failed": 0, "failed": 0, "_ended": 0, "_error": 0, "_failure": 0, "_limited": 1}
"""Function → which positional argument is the kind."""
TABLES = ("_POD_REASONS", "_TERMINATED", "_CODES", "_HOPELESS")
ROOMS = ("rollout", "orchestrator", "sandboxes", "verifiers", "errors.py")


def kinds(package: Path) -> set[str]:
    """The kinds of all rooms below `package` that raise them."""
    files = [file for room in ROOMS for file in _files(package / room)]
    found = {kind for file in files for kind in _in_file(ast.parse(file.read_text()))}
    return {kind for kind in found if re.fullmatch(r"[a-z_]+\*?", kind)}  # the rest are messages


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _in_file(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                place = RAISERS.get(name)
                if place is not None and len(node.args) > place:
                    yield from _words(node.args[place])
                for keyword in node.keywords:
                    if keyword.arg == "kind" and name in ("Failure", "Waiting", *RAISERS):
                        yield from _words(keyword.value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == "INTERRUPTED" or name == "kind":
                yield from _words(value)
            case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id="kind"), *_])], value=value):
                yield from _words(value, first=True)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(values=values)) if name in TABLES:
                for value in values:
                    yield from _words(value, first=True)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(values=values)) if name in TABLES:
                for value in values:
                    yield from _words(value, first=True)
            case ast.FunctionDef(name="_kind"):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield from _words(inner.value)
            case _:
                pass


def _words(node: ast.expr, *, first: bool = False) -> Iterator[str]:
    """String constants that an expression may be: itself, both sides of a condition, an f-string's fixed start."""
    match node:
        case ast.Constant(value=str() as word):
            yield word
        case ast.IfExp(body=body, orelse=orelse):
            yield from _words(body)
            yield from _words(orelse)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _words(value)
        case ast.JoinedStr(values=[ast.Constant(value=str() as start), *_]):
            yield start + "*"
        case ast.Tuple(elts=[head, *_]) if first:
            yield from _words(head)
        case ast.Call(func=ast.Attribute(attr="get"), args=[_, default]):
            yield from _words(default)
        case _:
            pass
