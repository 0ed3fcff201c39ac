"""What comes out of a sandbox is checked on the host as if its init were the agent's."""

from __future__ import annotations

import pytest

from openforgerl.errors import InputError
from openforgerl.sandboxes.channel import Unsound
from openforgerl.sandboxes.transfer import Tree, walk


@pytest.mark.parametrize(
    "path", ["../x", "/../x", "/a/../../x", "relative", "", "/", "/a//b", "/./a", "/a/\0b", "/a/.."]
)
@pytest.mark.parametrize("entry", ["file", "directory"])
def test_no_path_leads_out(tmp_path, path, entry):
    tree = Tree(tmp_path / "out", limit=100, entries=10, modes=0o777)
    with pytest.raises(Unsound, match="path"):
        tree.take({"entry": entry, "path": path, "mode": 0o644}, b"")
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


def test_no_more_bytes_than_the_limit(tmp_path):
    tree = Tree(tmp_path / "out", limit=5, entries=10, modes=0o777)
    tree.take({"entry": "file", "path": "/a", "mode": 0o7755}, b"")
    tree.take({"data": True}, b"12345")
    with pytest.raises(Unsound, match="more bytes than"):
        tree.take({"data": True}, b"6")
    tree.end()
    assert (tmp_path / "out/a").read_bytes() == b"12345"
    assert (tmp_path / "out/a").stat().st_mode & 0o7777 == 0o755


def test_data_without_a_file_and_a_file_twice(tmp_path):
    tree = Tree(tmp_path / "out", limit=5, entries=10, modes=0o777)
    with pytest.raises(Unsound, match="of no file"):
        tree.take({"data": True}, b"1")
    tree.take({"entry": "file", "path": "/a/b", "mode": 0o644}, b"")
    with pytest.raises(Unsound, match="twice"):
        tree.take({"entry": "file", "path": "/a/b", "mode": 0o644}, b"")
    tree.end()


def test_a_walk_refuses_links_wherever_they_are(tmp_path):
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/file").write_text("x")
    assert [(target, mode) for target, _, mode in walk(tmp_path / "tree", "/w")] == [
        ("/w", None),
        ("/w/file", (tmp_path / "tree/file").stat().st_mode & 0o777),
        ("/w/sub", None),
    ]
    (tmp_path / "tree/sub/link").symlink_to("../file")
    with pytest.raises(InputError, match=r"sub/link is neither"):
        list(walk(tmp_path / "tree", "/w"))
