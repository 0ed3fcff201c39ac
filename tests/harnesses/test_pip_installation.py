"""Installing with the real pip: complete or not at all, run by the system's Python, seen by nobody else.

A package of two modules stands for a harness; pip takes it from a folder, by hash, without any registry.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import msgspec
import pytest

from openforgerl.errors import InputError
from openforgerl.harnesses import installable
from openforgerl.harnesses.catalogue import inspect, install
from openforgerl.harnesses.installation import RECORD
from openforgerl.harnesses.pip_installation import (
    PIP_RECIPES,
    PipRecipe,
    inspect_pip,
    install_pip,
    pip_directory,
    pip_installed,
)

SAY = "import sys\ndef main():\n    print('small says', *sys.argv[1:])\n"


def wheel(folder: Path, files: dict[str, str]) -> Path:
    """A wheel as its specification says: files, metadata, an entry point, and a record of hashes."""
    info = "small-1.0.dist-info"
    content = {
        **files,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nsmall = small.run:main\n",
    }
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        for name, text in content.items()
    ]
    path = folder / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return path


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PipRecipe, Path]:
    """A recipe whose package pip finds in a folder, and an empty cache."""
    shelf, lock = tmp_path / "shelf", tmp_path / "lock"
    shelf.mkdir()
    lock.mkdir()
    built = wheel(shelf, {"small/__init__.py": "", "small/run.py": SAY})
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    (lock / "requirements.txt").write_text(f"small==1.0 --hash=sha256:{digest}\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    empty, run = (hashlib.sha256(text.encode()).hexdigest() for text in ("", SAY))
    published = hashlib.sha256(f"{empty}  __init__.py\n{run}  run.py\n".encode()).hexdigest()
    recipe = PipRecipe(
        name="small",
        version="1.0",
        package="small",
        module="small",
        package_digest=published,
        user_agent="small",
        python=(3, 9),
        lock=lock,
        trial="import small.run",
    )
    return recipe, tmp_path / "cache"


def test_it_runs_where_it_is_moved_to_and_leaves_no_trace_in_its_environment(
    small: tuple[PipRecipe, Path], tmp_path: Path
) -> None:
    recipe, cache = small
    lines: list[str] = []
    directory = install_pip(recipe, cache, lines.append)
    assert lines == [
        "downloading small 1.0 and what it needs with pip",
        "compiling",
        "trying small",
        f"installed small 1.0 in {directory}",
    ]
    lock = hashlib.sha256((recipe.lock / "requirements.txt").read_bytes()).hexdigest()
    assert directory == cache / "harnesses" / f"small-1.0-{lock[:12]}"
    moved = tmp_path / "elsewhere"
    shutil.copytree(directory, moved, symlinks=True)
    done = subprocess.run(
        [moved / "bin/python3", moved / "site/bin/small", "hello"],
        env={"PATH": os.defpath},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "small says hello\n"
    # The system's own packages are not the harness's, nor the other way round.
    script = "import sys; print([p for p in sys.path if 'packages' in p])"
    done = subprocess.run([moved / "bin/python3", "-c", script], capture_output=True, text=True, check=True)
    (site,) = re.findall(r"'([^']+)'", done.stdout)
    assert Path(site) == moved / "lib" / f"python{inspect_pip(recipe, cache).python_version}" / "site-packages"
    plain = subprocess.run(["/usr/bin/python3", "-c", "import small"], capture_output=True, text=True, check=False)
    assert "No module named 'small'" in plain.stderr
    modes = {path.stat().st_mode & 0o004 for path in directory.rglob("*") if path.name != RECORD}
    assert modes == {0o004}, "a sandbox's uid must be able to read it"


def test_a_second_time_nothing_is_done(small: tuple[PipRecipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, cache = small
    directory = install_pip(recipe, cache, lambda line: None)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    lines: list[str] = []
    assert install_pip(recipe, cache, lines.append) == directory
    assert lines == [f"small 1.0 is installed in {directory}"]


def test_damage_is_seen_and_mended(small: tuple[PipRecipe, Path]) -> None:
    recipe, cache = small
    directory = install_pip(recipe, cache, lambda line: None)
    whole = inspect_pip(recipe, cache)
    site = directory / "site"

    def change_package() -> None:
        (site / "small/run.py").write_text(SAY + " ")

    def change_compiled() -> None:
        next(site.rglob("run.*.pyc")).write_bytes(b"evil")

    def change_script() -> None:
        (site / "bin/small").write_text("evil")

    def turn_python() -> None:
        (directory / "bin/python3").unlink()
        (directory / "bin/python3").symlink_to("/bin/sh")

    def lose_package() -> None:
        shutil.rmtree(site / "small")

    def lose_record() -> None:
        (directory / RECORD).unlink()

    def break_record() -> None:
        (directory / RECORD).write_text("{")

    def other_python() -> None:
        record = msgspec.json.decode((directory / RECORD).read_bytes())
        (directory / RECORD).write_bytes(msgspec.json.encode({**record, "python_version": "3.8"}))

    for damage, words in (
        (change_package, "differs from small 1.0 as published"),
        (change_compiled, "differs from what was installed"),
        (change_script, "differs from what was installed"),
        (turn_python, "differs from what was installed"),
        (lose_package, "is missing"),
        (lose_record, "is not installed"),
        (break_record, "is damaged"),
        (other_python, "was installed for /usr/bin/python3 3.8"),
    ):
        spare = directory.with_name("spare")
        shutil.copytree(directory, spare, symlinks=True)
        damage()
        with pytest.raises(InputError) as raised:
            inspect_pip(recipe, cache)
        assert words in str(raised.value), damage.__name__
        assert "run: openforgerl harness install small" in str(raised.value)
        assert pip_installed(recipe, cache) is None
        shutil.rmtree(directory)
        spare.rename(directory)
        assert inspect_pip(recipe, cache) == whole
    lose_package()
    lines: list[str] = []
    install_pip(recipe, cache, lines.append)
    assert lines[0].endswith("is incomplete or changed; installing again")
    assert inspect_pip(recipe, cache) == whole


def test_what_is_not_the_published_package_is_refused(small: tuple[PipRecipe, Path]) -> None:
    recipe, cache = small
    other = msgspec.structs.replace(recipe, package_digest="0" * 64)
    with pytest.raises(InputError, match=r"not the published one.*check the configured package registry"):
        install_pip(other, cache, lambda line: None)
    assert [path.suffix for path in pip_directory(other, cache).parent.iterdir()] == [".lock"]
    lock = recipe.lock / "requirements.txt"
    lock.write_text("small==1.0 --hash=sha256:" + "0" * 64 + "\n")
    with pytest.raises(InputError, match=r"pip install of small exited 1.*(?s:.*)do not match|MATCH"):
        install_pip(recipe, cache, lambda line: None)


def test_what_does_not_start_is_not_installed(small: tuple[PipRecipe, Path]) -> None:
    recipe, cache = small
    broken = msgspec.structs.replace(recipe, trial="import absent")
    with pytest.raises(InputError, match=r"trial run of small exited 1(?s:.*)No module named 'absent'"):
        install_pip(broken, cache, lambda line: None)
    assert pip_installed(broken, cache) is None


@pytest.mark.parametrize("name", sorted(PIP_RECIPES))
def test_a_lock_pins_and_hashes_everything_and_names_no_host(name: str) -> None:
    recipe = PIP_RECIPES[name]
    text = (recipe.lock / "requirements.txt").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    pinned = {line.split("==")[0]: line.split("==")[1].split()[0] for line in lines}
    assert pinned[recipe.package] == recipe.version
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert "://" not in text
    assert "-index" not in text


def test_the_catalogue_has_both_kinds(tmp_path: Path) -> None:
    assert {"pi": "1.6.0", "openclaw": "2026.9.6", "mini-swe-agent": "2.4.6"}.items() <= installable().items()
    with pytest.raises(InputError, match="run: openforgerl harness install mini-swe-agent"):
        inspect("mini-swe-agent", tmp_path)
    with pytest.raises(InputError, match=r"'zeroclaw' cannot be installed; installable: claude-code, codex"):
        install("zeroclaw", tmp_path, lambda line: None)
