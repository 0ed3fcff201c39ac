"""Exported files: whole or absent, never in place of another, and nothing left of one that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from openforgerl.errors import InputError
from openforgerl.formats.files import LineFile, PartialOutput


def test_two_writers_of_one_name_do_not_mix_and_the_second_is_refused(tmp_path: Path) -> None:
    first, second = LineFile(tmp_path / "out"), LineFile(tmp_path / "out")
    first.write(b"A1")
    second.write(b"B1")
    first.finish()
    assert (tmp_path / "out").read_bytes() == b"A1\n"
    with pytest.raises(InputError, match="was made by somebody else meanwhile"):
        second.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"A1\n"


@pytest.mark.parametrize("full", [True, False])
def test_a_folder_that_came_up_meanwhile_is_kept(full: bool, tmp_path: Path) -> None:
    output = PartialOutput(tmp_path / "out", folder=True)
    (output.path / "ours").write_text("x")
    (tmp_path / "out").mkdir()
    if full:
        (tmp_path / "out" / "theirs").write_text("precious")
    with pytest.raises(InputError, match="was made by somebody else meanwhile"):
        output.finish()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"][: 1 + full]


def test_a_folder_gets_its_name(tmp_path: Path) -> None:
    output = PartialOutput(tmp_path / "out", folder=True)
    (output.path / "ours").write_text("x")
    output.finish()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ours", "out"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    writer = LineFile(tmp_path / "out")
    writer.write(b"x" * 100)

    def full() -> None:
        raise OSError(28, "No space left on device")

    close, writer._file.close = writer._file.close, full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space"):
        writer.remove()
    assert list(tmp_path.iterdir()) == []
    close()
