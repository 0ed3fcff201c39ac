"""An installed Python harness as its adapter sees it: what to mount, what to start, what to put on record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from openforgerl.harnesses.installation import default_cache
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.pip_installation import PIP_RECIPES, PipInstallation, inspect_pip
from openforgerl.types import JsonValue, Layer


class InstalledPipPackage:
    """The installation of one recipe. Checked when its layers are first asked for, once per instance."""

    def __init__(self, name: str, options: HarnessOptions) -> None:
        self.recipe = PIP_RECIPES[name]
        self.inside = f"/opt/{name}"
        """Where a sandbox finds the installation."""
        self._cache = Path(options.cache) if options.cache else default_cache()
        self._installation: PipInstallation | None = None

    def layers(self) -> tuple[Layer, ...]:
        """The installation, read-only. Raises `InputError` naming the install command, or the Python it lacks."""
        found = self._found()
        return (Layer(source=found.directory, target=self.inside, digest=found.tree_digest),)

    def python(self) -> str:
        """The Python inside a sandbox that sees the harness's packages, and only those."""
        return f"{self.inside}/bin/python3"

    def script(self, name: str) -> str:
        """One of the installation's own commands inside a sandbox, to be run by `python`."""
        return f"{self.inside}/site/bin/{name}"

    def report(self) -> Mapping[str, JsonValue]:
        """Version and digests as checked, Python's version, and how the harness's calls introduce themselves."""
        found = self._found()
        return {
            "name": self.recipe.name,
            "version": found.version,
            "package": self.recipe.package,
            "package_digest": found.package_digest,
            "tree_digest": found.tree_digest,
            "python_version": found.python_version,
            "user_agent": self.recipe.user_agent,
        }

    def _found(self) -> PipInstallation:
        if self._installation is None:
            self._installation = inspect_pip(self.recipe, self._cache)
        return self._installation
