"""What each verb's config holds: the shared rooms plus the verb's own sections."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from openforgerl.config import RoomsConfig, load_config, resolved_json
from openforgerl.engines.opening import engine_options
from openforgerl.errors import ConfigError
from openforgerl.orchestrator import RunOptions

T = TypeVar("T", bound=msgspec.Struct)

ENGINE_HELP = "torch:DIR, vllm:URL[,URL], sglang:URL, relay:openai:URL, relay:anthropic:URL or scripted:FILE."

EVERY_HARNESS_HELP = (
    "A harness of `openforgerl harness list`, or module:Class; repeat it to run every task in each.  [default: pi]"
)
MIXED_HARNESS_HELP = (
    "A harness of `openforgerl harness list`, or module:Class; repeat it to train in several, each group in one "
    "(weights: [mix]).  [default: pi]"
)

SANDBOX_HELP = "process, container, kubernetes or module:Class: where each attempt runs.  [default: process]"


class RunConfig(RoomsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`openforgerl run`."""

    run: RunOptions = RunOptions()
    attempts: int = 1
    """Rollouts per task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attempts(self.attempts)


class EvalConfig(RoomsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`openforgerl eval`."""

    run: RunOptions = RunOptions()
    attempts: int = 3
    """Attempts per task: k of pass@k and pass^k."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attempts(self.attempts)


class AnyConfig(RoomsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any verb's config file, for a verb that looks at its rooms alone. What other verbs add is not read."""

    run: Any = None
    attempts: Any = None
    trainer: Any = None
    verl: Any = None
    demo: Any = None
    sft: Any = None
    train: Any = None
    validation_share: Any = None


def _check_attempts(attempts: int) -> None:
    if attempts < 1:
        raise ValueError(f"attempts must be 1 or more; got {attempts}")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the flags --config, -s and --dry-run were given."""

    file: Path | None
    settings: tuple[str, ...]
    dry_run: bool


def config_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The three flags every configured verb has, handed to it as one argument `chosen`."""
    file_type = click.Path(path_type=Path, dir_okay=False)

    @click.option("-c", "--config", "config_file", type=file_type, help="A TOML config file.")
    @click.option("-s", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one value; may be repeated.")
    @click.option("--dry-run", is_flag=True, help="Print the resolved config as JSON and stop.")
    @functools.wraps(function)
    def with_chosen(*, config_file: Path | None, settings: tuple[str, ...], dry_run: bool, **flags: Any) -> Any:
        return function(**flags, chosen=Chosen(config_file, settings, dry_run))

    return with_chosen


def rooms_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`config_options` of a verb that runs attempts, and where their sandboxes are."""

    @click.option("--sandbox", metavar="BACKEND", help=SANDBOX_HELP)
    @config_options
    @functools.wraps(function)
    def with_sandbox(*, sandbox: str | None, chosen: Chosen, **flags: Any) -> Any:
        if sandbox is not None:
            chosen = replace(chosen, settings=(f"backend={sandbox}", *chosen.settings))
        return function(**flags, chosen=chosen)

    return with_sandbox


def resolve(
    schema: type[T], chosen: Chosen, *, base: dict[str, Any] | None = None, flags: dict[str, Any] | None = None
) -> T | None:
    """The verb's config, or None after printing it for --dry-run."""
    config = load_config(schema, chosen.file, chosen.settings, base=base, flags=flags)
    return None if shown(config, chosen) else config


def shown(config: msgspec.Struct, chosen: Chosen) -> bool:
    """Print the config if --dry-run was given; whether it was."""
    if chosen.dry_run:
        click.echo(resolved_json(config).decode())
    return chosen.dry_run


def given(**sections: dict[str, Any]) -> dict[str, Any]:
    """Config tree of the flags that were given: None values and empty sections are left out."""
    tree = {
        name: {key: value for key, value in section.items() if value is not None} for name, section in sections.items()
    }
    return {name: section for name, section in tree.items() if section}


def round_options(*, folder: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The argument and flags that `run` and `eval` share, handed over as `folder`, `flags` and `chosen`.

    `folder` is the default run folder.
    """
    directory = click.Path(path_type=Path, exists=True, file_okay=False)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @click.argument("tasks", type=click.Path(path_type=Path, exists=True))
        @click.option("--engine", "spec", metavar="SPEC", help=ENGINE_HELP)
        @click.option("--tokenizer", type=directory, help="Default: the engine's (torch:DIR).")
        @click.option("--harness", "harnesses", multiple=True, help=EVERY_HARNESS_HELP)
        @click.option(
            "--run", "folder", type=click.Path(path_type=Path), default=folder, show_default=True, help="Run folder."
        )
        @rooms_options
        @functools.wraps(function)
        def with_flags(
            *,
            tasks: Path,
            spec: str | None,
            tokenizer: Path | None,
            harnesses: tuple[str, ...],
            **others: Any,
        ) -> Any:
            return function(flags=_round_flags(tasks, spec, tokenizer, harnesses), **others)

        return with_flags

    return decorate


def harness_section(names: tuple[str, ...]) -> dict[str, Any]:
    """`--harness NAME`, maybe repeated, as config values; empty when the flag was not given."""
    if len(names) > 1:
        return {"mix": dict.fromkeys(names, 1.0)}
    return given(harness={"name": next(iter(names), None)})


def engine_section(spec: str | None) -> dict[str, Any]:
    """`--engine KIND:PATH` as config values; empty when the flag was not given."""
    if spec is None:
        return {}
    chosen = engine_options(spec)
    return {"kind": chosen.kind, "path": chosen.path}


def _round_flags(tasks: Path, spec: str | None, tokenizer: Path | None, harnesses: tuple[str, ...]) -> dict[str, Any]:
    """Config tree of the flags that `run` and `eval` share."""
    base: dict[str, Any] = {"tasks": {"path": str(tasks)}, "engine": engine_section(spec)}
    base |= harness_section(harnesses)
    if tokenizer is not None:
        base["tokenizer"] = str(tokenizer)
    return base


def tokenizer_directory(config: RoomsConfig) -> Path:
    """Where tokenizer and chat template are; ConfigError naming the flag when nothing says it."""
    if config.tokenizer:
        return Path(config.tokenizer)
    if not config.engine.path:
        raise ConfigError(f"which engine? give --engine {ENGINE_HELP[:-1]}, or [engine] kind and path")
    if config.engine.kind != "torch":
        raise ConfigError(f"engine {config.engine.kind} has no tokenizer of its own: give --tokenizer DIR")
    return Path(config.engine.path)
