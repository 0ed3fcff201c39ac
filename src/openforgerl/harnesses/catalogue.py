"""Every harness that can be installed, whatever registry it comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.harnesses.installation import Installation, inspect_recipe, install_recipe
from openforgerl.harnesses.pip_installation import (
    PIP_RECIPES,
    PipInstallation,
    PipRecipe,
    inspect_pip,
    install_pip,
)
from openforgerl.harnesses.recipes import RECIPES, Recipe


def installable() -> dict[str, str]:
    """Harness name → the version that is pinned, sorted by name."""
    return {name: recipe.version for name, recipe in sorted({**RECIPES, **PIP_RECIPES}.items())}


def install(name: str, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Install harness `name` unless it is there and whole; its directory.

    `report` gets one line for each step. Needs the network only when something is missing. Raises
    `InputError` naming the failed command and the end of its output.
    """
    recipe = _recipe(name)
    if isinstance(recipe, PipRecipe):
        return install_pip(recipe, cache_dir, report)
    return install_recipe(recipe, cache_dir, report)


def inspect(name: str, cache_dir: Path) -> Installation | PipInstallation:
    """The installation, fully checked (reads every file: seconds).

    Raises `InputError` saying what is absent or changed and which command mends it.
    """
    recipe = _recipe(name)
    if isinstance(recipe, PipRecipe):
        return inspect_pip(recipe, cache_dir)
    return inspect_recipe(recipe, cache_dir)


def installed(name: str, cache_dir: Path) -> Installation | PipInstallation | None:
    """The installation, or None when it is absent, partial or changed (`inspect` says which)."""
    recipe = _recipe(name)
    try:
        return inspect(recipe.name, cache_dir)
    except InputError:
        return None


def _recipe(name: str) -> Recipe | PipRecipe:
    recipe = RECIPES.get(name) or PIP_RECIPES.get(name)
    if recipe is None:
        raise InputError(f"harness {name!r} cannot be installed; installable: {', '.join(installable())}")
    return recipe
