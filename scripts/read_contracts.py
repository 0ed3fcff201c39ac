"""Reads what another trainer calls and takes, from its source: names and signatures; nothing of it is imported.

    python scripts/read_contracts.py slime CHECKOUT > tests/training/contracts/slime.json
    python scripts/read_contracts.py openrlhf FOLDER > tests/training/contracts/openrlhf.json
    python scripts/read_contracts.py trl FOLDER > tests/training/contracts/trl.json

CHECKOUT is a git repository; FOLDER holds the package of an unpacked wheel (`pip download --no-deps openrlhf`, `unzip`)
or of an installed one.

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
    """Print the contract of the trainer named first, read from the source named second."""
    name, source = sys.argv[1], Path(sys.argv[2])
    reader = {"slime": slime, "openrlhf": openrlhf, "trl": trl}[name]
    print(json.dumps(reader(source), indent=2))


def slime(checkout: Path) -> dict[str, Any]:
    """slime's sample, data source, and how its rollout manager calls us."""
    types = _tree(checkout, "slime/utils/types.py")
    source = _tree(checkout, "slime/rollout/data_source.py")
    manager = _tree(checkout, "slime/ray/rollout.py")
    return {
        "commit": _git(checkout, "rev-parse", "HEAD"),
        "sample_fields": _fields(_class(types, "Sample")),
        "statuses": {one.targets[0].id: one.value.value for one in _class(types, "Status").body if _named(one)},
        "data_source": {one.name: _arguments(one) for one in _functions(_class(source, "DataSource"))},
        "rollout_call": _call(manager, "call_rollout_fn", "generate_rollout"),
        "reward_call": _call(manager, "custom_reward_post_process_func", None),
    }


def openrlhf(folder: Path) -> dict[str, Any]:
    """OpenRLHF's agent executor, how it is called, the engine that it is given, and what is read of its answer."""
    agent = _file(folder, "openrlhf/utils/agent.py")
    engine = _file(folder, "openrlhf/trainer/ray/vllm_engine.py")
    taken = _function(
        _file(folder, "openrlhf/trainer/ppo_utils/samples_generator.py"), "_process_response_into_experience"
    )
    subscripts = (node for node in ast.walk(taken) if isinstance(node, ast.Subscript))
    read = {_text(node.slice) for node in subscripts if ast.unparse(node.value) == "response"}
    read |= {_text(call.args[0]) for call in _calls(taken, "response.get")}
    (call,) = _calls(engine, "self.executor.execute")
    flags = [
        _text(call.args[0]) for call in _calls(_file(folder, "openrlhf/cli/train_ppo_ray.py"), "parser.add_argument")
    ]
    return {
        "version": _version(folder, "openrlhf"),
        "flag": next(flag for flag in flags if flag.endswith("agent_func_path")),
        "execute": _arguments(_function(_class(agent, "AgentExecutorBase"), "execute")),
        "execute_call": [word.arg for word in call.keywords],
        "generate": _arguments(_function(engine, "generate")),
        "read": sorted(read),
    }


def trl(folder: Path) -> dict[str, Any]:
    """How TRL's GRPO trainer calls a rollout function and a reward function, and what it reads of the answer."""
    tree = _file(folder, "trl/trainer/grpo_trainer.py")
    generate = _function(tree, "_generate")
    (call,) = _calls(generate, "self.rollout_func")
    (required,) = [
        ast.literal_eval(node.value)
        for node in ast.walk(generate)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "required_keys"
    ]
    (mask,) = _calls(generate, "extra_fields.pop")
    reward = max(_calls(_function(tree, "_calculate_rewards"), "reward_func"), key=lambda call: len(call.keywords))
    config = _fields(_class(_file(folder, "trl/trainer/grpo_config.py"), "GRPOConfig"))
    sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {
        "version": _version(folder, "trl"),
        "rollout_call": [ast.unparse(word) for word in call.args],
        "required": sorted(required),
        "mask": _text(mask.args[0]),
        "trainer_init": [name for name in _arguments(_function(tree, "__init__")) if "func" in name],
        "reward_call": [word.arg for word in reward.keywords if word.arg],
        "sampling_arguments": [name for name in sampling if name in config],
    }


def _file(folder: Path, path: str) -> ast.Module:
    return ast.parse((folder / path).read_text("utf-8"))


def _version(folder: Path, name: str) -> str:
    """Of the wheel: beside the package when it is installed, beside its `.data` folder when it is unpacked."""
    for place in (folder.resolve(), *folder.resolve().parents[:2]):
        for metadata in place.glob(f"{name}-*.dist-info/METADATA"):
            return next(line for line in metadata.read_text().splitlines() if line.startswith("Version: "))[9:]
    raise SystemExit(f"no metadata of {name} beside {folder}")


def _function(tree: ast.AST, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return next(node for node in found if node.name == name)


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


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
