"""Installing with the real npm: complete or not at all, whatever happens meanwhile.

pi itself is installed once (fixture `pi_cache`); the hostile cases use a recipe for one of its small
dependencies, which npm then takes from its own cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from openforgerl.errors import InputError
from openforgerl.harnesses import default_cache, inspect, install
from openforgerl.harnesses.installation import RECORD, directory_of, inspect_recipe, install_recipe
from openforgerl.harnesses.node import NodeRuntime, find_node
from openforgerl.harnesses.recipes import RECIPES, Binary, Recipe
from openforgerl.harnesses.trees import digest_tree

PI = RECIPES["pi"]
PACKAGE = "node_modules/@earendil-works/pi-coding-agent"
INSTALL = """
import sys
from pathlib import Path
import msgspec
from openforgerl.harnesses.installation import install_recipe
from openforgerl.harnesses.recipes import Recipe

def trial(node, directory):
    (directory / "compile-cache").mkdir()

fields = msgspec.json.decode(sys.argv[1])
recipe = Recipe(**{**fields, "lock": Path(fields["lock"]), "trial": trial})
install_recipe(recipe, Path(sys.argv[2]), lambda line: print(line, flush=True))
"""

pytestmark = pytest.mark.node


def trial(node: NodeRuntime, directory: Path) -> None:
    """Stands for a run that fills the compile cache."""
    del node
    (directory / "compile-cache").mkdir()
    (directory / "compile-cache" / "code").write_text("x")


@pytest.fixture
def small(pi_cache: Path, tmp_path: Path) -> tuple[Recipe, Path]:
    """A recipe for two packages of pi's lock, and an empty cache whose npm cache already holds them."""
    entries = json.loads((PI.lock / "package-lock.json").read_text())["packages"]
    chosen = {f"node_modules/{name}": entries[f"node_modules/{name}"] for name in ("ms", "semver")}
    wanted = {name.removeprefix("node_modules/"): entry["version"] for name, entry in chosen.items()}
    lock = tmp_path / "lock"
    lock.mkdir()
    manifest = {"name": "small", "private": True, "dependencies": wanted}
    (lock / "package.json").write_text(json.dumps(manifest))
    packages = {"": manifest, **chosen}
    (lock / "package-lock.json").write_text(
        json.dumps({"name": "small", "lockfileVersion": 3, "requires": True, "packages": packages})
    )
    recipe = Recipe(
        name="small",
        version=wanted["ms"],
        package="ms",
        package_digest=digest_tree(directory_of(PI, pi_cache) / "node_modules" / "ms"),
        user_agent="small",
        trial=trial,
        lock=lock,
    )
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "npm").symlink_to(pi_cache / "npm")
    return recipe, cache


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """npm may use its own cache and nothing else."""
    monkeypatch.setenv("npm_config_offline", "true")


def test_what_is_recorded_of_pi(pi_cache: Path) -> None:
    found = inspect("pi", pi_cache)
    directory = Path(found.directory)
    assert directory == directory_of(PI, pi_cache)
    assert (found.name, found.version, found.node_version) == ("pi", "1.6.0", "v24.19.0")
    assert found.package_digest == PI.package_digest
    manifest = json.loads((directory / PACKAGE / "package.json").read_text())
    assert (manifest["name"], manifest["version"]) == ("@earendil-works/pi-coding-agent", "1.6.0")


def test_a_complete_cache_needs_no_network(pi_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    lines: list[str] = []
    directory = directory_of(PI, pi_cache)
    assert install("pi", pi_cache, lines.append) == directory
    assert lines == [f"pi 1.6.0 is installed in {directory}"]


def change_package(directory: Path) -> None:
    with (directory / "node_modules/ms/index.js").open("a") as file:
        file.write(" ")


def add_to_package(directory: Path) -> None:
    (directory / "node_modules/ms/extra.js").write_text("")


def lose_package(directory: Path) -> None:
    shutil.rmtree(directory / "node_modules/ms")


def change_dependency(directory: Path) -> None:
    (directory / "node_modules/semver/package.json").write_text("{}")


def lose_dependency(directory: Path) -> None:
    shutil.rmtree(directory / "node_modules/semver")


def turn_a_link(directory: Path) -> None:
    link = directory / "node_modules/.bin/semver"
    link.unlink()
    link.symlink_to("/bin/sh")


def change_compile_cache(directory: Path) -> None:
    (directory / "compile-cache/code").write_text("evil")


def lose_record(directory: Path) -> None:
    (directory / RECORD).unlink()


def break_record(directory: Path) -> None:
    (directory / RECORD).write_text('{"name": ')


@pytest.mark.usefixtures("offline")
def test_damage_is_seen_and_mended(small: tuple[Recipe, Path]) -> None:
    recipe, cache = small
    directory = install_recipe(recipe, cache, lambda line: None)
    whole = inspect_recipe(recipe, cache)
    assert whole.tree_digest == digest_tree(directory / "node_modules", leave_out=frozenset({".package-lock.json"}))
    for damage, words in (
        (change_package, "differs from ms"),
        (add_to_package, "as published"),
        (lose_package, "is missing"),
        (change_dependency, "differs from what was installed"),
        (lose_dependency, "differs from what was installed"),
        (turn_a_link, "differs from what was installed"),
        (change_compile_cache, "compile-cache differs from what was installed"),
        (lose_record, "is not installed"),
        (break_record, "is damaged"),
    ):
        spare = directory.with_name("spare")
        shutil.copytree(directory, spare, symlinks=True)
        damage(directory)
        with pytest.raises(InputError) as raised:
            inspect_recipe(recipe, cache)
        assert words in str(raised.value), damage.__name__
        assert "run: openforgerl harness install small" in str(raised.value)
        shutil.rmtree(directory)
        spare.rename(directory)
        assert inspect_recipe(recipe, cache) == whole
    lose_dependency(directory)
    lines: list[str] = []
    install_recipe(recipe, cache, lines.append)
    assert lines[0].endswith("is incomplete or changed; installing again")
    assert inspect_recipe(recipe, cache) == whole


@pytest.mark.usefixtures("offline")
def test_a_killed_and_two_concurrent_installations(small: tuple[Recipe, Path]) -> None:
    recipe, cache = small
    directory = directory_of(recipe, cache)
    fields = {name: value for name, value in msgspec.structs.asdict(recipe).items() if name != "trial"}
    arguments = json.dumps(fields, default=str)

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", INSTALL, arguments, str(cache)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def half_done() -> list[Path]:
        return list(directory.parent.glob(f".{directory.name}.*")) if directory.parent.exists() else []

    killed = start()
    until = time.monotonic() + 60
    while not half_done():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert half_done()
    assert not directory.exists()
    both = [start(), start()]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("downloading" in output for output in outputs) == 1
    assert sum("is installed in" in output for output in outputs) == 1
    assert inspect_recipe(recipe, cache).version == recipe.version
    assert half_done() == []


def test_without_network_and_cache_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_offline", "true")
    with pytest.raises(InputError) as raised:
        install("pi", tmp_path, lambda line: None)
    assert "`npm ci --ignore-scripts" in str(raised.value)
    assert "registry must be reachable" in str(raised.value)
    left = sorted(path.name for path in directory_of(PI, tmp_path).parent.iterdir())
    assert left == [f"{directory_of(PI, tmp_path).name}.lock"]


@pytest.mark.usefixtures("offline")
def test_a_package_that_is_not_the_published_one_is_refused(small: tuple[Recipe, Path]) -> None:
    recipe, cache = small
    other = msgspec.structs.replace(recipe, package_digest="0" * 64)
    with pytest.raises(InputError, match=r"not the published one.*check the configured npm registry"):
        install_recipe(other, cache, lambda line: None)
    assert not directory_of(other, cache).exists()


@pytest.mark.usefixtures("offline")
def test_a_harness_that_does_not_run_is_not_installed(small: tuple[Recipe, Path]) -> None:
    recipe, cache = small

    def broken(node: NodeRuntime, directory: Path) -> None:
        raise InputError("trial run failed")

    with pytest.raises(InputError, match="trial run failed"):
        install_recipe(msgspec.structs.replace(recipe, trial=broken), cache, lambda line: None)
    assert not directory_of(recipe, cache).exists()


def test_the_trial_run_fails_where_pi_does_not_work(tmp_path: Path) -> None:
    entry = tmp_path / PACKAGE / "dist/bundle/cli.js"
    entry.parent.mkdir(parents=True)
    entry.write_text("console.log('Trial passed.')")  # says it, but did not do what the model asked
    with pytest.raises(InputError, match="trial run failed: exit 0"):
        PI.trial(find_node(), tmp_path)


def test_only_known_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'react' cannot be installed; installable: claude-code, .*pi, qwen-code"):
        install("react", tmp_path, lambda line: None)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGERL_CACHE", "/somewhere")
    assert default_cache() == Path("/somewhere")
    monkeypatch.delenv("OPENFORGERL_CACHE")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache() == Path("/home/me/.cache/openforgerl")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_lock_names_exact_versions_and_no_host(name: str) -> None:
    recipe = RECIPES[name]
    manifest = json.loads((recipe.lock / "package.json").read_text())
    assert manifest["dependencies"] == {recipe.package: recipe.version}
    lock = json.loads((recipe.lock / "package-lock.json").read_text())
    packages = {path: entry for path, entry in lock["packages"].items() if path}
    assert packages[f"node_modules/{recipe.package}"]["version"] == recipe.version
    # A bundled package comes inside its parent's archive, which has the hash.
    assert all("integrity" in entry or entry.get("inBundle") for entry in packages.values())
    assert all("resolved" not in entry for entry in packages.values())
    assert all(f"node_modules/{binary.package}" in packages for binary in recipe.binaries.values())


def test_a_machine_without_a_binary_is_told_before_any_download(
    small: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, cache = small
    binary = Binary(package="semver", digest="0" * 64, program="x")
    other = msgspec.structs.replace(recipe, binaries={"vax": binary})
    with pytest.raises(InputError, match=r"small .* runs on vax, not on"):
        install_recipe(other, cache, lambda line: None)
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(InputError, match=r"delivered a semver \(small .* is not the published one"):
        install_recipe(other, cache, lambda line: None)


@pytest.mark.usefixtures("offline")
def test_the_machines_program_is_pinned_too(small: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, cache = small
    monkeypatch.setattr("platform.machine", lambda: "vax")
    digest = digest_tree(install_recipe(recipe, cache, lambda line: None) / "node_modules" / "semver")
    binary = Binary(package="semver", digest=digest, program="index.js")
    recipe = msgspec.structs.replace(recipe, name="native", binaries={"vax": binary}, trial=None)
    directory = install_recipe(recipe, cache, lambda line: None)
    found = inspect_recipe(recipe, cache)
    assert (found.binary_digest, found.compile_cache_digest) == (digest, "")
    (directory / "node_modules/semver/index.js").write_text("evil")
    with pytest.raises(InputError, match="differs from semver as published"):
        inspect_recipe(recipe, cache)


def test_a_tree_digest_by_hand(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "f").write_bytes(b"1")
    (tmp_path / "a").symlink_to("b/f")
    (tmp_path / "note").write_bytes(b"left out")
    one = hashlib.sha256(b"1").hexdigest()
    expected = hashlib.sha256(f"link:b/f  a\n{one}  b/f\n".encode()).hexdigest()
    assert digest_tree(tmp_path, leave_out=frozenset({"note"})) == expected
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="neither a file"):
        digest_tree(tmp_path)
