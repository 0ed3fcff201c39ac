"""Installing harness packages: pinned, checked, atomic, safe when several processes do it at once.

An installation is a directory `<cache>/harnesses/<name>-<version>-<lock digest>` that appears by one rename,
complete or not at all. `installation.json` in it records what was installed; every later use compares the
tree with that record, and the harness's own package with the digest committed in `recipes.py`.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.harnesses.node import NodeRuntime, find_node
from openforgerl.harnesses.npm import npm_ci
from openforgerl.harnesses.pi_trial import COMPILE_CACHE
from openforgerl.harnesses.recipes import Recipe, recipe_of
from openforgerl.harnesses.trees import digest_file, digest_marks, digest_tree, marks_of

RECORD = "installation.json"
SANDBOX_UIDS = ("0", "1000")
"""Who runs harnesses: sandboxes give their agent uid 1000."""

_NOT_CONTENT = frozenset({".package-lock.json"})  # npm's note to itself; depends on the user's npm settings


class Installation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One installed harness, as recorded and as checked."""

    name: str
    version: str
    directory: str
    tree_digest: str
    """Over all of `node_modules`."""
    package_digest: str
    """Over the harness's own package; equals the pinned one."""
    binary_digest: str = ""
    """Over the package that brings this machine's program, where there is one; equals the pinned one."""
    compile_cache_digest: str = ""
    """Over Node's compile cache of it, which is code too; empty when the harness was installed without one."""
    node_version: str
    """Of the Node that installed and tried it."""

    @property
    def runtime(self) -> str:
        """What runs it, for people."""
        return f"node {self.node_version}"


def default_cache() -> Path:
    """$OPENFORGERL_CACHE, else ~/.cache/openforgerl. InputError when this user has no home directory either."""
    named = os.environ.get("OPENFORGERL_CACHE")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "openforgerl"
    except RuntimeError as error:
        raise InputError("this user has no home directory: set OPENFORGERL_CACHE to a writable folder") from error


def directory_of(recipe: Recipe, cache_dir: Path) -> Path:
    """Where a harness is, or would be, installed; another lock is another directory."""
    lock = digest_file(recipe.lock / "package-lock.json")[:12]
    return cache_dir / "harnesses" / f"{recipe.name}-{recipe.version}-{lock}"


def inspect(name: str, cache_dir: Path) -> Installation:
    """The installation, fully checked (reads every file: one to two seconds for pi).

    Raises `InputError` saying what is absent or changed and which command mends it.
    """
    return inspect_recipe(recipe_of(name), cache_dir)


def installed(name: str, cache_dir: Path) -> Installation | None:
    """The installation, or None when it is absent, partial or changed (`inspect` says which)."""
    return _installed(recipe_of(name), cache_dir)


def install(name: str, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Install harness `name` unless it is there and whole; its directory.

    `report` gets one line for each step. Needs the network only when something is missing. Raises
    `InputError` naming the failed command and the end of its output.
    """
    return install_recipe(recipe_of(name), cache_dir, report)


def inspect_recipe(recipe: Recipe, cache_dir: Path) -> Installation:
    """`inspect` for a recipe that need not be in the table."""
    name, directory = recipe.name, directory_of(recipe, cache_dir)
    fix = f"run: openforgerl harness install {name}"
    record = directory / RECORD
    if not record.is_file():
        raise InputError(f"harness {name} {recipe.version} is not installed in {directory}; {fix}")
    try:
        found = msgspec.json.decode(record.read_bytes(), type=Installation)
    except msgspec.DecodeError as error:
        raise InputError(f"{record} is damaged ({error}); {fix}") from error
    found = msgspec.structs.replace(found, directory=str(directory))
    modules = directory / "node_modules"
    pinned = recipe.pinned(platform.machine())
    for package in pinned:
        if not (modules / package).is_dir():
            raise InputError(f"harness {name}: {modules / package} is missing; {fix}")
    marks = marks_of(modules)
    for package, digest in pinned.items():
        if digest_marks(marks, below=package) != digest:
            raise InputError(f"harness {name}: {modules / package} differs from {package} as published; {fix}")
    if digest_marks(marks, leave_out=_NOT_CONTENT) != found.tree_digest:
        raise InputError(f"harness {name}: {modules} differs from what was installed; {fix}")
    cache = directory / COMPILE_CACHE
    if recipe.trial is not None and (not cache.is_dir() or digest_tree(cache) != found.compile_cache_digest):
        raise InputError(f"harness {name}: {cache} differs from what was installed; {fix}")
    return found


def install_recipe(recipe: Recipe, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """`install` for a recipe that need not be in the table."""
    name, directory = recipe.name, directory_of(recipe, cache_dir)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with only_one(directory, report):
        if _installed(recipe, cache_dir) is not None:
            report(f"{name} {recipe.version} is installed in {directory}")
            return directory
        if directory.exists():
            report(f"{directory} is incomplete or changed; installing again")
        node = find_node()
        recipe.pinned(platform.machine())  # refuses before anything is downloaded
        for leftover in directory.parent.glob(f".{directory.name}.*"):
            shutil.rmtree(leftover)  # of a killed installation: we hold the lock, so nobody uses it
        building = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            _build(recipe, node, building, cache_dir, report)
            swap_in(building, directory)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        report(f"installed {name} {recipe.version} in {directory}")
    return directory


def _installed(recipe: Recipe, cache_dir: Path) -> Installation | None:
    try:
        return inspect_recipe(recipe, cache_dir)
    except InputError:
        return None


def _build(recipe: Recipe, node: NodeRuntime, building: Path, cache_dir: Path, report: Callable[[str], None]) -> None:
    building.chmod(0o755)  # sandboxes mount it for another uid
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(recipe.lock / name, building / name)
    report(f"downloading {recipe.package} {recipe.version} and what it needs with npm")
    npm_ci(node, building, cache_dir / "npm")
    if recipe.complete is not None:
        report(f"completing {recipe.name}")
        recipe.complete(node, building)
    pinned = recipe.pinned(platform.machine())
    marks = marks_of(building / "node_modules")
    for package, expected in pinned.items():
        got = digest_marks(marks, below=package)
        if got != expected:
            raise InputError(
                f"npm delivered a {package} ({recipe.name} {recipe.version}) that is not the published one: its tree "
                f"digest is {got}, expected {expected}; check the configured npm registry"
            )
    compiled = ""
    if recipe.trial is not None:
        report(f"trying {recipe.name} against a scripted model")
        recipe.trial(node, building)
        _share_compile_cache(building / COMPILE_CACHE)
        compiled = digest_tree(building / COMPILE_CACHE)
    record = Installation(
        name=recipe.name,
        version=recipe.version,
        directory="",
        tree_digest=digest_marks(marks, leave_out=_NOT_CONTENT),
        package_digest=recipe.package_digest,
        binary_digest=binary.digest if (binary := recipe.binary(platform.machine())) else "",
        compile_cache_digest=compiled,
        node_version=node.version(),
    )
    (building / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def _share_compile_cache(cache: Path) -> None:
    """Node writes its cache for its owner only, into a directory whose name ends in the owner's uid."""
    for path in sorted(cache.iterdir()):
        for file in path.rglob("*"):
            file.chmod(0o644)
        path.chmod(0o755)
        stem, _, owner = path.name.rpartition("-")
        for uid in SANDBOX_UIDS:
            if stem and owner.isdigit() and owner != uid:
                (cache / f"{stem}-{uid}").symlink_to(path.name)


def swap_in(building: Path, directory: Path) -> None:
    if directory.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        directory.rename(aside / "old")
        building.rename(directory)
        shutil.rmtree(aside)
    else:
        building.rename(directory)


@contextmanager
def only_one(directory: Path, report: Callable[[str], None]) -> Generator[None]:
    """An exclusive lock over processes; released by the kernel when its holder dies."""
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is installing; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
