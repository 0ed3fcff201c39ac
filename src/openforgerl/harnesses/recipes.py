"""What can be installed with npm, pinned to the byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.harnesses.node import NodeRuntime
from openforgerl.harnesses.openclaw_completion import complete_openclaw
from openforgerl.harnesses.pi_trial import try_pi

LOCKS = Path(__file__).with_name("locks")
LIGHT_WASM = "--liftoff-only"
"""V8's optimising compiler takes up to 1.6 GB and several CPU seconds for the shell grammar (tree-sitter-bash in
WebAssembly) that Qwen Code and Gemini CLI load to look at one command line; its baseline compiler takes none of it."""


class Binary(msgspec.Struct, frozen=True, kw_only=True):
    """The program of a harness that npm brings as another package for each kind of machine."""

    package: str
    """npm name of that package."""
    digest: str
    """`digest_tree` of it as published."""
    program: str
    """Path of the program inside the package."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A harness that comes as an npm package, with its whole dependency tree locked by integrity hashes."""

    name: str
    version: str
    package: str
    """npm name; its directory is `node_modules/<package>`."""
    package_digest: str
    """`digest_tree` of that directory as published: what "unmodified harness" means."""
    user_agent: str
    """How its model calls introduce themselves: what every User-Agent begins with."""
    lock: Path
    """Directory of the committed `package.json` and `package-lock.json` (written by `scripts/lock_harness.py`)."""
    entry: str = ""
    """Path inside the package of the JavaScript that Node runs; empty where there is a binary."""
    node_flags: tuple[str, ...] = ()
    """Node's own arguments, before the entry."""
    binaries: Mapping[str, Binary] = {}
    """Machine (`platform.machine()`) → the program for it, where it is no JavaScript."""
    complete: Callable[[NodeRuntime, Path], None] | None = None
    """Does what the package's installation leaves to its first start, before anything is digested."""
    trial: Callable[[NodeRuntime, Path], None] | None = None
    """Runs the installed harness once against a scripted server; raises `InputError`. Fills Node's compile cache."""

    def binary(self, machine: str) -> Binary | None:
        """The program for a machine, None for a harness in JavaScript. `InputError` for a machine it has none for."""
        if not self.binaries:
            return None
        found = self.binaries.get(machine)
        if found is None:
            raise InputError(f"harness {self.name} {self.version} runs on {', '.join(self.binaries)}, not on {machine}")
        return found

    def pinned(self, machine: str) -> dict[str, str]:
        """Package → its digest as published, for all that is pinned to the byte on a machine."""
        binary = self.binary(machine)
        return {self.package: self.package_digest, **({binary.package: binary.digest} if binary else {})}


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="pi",
            version="1.6.0",
            package="@earendil-works/pi-coding-agent",
            package_digest="f851b7d5c91e28201b5d3cfbbf0e84dc3dd59fe55b38edc4dca0f08a12c16365",
            user_agent="pi/1.6.0",
            entry="dist/bundle/cli.js",
            trial=try_pi,
            lock=LOCKS / "pi",
        ),
        Recipe(
            name="codex",
            version="0.171.0",
            package="@openai/codex",
            package_digest="a5a82e5abf5998ad482bd4423673873516749d40f9379be131e26184f81cff24",
            user_agent="codex_exec/0.171.0",
            binaries={
                "x86_64": Binary(
                    package="@openai/codex-linux-x64",
                    digest="9b46bbdf7071e9a99e97976ff8d7fb95d319e3881725a087abd70262ad0384c6",
                    program="vendor/x86_64-unknown-linux-musl/bin/codex",
                ),
                "aarch64": Binary(
                    package="@openai/codex-linux-arm64",
                    digest="e78e9578eb8688695542930cda0cea4d7481187fb7ba5fac2d2e3e82342008e1",
                    program="vendor/aarch64-unknown-linux-musl/bin/codex",
                ),
            },
            lock=LOCKS / "codex",
        ),
        Recipe(
            name="claude-code",
            version="2.1.332",
            package="@anthropic-ai/claude-code",
            package_digest="de17e8afde61091904328a8592200744df71435515cfc2029a5c728b328290c8",
            user_agent="claude-cli/2.1.332",
            binaries={
                "x86_64": Binary(
                    package="@anthropic-ai/claude-code-linux-x64",
                    digest="9525bc55f7314ff6472de298de175d39e7b2fa974a5c056feb825935cbee9f92",
                    program="claude",
                ),
                "aarch64": Binary(
                    package="@anthropic-ai/claude-code-linux-arm64",
                    digest="c7a3ae73430814e61fe67b2b77a64771a66a79209d1b373baed31d199c1d21a5",
                    program="claude",
                ),
            },
            lock=LOCKS / "claude-code",
        ),
        Recipe(
            name="opencode",
            version="1.18.33",
            package="opencode-ai",
            package_digest="e6f36e7ce119ae428c6e606e641b381e5521f7f0391672cb2871248cdfe74d83",
            user_agent="opencode/1.18.33",
            binaries={
                "x86_64": Binary(
                    package="opencode-linux-x64",
                    digest="3fa9c5b9c10b97fcb9243da7e36833fc96079e3e95dd6771800c1f58f2a00eb8",
                    program="bin/opencode",
                ),
            },
            lock=LOCKS / "opencode",
        ),
        Recipe(
            name="qwen-code",
            version="0.24.4",
            package="@qwen-code/qwen-code",
            package_digest="a244543bee31b05c1ddfa373cf5358c72c39b3a516524c9a7173a1b8dff1b4fc",
            user_agent="QwenCode/0.24.4",
            # Not cli-entry.js: it looks for self-updates and starts this, with --expose-gc, as another process.
            entry="cli.js",
            node_flags=("--expose-gc", LIGHT_WASM),
            lock=LOCKS / "qwen-code",
        ),
        Recipe(
            name="gemini-cli",
            version="0.61.0",
            package="@google/gemini-cli",
            package_digest="c8c63a52921ad219f99e6174402a6d4ef37a198bd3bf64af11000b6fe2027add",
            user_agent="GeminiCLI",
            entry="bundle/gemini.js",
            node_flags=(LIGHT_WASM,),
            lock=LOCKS / "gemini-cli",
        ),
        Recipe(
            name="openclaw",
            version="2026.9.6",
            package="openclaw",
            package_digest="03384986e3a0a4f0c8e066a41e4b1416ce167048e18783f87b7b5a51229e6313",
            user_agent="OpenAI/JS 7.15.0",
            entry="openclaw.mjs",
            complete=complete_openclaw,
            lock=LOCKS / "openclaw",
        ),
    )
}


def recipe_of(name: str) -> Recipe:
    """The recipe; `InputError` listing what can be installed."""
    recipe = RECIPES.get(name)
    if recipe is None:
        raise InputError(f"harness {name!r} cannot be installed; installable: {', '.join(sorted(RECIPES))}")
    return recipe
