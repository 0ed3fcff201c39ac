"""The tree of prefixes against a plain dictionary of what was put in, and the rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openforgerl.engines.torch_kv import Ids, Node, PrefixTree, Rows, Segment, common_length


class User:
    def __init__(self) -> None:
        self.path: list[Node] = []
        self.splits: list[int] = []

    def node_split(self, index: int) -> None:
        self.splits.append(index)


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int32)


def keys(text: Ids) -> Segment:
    """A key that tells its whole prefix (as real ones do): each token's is a hash of the ids up to it."""
    values = [hash(tuple(text[: at + 1].tolist())) % 100003 for at in range(len(text))]
    k = torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)
    return Segment(k, -k)


def put(tree: PrefixTree, text: Ids, scope: str = "w") -> None:
    tree.insert(scope, text, lambda start, stop: keys(text).part(start, stop))


def spelled(path: list[Node]) -> Ids:
    return np.concatenate([ids(), *(node.ids for node in path)])


def check(path: list[Node]) -> None:
    """The path's keys are those of the prefix it spells."""
    whole = keys(spelled(path))
    if path:
        assert torch.equal(torch.cat([node.k for node in path], dim=1), whole.k)
        assert torch.equal(torch.cat([node.v for node in path], dim=1), whole.v)


def test_common_length() -> None:
    assert common_length(ids(1, 2, 3), ids(1, 2, 4, 5)) == 2
    assert common_length(ids(1, 2), ids(1, 2, 3)) == 2
    assert common_length(ids(), ids(1)) == common_length(ids(2), ids(1)) == 0


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(texts, texts, st.data())
def test_finds_the_longest_prefix_put_in(put_in: list[list[int]], asked: list[list[int]], data: st.DataObject) -> None:
    tree = PrefixTree(10_000)
    live: list[User] = []
    for text in put_in:
        put(tree, ids(*text))
        if data.draw(st.booleans()):
            user = User()
            user.path = tree.acquire("w", ids(*data.draw(st.sampled_from(put_in))), user)
            live.append(user)
        if live and data.draw(st.booleans()):
            user = live.pop(0)
            tree.release(user.path, user)
        for user in live:
            check(user.path)
    for text in asked:
        longest = max(common_length(ids(*text), ids(*other)) for other in put_in)
        user = User()
        assert tree.matched("w", ids(*text)) == longest
        user.path = tree.acquire("w", ids(*text), user)
        assert spelled(user.path).tolist() == text[:longest]
        check(user.path)
        tree.release(user.path, user)
    distinct = {tuple(text[: at + 1]) for text in put_in for at in range(len(text))}
    assert tree.tokens == len(distinct)


def test_other_weights_find_nothing() -> None:
    tree = PrefixTree(100)
    put(tree, ids(1, 2, 3), "old")
    assert tree.matched("new", ids(1, 2, 3)) == 0
    put(tree, ids(1, 2), "new")
    tree.keep_only("new")
    assert (tree.matched("old", ids(1, 2, 3)), tree.matched("new", ids(1, 2, 3)), tree.tokens) == (0, 2, 2)


def test_a_split_reaches_those_who_use_the_node() -> None:
    tree = PrefixTree(100)
    put(tree, ids(1, 2, 3, 4))
    user = User()
    user.path = tree.acquire("w", ids(1, 2, 3, 4), user)
    put(tree, ids(1, 2, 9))
    assert [node.ids.tolist() for node in user.path] == [[1, 2], [3, 4]]
    assert user.splits == [0]
    assert all(user in node.users for node in user.path)


def test_chains_are_joined_when_nobody_uses_them() -> None:
    tree = PrefixTree(100)
    user = User()
    for length in (2, 5, 7):
        put(tree, ids(*range(length)))
        user.path = tree.acquire("w", ids(*range(length)), user)
    assert [node.length for node in user.path] == [2, 3, 2]
    tree.release(user.path, user)
    other = User()
    other.path = tree.acquire("w", ids(*range(7)), other)
    assert [node.length for node in other.path] == [7]
    check(other.path)


def test_eviction_is_by_last_use_and_spares_what_is_used() -> None:
    tree = PrefixTree(10)
    for first in (1, 2, 3):
        put(tree, ids(first, 0, 0, 0))
    user, visitor = User(), User()
    user.path = tree.acquire("w", ids(1, 0, 0, 0), user)
    tree.release(tree.acquire("w", ids(2, 0, 0, 0), visitor), visitor)
    tree.evict()
    assert [tree.matched("w", ids(first, 0, 0, 0)) for first in (1, 2, 3)] == [4, 4, 0]
    tree.evict(spare=10)
    assert [tree.matched("w", ids(first, 0, 0, 0)) for first in (1, 2, 3)] == [4, 0, 0]
    assert tree.tokens == 4


def test_memory_of_an_evicted_part_is_free() -> None:
    """Splitting copies: no part is a view that keeps the other's memory alive."""
    tree = PrefixTree(100)
    put(tree, ids(*range(50)))
    put(tree, ids(0, 1, 9))
    user = User()
    head, tail = tree.acquire("w", ids(*range(50)), user)
    assert head.k.untyped_storage().nbytes() == 2 * 4
    assert tail.k.untyped_storage().nbytes() == 48 * 4


def test_rows_move_grow_and_stay_what_they_were() -> None:
    rows = Rows(1, 1, 1, dtype=torch.float32, device=torch.device("cpu"))
    lengths = [3, 70, 1, 130]
    for number, length in enumerate(lengths):
        assert rows.add([keys(ids(number, *range(length - 1)))]) == number
    rows.remove(1)
    assert rows.lengths == [3, 130, 1]
    for row, number in enumerate((0, 3, 2)):
        expected = keys(ids(number, *range(lengths[number] - 1)))
        assert torch.equal(rows.read(row, 0, lengths[number]).k, expected.k)
        assert torch.equal(rows.read(row, 0, lengths[number]).v, expected.v)
    rows.remove(2)
    assert rows.lengths == [3, 130]
