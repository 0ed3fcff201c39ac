"""Installing harnesses that come as Python packages: pinned, hashed, atomic, run by the sandbox's own Python.

An installation looks like a virtual environment (`pyvenv.cfg`, `bin/python3`, `lib/pythonX.Y/site-packages`), so
`bin/python3` finds its packages wherever the directory is mounted, and without a PYTHONPATH: that variable would
reach the agent's commands too and put the harness's packages before the task's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.harnesses.installation import RECORD, only_one, swap_in
from openforgerl.harnesses.trees import digest_file, digest_tree

PYTHONS = (
    "/usr/bin/python3",
    "/usr/local/bin/python3",
    *(f"{place}/python3.{minor}" for minor in (12, 13, 14) for place in ("/usr/bin", "/usr/local/bin")),
)
"""Where a Python is looked for, in order: the places that a sandbox shares with this system."""
TIMEOUT = 1800.0
"""Seconds for one step (download, compilation, trial)."""
LOCKS = Path(__file__).with_name("locks")


class PipRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A harness that comes as a Python package, every distribution locked by hash."""

    name: str
    version: str
    package: str
    """Distribution name, for people."""
    module: str
    """Directory of the harness's own code, relative to `site-packages`."""
    package_digest: str
    """`digest_tree` of that directory as published, compiled files left out."""
    user_agent: str
    """How its model calls introduce themselves."""
    python: tuple[int, int]
    """Oldest Python that can run it."""
    lock: Path
    """Directory of the committed `requirements.txt`: every distribution with its hashes, no registry."""
    trial: str
    """A statement that Python must be able to run once everything is installed."""


class PipInstallation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One installed harness, as recorded and as checked."""

    name: str
    version: str
    directory: str
    tree_digest: str
    """Over everything but this record, compiled files included: they are what runs."""
    package_digest: str
    """Over the harness's own code; equals the pinned one."""
    python: str
    """Path of the Python that runs it, inside a sandbox as here."""
    python_version: str
    """Its version, e.g. `3.11`."""

    @property
    def runtime(self) -> str:
        """What runs it, for people."""
        return f"python {self.python_version}"


PIP_RECIPES: dict[str, PipRecipe] = {
    "mini-swe-agent": PipRecipe(
        name="mini-swe-agent",
        version="2.4.6",
        package="mini-swe-agent",
        module="minisweagent",
        package_digest="bec0b05ab01f2876b98f64bce4734136a8fa1f86af7b172fb067af5f78b36ab2",
        user_agent="OpenAI/Python 3.57.0",
        python=(3, 11),
        lock=LOCKS / "mini-swe-agent",
        trial="import minisweagent.run.mini, minisweagent.models.litellm_model",
    ),
    "openhands": PipRecipe(
        name="openhands",
        version="1.58.2",
        package="openhands-sdk",
        module="openhands/sdk",
        package_digest="34d772f4ae1707cde41396b584e63888c1da09da3822cdf4b12e0c8bdd843a83",
        user_agent="",
        python=(3, 12),
        lock=LOCKS / "openhands",
        trial="import openhands.sdk, openhands.tools.terminal, openhands.tools.file_editor",
    ),
}


def find_python(recipe: PipRecipe, pythons: Sequence[str] = PYTHONS) -> tuple[str, str]:
    """Path and `major.minor` of the first Python that can run the harness.

    Raises `InputError` naming the places looked at and what was found there.
    """
    found: dict[str, str] = {}
    for path in pythons:
        # A link out of /usr (to a home directory, say) would dangle inside a sandbox.
        inside = path.startswith("/usr/") and os.path.realpath(path).startswith("/usr/")
        if inside and os.access(path, os.X_OK):
            found[path] = _version_of(path)
            major, _, minor = found[path].partition(".")
            if (int(major), int(minor)) >= recipe.python:
                return path, found[path]
    oldest = ".".join(str(part) for part in recipe.python)
    seen = ", ".join(f"{path} is {version}" for path, version in found.items()) or "none found"
    raise InputError(
        f"harness {recipe.name} {recipe.version} needs Python {oldest} or later in a system folder, where sandboxes "
        f"see it: {seen}; install one (a system package, or built with --prefix=/usr/local)"
    )


def pip_directory(recipe: PipRecipe, cache_dir: Path) -> Path:
    """Where a harness is, or would be, installed; another lock is another directory."""
    lock = digest_file(recipe.lock / "requirements.txt")[:12]
    return cache_dir / "harnesses" / f"{recipe.name}-{recipe.version}-{lock}"


def inspect_pip(recipe: PipRecipe, cache_dir: Path, pythons: Sequence[str] = PYTHONS) -> PipInstallation:
    """The installation, fully checked (reads every file: some seconds).

    Raises `InputError` saying what is absent or changed and which command mends it.
    """
    name, directory = recipe.name, pip_directory(recipe, cache_dir)
    fix = f"run: openforgerl harness install {name}"
    record = directory / RECORD
    if not record.is_file():
        find_python(recipe, pythons)  # where it cannot be installed at all, that is the better answer
        raise InputError(f"harness {name} {recipe.version} is not installed in {directory}; {fix}")
    try:
        found = msgspec.json.decode(record.read_bytes(), type=PipInstallation)
    except msgspec.DecodeError as error:
        raise InputError(f"{record} is damaged ({error}); {fix}") from error
    if find_python(recipe, pythons) != (found.python, found.python_version):
        raise InputError(
            f"harness {name} was installed for {found.python} {found.python_version}, "
            f"which is no longer what runs it here; {fix}"
        )
    package = _site(directory, found.python_version) / recipe.module
    if not package.is_dir():
        raise InputError(f"harness {name}: {package} is missing; {fix}")
    if _package_digest(package) != recipe.package_digest:
        raise InputError(
            f"harness {name}: {package} differs from {recipe.package} {recipe.version} as published; {fix}"
        )
    if digest_tree(directory, leave_out=frozenset({RECORD})) != found.tree_digest:
        raise InputError(f"harness {name}: {directory} differs from what was installed; {fix}")
    return msgspec.structs.replace(found, directory=str(directory))


def pip_installed(recipe: PipRecipe, cache_dir: Path, pythons: Sequence[str] = PYTHONS) -> PipInstallation | None:
    """The installation, or None when it is absent, partial or changed (`inspect_pip` says which)."""
    try:
        return inspect_pip(recipe, cache_dir, pythons)
    except InputError:
        return None


def install_pip(
    recipe: PipRecipe, cache_dir: Path, report: Callable[[str], None], pythons: Sequence[str] = PYTHONS
) -> Path:
    """Install a harness unless it is there and whole; its directory.

    `report` gets one line for each step. Needs the network only when something is missing. Raises `InputError`
    naming the failed step and the end of its output.
    """
    cache_dir = cache_dir.absolute()
    name, directory = recipe.name, pip_directory(recipe, cache_dir)
    python, version = find_python(recipe, pythons)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with only_one(directory, report):
        if pip_installed(recipe, cache_dir, pythons) is not None:
            report(f"{name} {recipe.version} is installed in {directory}")
            return directory
        if directory.exists():
            report(f"{directory} is incomplete or changed; installing again")
        for leftover in directory.parent.glob(f".{directory.name}.*"):
            shutil.rmtree(leftover)  # of a killed installation: we hold the lock, so nobody uses it
        building = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            _build(recipe, building, cache_dir, report, (python, version))
            swap_in(building, directory)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        report(f"installed {name} {recipe.version} in {directory}")
    return directory


def _build(
    recipe: PipRecipe, building: Path, cache_dir: Path, report: Callable[[str], None], runs: tuple[str, str]
) -> None:
    python, version = runs
    building.chmod(0o755)  # sandboxes mount it for another uid
    site = _site(building, version)
    site.mkdir(parents=True)
    (building / "bin").mkdir()
    (building / "bin" / "python3").symlink_to(python)
    (building / "site").symlink_to(site.relative_to(building))
    (building / "pyvenv.cfg").write_text(f"home = {Path(python).parent}\ninclude-system-site-packages = false\n")
    report(f"downloading {recipe.package} {recipe.version} and what it needs with pip")
    arguments = ["install", "--target", str(site), "--requirement", str(recipe.lock / "requirements.txt")]
    # Wheels only: nothing we install may run a build script on the host.
    arguments += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-compile", "--no-input"]
    arguments += ["--cache-dir", str(cache_dir / "pip"), "--disable-pip-version-check", "--quiet"]
    _step(
        f"pip install of {recipe.package}",
        [sys.executable, "-m", "pip", "--python", python, *arguments],
        "the Python package registry must be reachable for the first installation",
    )
    package_digest = _package_digest(site / recipe.module)
    if package_digest != recipe.package_digest:
        raise InputError(
            f"pip delivered a {recipe.package} {recipe.version} that is not the published one: its tree digest is "
            f"{package_digest}, expected {recipe.package_digest}; check the configured package registry"
        )
    report("compiling")
    inside = str(building / "bin" / "python3")
    # By hash, unchecked: a read-only layer's times may change on the way into an image, its content may not. Paths as
    # inside a sandbox, so that every installation is the same. Some packages ship files for other Python versions,
    # which do not compile; the trial run is what must pass.
    compiling = [inside, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-x", r"/tests?/"]
    compiling += ["-s", str(site), "-p", f"/opt/{recipe.name}/site", str(site)]
    _step("compilation", compiling, "", accept=(0, 1))
    report(f"trying {recipe.name}")
    _step(f"trial run of {recipe.name}", [inside, "-P", "-B", "-c", recipe.trial], "the harness does not start here")
    record = PipInstallation(
        name=recipe.name,
        version=recipe.version,
        directory="",
        tree_digest=digest_tree(building),
        package_digest=package_digest,
        python=python,
        python_version=version,
    )
    (building / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def _step(what: str, command: Sequence[str], hint: str, accept: Sequence[int] = (0,)) -> None:
    with tempfile.TemporaryDirectory() as home:
        # A home of its own: some packages write settings when they are first imported.
        try:
            done = subprocess.run(
                command,
                cwd=home,
                env={**_outer_environment(), "XDG_CONFIG_HOME": home, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT,
                umask=0o022,  # readable for the sandbox's uid whatever the caller's umask
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(f"{what} did not end within {TIMEOUT:.0f} s") from error
    if done.returncode not in accept:
        tail = done.stdout[-1500:].decode(errors="replace").strip()
        raise InputError(f"{what} exited {done.returncode}; {hint}. Its last words:\n{tail}")


def _outer_environment() -> dict[str, str]:
    """The caller's, for its registry settings, without what would make another Python see our packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _site(directory: Path, version: str) -> Path:
    return directory / "lib" / f"python{version}" / "site-packages"


def _package_digest(package: Path) -> str:
    compiled = (path for path in package.rglob("*.pyc") if path.parent.name == "__pycache__")
    return digest_tree(package, leave_out=frozenset(str(path.relative_to(package)) for path in compiled))


def _version_of(python: str) -> str:
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise InputError(f"{python} does not run: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()
