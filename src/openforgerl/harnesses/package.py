"""An installed npm harness as its adapter sees it: what to mount, what to start, what to put on record."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.harnesses.installation import Installation, default_cache, inspect
from openforgerl.harnesses.node import INSIDE as NODE_INSIDE
from openforgerl.harnesses.node import find_node
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.recipes import recipe_of
from openforgerl.types import HarnessContext, JsonValue, Layer

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ARGUMENT_LIMIT = 100_000
"""Bytes of one command-line argument that are surely accepted (the kernel's limit is 128 KiB)."""


class InstalledPackage:
    """The installation of one recipe. Checked when its layers are first asked for, once per instance."""

    def __init__(self, name: str, options: HarnessOptions, *, machine: str | None = None) -> None:
        self.recipe = recipe_of(name)
        self.inside = f"/opt/{name}"
        """Where a sandbox finds the installation."""
        self._machine = machine or platform.machine()
        self._cache = Path(options.cache) if options.cache else default_cache()
        self._layers: tuple[Layer, ...] = ()
        self._installation: Installation | None = None

    def layers(self) -> tuple[Layer, ...]:
        """The installation, and Node where it needs one, read-only. Raises `InputError` with the install command."""
        if not self._layers:
            found = inspect(self.recipe.name, self._cache)
            own = Layer(source=found.directory, target=self.inside, digest=found.tree_digest)
            self._layers = (own,) if self.recipe.binaries else (find_node().layer(), own)
            self._installation = found
        return self._layers

    def program(self) -> tuple[str, ...]:
        """What starts the harness inside a sandbox. `InputError` for a machine that it has no program for."""
        binary = self.recipe.binary(self._machine)
        if binary is not None:
            return (f"{self.inside}/node_modules/{binary.package}/{binary.program}",)
        entry = f"{self.inside}/node_modules/{self.recipe.package}/{self.recipe.entry}"
        return (f"{NODE_INSIDE}/node", *self.recipe.node_flags, entry)

    def report(self) -> Mapping[str, JsonValue]:
        """Version and digests as checked, Node's version, and how the harness's calls introduce themselves."""
        self.layers()
        assert self._installation is not None  # layers() sets it or raises
        found = self._installation
        return {
            "name": self.recipe.name,
            "version": found.version,
            "package": self.recipe.package,
            "package_digest": found.package_digest,
            **({"binary_digest": found.binary_digest} if found.binary_digest else {}),
            "tree_digest": found.tree_digest,
            "node_version": found.node_version,
            "user_agent": self.recipe.user_agent,
        }


def base_url(context: HarnessContext, name: str, dialect: str) -> str:
    """The base URL of the dialect that a harness speaks. `InputError` naming those that are served."""
    url = context.base_urls.get(dialect)
    if url is None:
        raise InputError(f"{name} speaks {dialect!r}, which is not served; served: {sorted(context.base_urls)}")
    return url
