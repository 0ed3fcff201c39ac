"""What can be installed, pinned to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.harnesses.node import NodeRuntime
from openforgerl.harnesses.pi_trial import try_pi

LOCKS = Path(__file__).with_name("locks")


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A harness that comes as an npm package, with its whole dependency tree locked by integrity hashes."""

    name: str
    version: str
    package: str
    """npm name; its directory is `node_modules/<package>`."""
    package_digest: str
    """`digest_tree` of that directory as published: what "unmodified harness" means."""
    user_agent: str
    """How its model calls introduce themselves."""
    trial: Callable[[NodeRuntime, Path], None]
    """Runs the installed harness once against a scripted server; raises `InputError`. Fills the compile cache."""

    lock: Path
    """Directory of the committed `package.json` and `package-lock.json`."""


RECIPES: dict[str, Recipe] = {
    "pi": Recipe(
        name="pi",
        version="1.6.0",
        package="@earendil-works/pi-coding-agent",
        package_digest="f851b7d5c91e28201b5d3cfbbf0e84dc3dd59fe55b38edc4dca0f08a12c16365",
        user_agent="pi/1.6.0",
        trial=try_pi,
        lock=LOCKS / "pi",
    ),
}


def recipe_of(name: str) -> Recipe:
    """The recipe; `InputError` listing what can be installed."""
    recipe = RECIPES.get(name)
    if recipe is None:
        raise InputError(f"harness {name!r} cannot be installed; installable: {', '.join(sorted(RECIPES))}")
    return recipe
