"""Reads what another trainer calls and takes, from a checkout of its source: names and signatures, no code.

    python scripts/read_contracts.py slime CHECKOUT > tests/training/contracts/slime.json
    python scripts/read_contracts.py openrlhf CHECKOUT > tests/training/contracts/openrlhf.json

The tests hold our adapters to these files; run it again for a newer version and see what changed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Print the contract of the trainer named first, read from the checkout named second."""
    name, checkout = sys.argv[1], Path(sys.argv[2])
    reader = {"slime": slime, "openrlhf": openrlhf}[name]
    commit = _git(checkout, "rev-parse", "HEAD")
    print(json.dumps({"commit": commit, **reader(checkout)}, indent=2))


def slime(checkout: Path) -> dict[str, Any]:
    """slime's sample, data source, and how its rollout manager calls us."""
    types = _tree(checkout, "slime/utils/types.py")
    source = _tree(checkout, "slime/rollout/data_source.py")
    manager = _tree(checkout, "slime/ray/rollout.py")
    return {
        "sample_fields": _fields(_class(types, "Sample")),
        "statuses": {one.targets[0].id: one.value.value for one in _class(types, "Status").body if _named(one)},
        "data_source": {one.name: _arguments(one) for one in _functions(_class(source, "DataSource"))},
        "rollout_call": _call(manager, "call_rollout_fn", "generate_rollout"),
        "reward_call": _call(manager, "custom_reward_post_process_func", None),
    }


def openrlhf(checkout: Path) -> dict[str, Any]:
    """OpenRLHF's agent executor, and what it must return."""
    agent = _tree(checkout, "openrlhf/utils/agent.py")
    base = _class(agent, "AgentExecutorBase")
    execute = next(one for one in _functions(base) if one.name == "execute")
    returned = [
        node
        for node in ast.walk(_class(agent, "MultiTurnAgentExecutor"))
        if isinstance(node, ast.Dict) and any(_text(key) == "observation_tokens" for key in node.keys)
    ]
    return {"execute": _arguments(execute), "returns": [_text(key) for key in returned[0].keys]}


def _tree(checkout: Path, path: str) -> ast.Module:
    return ast.parse(_git(checkout, "show", f"HEAD:{path}"))


def _git(checkout: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", checkout, *words], capture_output=True, text=True, check=True).stdout.strip()


def _class(tree: ast.AST, name: str) -> ast.ClassDef:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def _functions(owner: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _fields(owner: ast.ClassDef) -> list[str]:
    return [
        node.target.id for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args if argument.arg != "self"]


def _named(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)


def _call(tree: ast.AST, name: str, first: str | None) -> dict[str, Any]:
    """Positional arguments and keywords of the first call of `name` (whose own first argument ends in `first`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(name):
            words = [ast.unparse(argument) for argument in node.args]
            if first is None or words[0].endswith(f".{first}"):
                return {"positional": words, "keywords": [keyword.arg for keyword in node.keywords]}
    raise SystemExit(f"no call of {name}")


def _text(node: ast.expr | None) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


if __name__ == "__main__":
    main()
