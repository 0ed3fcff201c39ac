"""Installing harness packages: pinned, checked, atomic, safe when several processes do it at once.

An installation is a directory `<cache>/harnesses/<name>-<version>-<lock digest>` that appears by one rename,
complete or not at all. `installation.json` in it records what was installed; every later use compares the
tree with that record, and the harness's own package with the digest committed in `recipes.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.harnesses.node import NodeRuntime, find_node
from openforgerl.harnesses.pi_trial import COMPILE_CACHE
from openforgerl.harnesses.recipes import Recipe, recipe_of
from openforgerl.harnesses.trees import digest_file, digest_tree

RECORD = "installation.json"
SANDBOX_UIDS = ("0", "1000")
"""Who runs harnesses: sandboxes give their agent uid 1000."""
NPM_TIMEOUT = 900.0
"""Seconds for one npm run."""

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
    compile_cache_digest: str
    """Over Node's compile cache of it, which is code too."""
    node_version: str
    """Of the Node that installed and tried it."""


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
    package = modules / recipe.package
    if not package.is_dir():
        raise InputError(f"harness {name}: {package} is missing; {fix}")
    if digest_tree(package) != recipe.package_digest:
        raise InputError(
            f"harness {name}: {package} differs from {recipe.package} {recipe.version} as published; {fix}"
        )
    if digest_tree(modules, leave_out=_NOT_CONTENT) != found.tree_digest:
        raise InputError(f"harness {name}: {modules} differs from what was installed; {fix}")
    cache = directory / COMPILE_CACHE
    if not cache.is_dir() or digest_tree(cache) != found.compile_cache_digest:
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
    _npm_ci(node, building, cache_dir / "npm")
    modules = building / "node_modules"
    package_digest = digest_tree(modules / recipe.package)
    if package_digest != recipe.package_digest:
        raise InputError(
            f"npm delivered a {recipe.package} {recipe.version} that is not the published one: its tree digest is "
            f"{package_digest}, expected {recipe.package_digest}; check the configured npm registry"
        )
    report(f"trying {recipe.name} against a scripted model")
    recipe.trial(node, building)
    _share_compile_cache(building / COMPILE_CACHE)
    record = Installation(
        name=recipe.name,
        version=recipe.version,
        directory="",
        tree_digest=digest_tree(modules, leave_out=_NOT_CONTENT),
        package_digest=package_digest,
        compile_cache_digest=digest_tree(building / COMPILE_CACHE),
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


def _npm_ci(node: NodeRuntime, building: Path, npm_cache: Path) -> None:
    # --ignore-scripts: nothing we install needs its scripts, and none should run on the host.
    arguments = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--cache", str(npm_cache)]
    command = [node.binary, node.npm, *arguments]
    path = os.pathsep.join([str(Path(node.binary).parent), os.environ.get("PATH", os.defpath)])
    try:
        done = subprocess.run(
            command,
            cwd=building,
            env={**os.environ, "PATH": path, "npm_config_update_notifier": "false"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=NPM_TIMEOUT,
            umask=0o022,  # readable for the sandbox's uid whatever the caller's umask
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"`npm {' '.join(arguments)}` did not end within {NPM_TIMEOUT:.0f} s; is the npm registry reachable?"
        ) from error
    if done.returncode != 0:
        tail = done.stdout[-1500:].decode(errors="replace").strip()
        raise InputError(
            f"`npm {' '.join(arguments)}` exited {done.returncode}; the npm registry must be reachable for the first "
            f"installation. Its last words:\n{tail}"
        )


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
