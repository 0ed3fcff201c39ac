"""Where keys and values live: an immutable tree of shared prefixes, and one growing row per decoding sequence.

The tree is a radix tree over token ids. A node holds the ids of one segment and their keys and values; what a
path from the root spells is a cached prefix. Nodes never change once they are read from; splitting or joining
them copies. `users` are the live sequences that rest on a node: such a node is not evicted. Roots are kept
by scope (the weights that computed the keys), so that nothing computed by other weights is ever found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int32]


class PrefixUser(Protocol):
    """A sequence that rests on nodes of the tree."""

    path: list[Node]

    def node_split(self, index: int) -> None:
        """`path[index]` has just become `path[index]` and `path[index + 1]`."""
        ...


@dataclass(slots=True, eq=False)
class Segment:
    """Keys and values of consecutive tokens, each (layers, tokens, key heads, head width)."""

    k: Tensor
    v: Tensor

    def part(self, start: int, stop: int) -> Segment:
        """A copy of tokens `[start, stop)` (a view would keep the whole memory alive)."""
        return Segment(self.k[:, start:stop].clone(), self.v[:, start:stop].clone())


@dataclass(slots=True, eq=False)
class Node:
    """One segment of the tree."""

    ids: Ids
    k: Tensor
    v: Tensor
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    users: set[PrefixUser] = field(default_factory=set)
    used_at: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)


def common_length(a: Ids, b: Ids) -> int:
    """How many leading ids agree."""
    count = min(len(a), len(b))
    differing = np.flatnonzero(a[:count] != b[:count])
    return int(differing[0]) if len(differing) else count


class PrefixTree:
    """Cached prefixes, least recently used out first. `budget` in tokens; what live sequences use stays."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens = 0
        """Tokens held, used or not."""
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0

    def matched(self, scope: Hashable, ids: Ids) -> int:
        """How many leading ids are cached; changes nothing."""
        return sum(count for _, count in self._walk(scope, ids))

    def acquire(self, scope: Hashable, ids: Ids, user: PrefixUser) -> list[Node]:
        """The nodes that spell the longest cached prefix of `ids`, kept until `release`."""
        path: list[Node] = []
        for node, count in list(self._walk(scope, ids)):
            path.append(node if count == node.length else self._split(node, count))
        self._clock += 1
        for node in path:
            node.users.add(user)
            node.used_at = self._clock
        return path

    def insert(self, scope: Hashable, ids: Ids, read: Callable[[int, int], Segment]) -> None:
        """Make `ids` a cached prefix; `read(start, stop)` gives the keys of the part not there yet."""
        at, parent = 0, self._root(scope)
        for node, count in list(self._walk(scope, ids)):
            parent = node if count == node.length else self._split(node, count)
            at += count
        if at == len(ids):
            return
        segment = read(at, len(ids))
        self._clock += 1
        node = Node(ids[at:].copy(), segment.k, segment.v, parent, used_at=self._clock)
        parent.children[int(node.ids[0])] = node
        self.tokens += node.length

    def release(self, path: Sequence[Node], user: PrefixUser) -> None:
        """`user` needs `path` no more. Unused chains without a branch are joined, so that paths stay short."""
        for node in path:
            node.users.discard(user)
        for node in reversed(path):
            self._join(node)

    def evict(self, spare: int = 0) -> None:
        """Drop the least recently used unused leaves until `spare` more tokens fit into the budget."""
        if self.tokens + spare <= self.budget:
            return
        # A tenth more than needed goes at once, so that the scan below is rare.
        target = max(0, self.budget - spare - self.budget // 10)
        while self.tokens > target:
            leaves = [node for node in self._nodes() if not node.children and not node.users]
            if not leaves:
                return
            for node in sorted(leaves, key=lambda leaf: leaf.used_at):
                self._drop(node)
                if self.tokens <= target:
                    return

    def keep_only(self, scope: Hashable) -> None:
        """Forget every other scope. Nobody may use their nodes any more."""
        self._roots = {kept: root for kept, root in self._roots.items() if kept == scope}
        self.tokens = sum(node.length for node in self._nodes())

    def _root(self, scope: Hashable) -> Node:
        root = self._roots.get(scope)
        if root is None:
            nothing = torch.empty(0)
            root = self._roots[scope] = Node(np.empty(0, np.int32), nothing, nothing, None)
        return root

    def _walk(self, scope: Hashable, ids: Ids) -> Iterator[tuple[Node, int]]:
        """Nodes along `ids` with how many of their ids agree; only the last may agree in part."""
        node, at = self._roots.get(scope), 0
        while node is not None and at < len(ids):
            node = node.children.get(int(ids[at]))
            if node is None:
                return
            count = common_length(node.ids, ids[at:])
            yield node, count
            if count < node.length:
                return
            at += count

    def _nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _split(self, node: Node, at: int) -> Node:
        """Put a new node before `node` that takes its first `at` ids; returns the new one."""
        parent = node.parent
        assert parent is not None and 0 < at < node.length
        head, tail = Segment(node.k, node.v).part(0, at), Segment(node.k, node.v).part(at, node.length)
        upper = Node(node.ids[:at].copy(), head.k, head.v, parent, users=set(node.users), used_at=node.used_at)
        parent.children[int(upper.ids[0])] = upper
        node.ids, node.k, node.v, node.parent = node.ids[at:].copy(), tail.k, tail.v, upper
        upper.children[int(node.ids[0])] = node
        for user in node.users:
            index = user.path.index(node)
            user.path.insert(index, upper)
            user.node_split(index)
        return upper

    def _join(self, node: Node) -> None:
        """Join `node` with its only child when nobody uses either."""
        if node.users or len(node.children) != 1:
            return
        child = next(iter(node.children.values()))
        if child.users:
            return
        node.ids = np.concatenate([node.ids, child.ids])
        node.k, node.v = torch.cat([node.k, child.k], dim=1), torch.cat([node.v, child.v], dim=1)
        node.children = child.children
        node.used_at = max(node.used_at, child.used_at)
        for grandchild in node.children.values():
            grandchild.parent = node

    def _drop(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[int(node.ids[0])]
        self.tokens -= node.length


class Rows:
    """The own keys of decoding sequences, padded to one tensor so that one kernel attends to all of them.

    Rows `[0, count)` are in use, without a gap. Buffers grow by doubling and start as zeros: a masked key's
    value is multiplied by zero, which must not meet a NaN.
    """

    def __init__(self, layers: int, key_heads: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (layers, key_heads, width)
        self._like = {"dtype": dtype, "device": device}
        self.lengths: list[int] = []
        self.k = self._zeros(1, 64)
        self.v = self._zeros(1, 64)

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Keys that a row can hold."""
        return self.k.shape[2]

    def add(self, segments: Sequence[Segment | Node]) -> int:
        """A new row holding `segments` one after the other; returns its index."""
        length = sum(segment.k.shape[1] for segment in segments)
        row = self.count
        self.lengths.append(0)
        self.reserve(length + 1)
        at = 0
        for segment in segments:
            end = at + segment.k.shape[1]
            self.k[:, row, at:end] = segment.k
            self.v[:, row, at:end] = segment.v
            at = end
        self.lengths[row] = length
        return row

    def remove(self, row: int) -> None:
        """Free a row; the last row moves into its place."""
        last = self.count - 1
        length = self.lengths.pop()
        if row == last:
            if last == 0:
                self._shrink()
            return
        self.k[:, row, :length] = self.k[:, last, :length]
        self.v[:, row, :length] = self.v[:, last, :length]
        self.lengths[row] = length

    def read(self, row: int, start: int, stop: int) -> Segment:
        """A copy of keys `[start, stop)` of a row."""
        return Segment(self.k[:, row, start:stop].clone(), self.v[:, row, start:stop].clone())

    def clear(self) -> None:
        """Free every row."""
        self.lengths.clear()
        self._shrink()

    def _shrink(self) -> None:
        """Give back what a busy hour needed, once no row is in use."""
        self.k, self.v = self._zeros(1, 64), self._zeros(1, 64)

    def reserve(self, length: int) -> None:
        """Make room for every row in use and `length` keys in each."""
        rows, capacity = self.k.shape[1], self.k.shape[2]
        if self.count <= rows and length <= capacity:
            return
        while rows < self.count:
            rows *= 2
        while capacity < length:
            capacity *= 2
        for name in ("k", "v"):
            old: Tensor = getattr(self, name)
            new = self._zeros(rows, capacity)
            new[:, : old.shape[1], : old.shape[2]] = old
            setattr(self, name, new)

    def _zeros(self, rows: int, capacity: int) -> Tensor:
        layers, key_heads, width = self._shape
        return torch.zeros(layers, rows, capacity, key_heads, width, **self._like)  # pyright: ignore[reportArgumentType]
