"""Samples become one packed row in which every shared prefix stands once.

The rows of a micro-batch form a tree: what several rows begin with is a segment, and each continuation hangs
below it. The packed row lists the segments depth first. A token's hidden state depends only on its ancestors in
the tree, that is on exactly the ids before it in its own row, so one forward pass over the packed row gives every
row's log-probs and one backward pass their gradients (`prefix_attention` does the attention; everything else in a
transformer works token by token).

Axis suffixes: `_N` packed ids; `_L` loss tokens: one entry per (row, trained id). Two rows may train the same
packed position with different advantages, or different ids after the same shared position, so the loss is a flat
list that points into the packed row, not a mask on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openforgerl.errors import InputError
from openforgerl.types import Sample


@dataclass(frozen=True, slots=True)
class Segment:
    """Packed ids `[start, stop)` are consecutive in their rows; `[stop, end)` are the segments that hang below.

    Ids of a segment see each other causally, and are seen by all of `[stop, end)`.
    """

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sample on its way into a pack: ids and what the loss wants at each trained place."""

    sample_id: str
    ids: tuple[int, ...]
    places: tuple[int, ...]
    """Indices into `ids` of the trained ids, ascending, none 0."""
    old_logprobs: tuple[float, ...]
    """Recorded log-prob of each trained id; zeros when the sample has none (SFT does not look)."""
    advantage: float
    weight: float
    """Of each trained token, from `algorithms.token_weights`."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A micro-batch."""

    ids_N: Tensor
    """int64."""
    position_N: Tensor
    """int64; place of the id in its own row, for rotary embeddings."""
    segments: tuple[Segment, ...]
    at_L: Tensor
    """int64; packed index whose logits predict the loss token (the id before it in its row)."""
    target_L: Tensor
    """int64; the trained id."""
    old_logprob_L: Tensor
    advantage_L: Tensor
    weight_L: Tensor
    row_L: Tensor
    """int64; index into `rows`."""
    rows: tuple[Row, ...]


def row_of(sample: Sample, weight: float, *, needs_logprobs: bool) -> Row:
    """The trained places of a sample with their recorded log-probs.

    Raises InputError, naming the sample, when its first id is trained (nothing precedes it), when log-probs or an
    advantage are needed (`needs_logprobs`) and missing, or when it carries images (not trained here yet).
    """
    if sample.images:
        raise InputError(f"sample {sample.sample_id}: images cannot be trained by the embedded learner")
    if needs_logprobs and sample.trained_tokens:
        missing = [name for name in ("logprobs", "advantage") if getattr(sample, name) is None]
        if missing:
            raise InputError(f"sample {sample.sample_id}: RL needs {' and '.join(missing)}; mask it or use SFT")
    places: list[int] = []
    old: list[float] = []
    seen = 0
    for span in sample.spans:
        length = span.stop - span.start
        if span.state == "trained":
            places.extend(range(span.start, span.stop))
            old.extend(sample.logprobs[seen : seen + length] if sample.logprobs else (0.0,) * length)
        seen += length
    if places and places[0] == 0:
        raise InputError(f"sample {sample.sample_id}: its first id is trained but has no context to be predicted from")
    return Row(sample.sample_id, sample.ids, tuple(places), tuple(old), sample.advantage or 0.0, weight)


def plan_micro_batches(rows: Sequence[Row], *, budget: int, min_shared: int) -> list[list[Row]]:
    """Split rows into micro-batches of at most `budget` packed ids each (a longer single row goes alone).

    Rows are sorted by their ids: rows with a common prefix become neighbours, and the result does not depend on
    the order in which rollouts happened to finish. Rows without a trained token are left out.
    """
    ordered = sorted((row for row in rows if row.places), key=lambda row: (row.ids, row.sample_id))
    batches: list[list[Row]] = []
    size = 0
    for row in ordered:
        new = len(row.ids)
        if batches:
            shared = common_length(batches[-1][-1].ids, row.ids)
            added = new - max(0, shared - min_shared + 1)  # the tree may leave up to min_shared - 1 ids unshared
            if size + added <= budget:
                batches[-1].append(row)
                size += added
                continue
        batches.append([row])
        size = new
    return batches


def pack(rows: Sequence[Row], *, min_shared: int, device: torch.device | str = "cpu") -> Pack:
    """Lay the rows out as a tree of shared prefixes of at least `min_shared` ids, depth first.

    Raises ValueError when there is no row or an empty one.
    """
    if not rows or any(not row.ids for row in rows):
        raise ValueError("pack needs at least one row, and no empty one")
    order = sorted(range(len(rows)), key=lambda index: rows[index].ids)
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    packed_at: list[list[int]] = [[] for _ in rows]  # row → packed index of each of its ids

    def lay(members: Sequence[int], depth: int) -> None:
        first = rows[members[0]].ids
        stop = len(first) if len(members) == 1 else common_length(first, rows[members[-1]].ids)
        start = len(ids)
        ids.extend(first[depth:stop])
        positions.extend(range(depth, stop))
        for member in members:
            packed_at[member].extend(range(start, len(ids)))
        place = len(segments)
        segments.append(Segment(start, len(ids), len(ids)))
        below = [member for member in members if len(rows[member].ids) > stop]
        for branch in _branches(rows, below, stop, min_shared):
            lay(branch, stop)
        segments[place] = Segment(start, segments[place].stop, len(ids))

    for root in _branches(rows, order, 0, min_shared):
        lay(root, 0)
    device = torch.device(device)
    loss = [(index, number, place) for index, row in enumerate(rows) for number, place in enumerate(row.places)]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Pack(
        ids_N=ints(ids),
        position_N=ints(positions),
        segments=tuple(segment for segment in segments if segment.stop > segment.start),
        at_L=ints([packed_at[index][place - 1] for index, _, place in loss]),
        target_L=ints([rows[index].ids[place] for index, _, place in loss]),
        old_logprob_L=floats([rows[index].old_logprobs[number] for index, number, _ in loss]),
        advantage_L=floats([rows[index].advantage for index, _, _ in loss]),
        weight_L=floats([rows[index].weight for index, _, _ in loss]),
        row_L=ints([index for index, _, _ in loss]),
        rows=tuple(rows),
    )


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids two rows begin with in common."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # bisection: slices compare in C, so long prefixes cost a few comparisons
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _branches(rows: Sequence[Row], members: Sequence[int], depth: int, min_shared: int) -> list[list[int]]:
    """Cut sorted `members` into runs whose rows share at least `min_shared` ids after `depth`.

    Sorted rows: the common prefix of a run is that of its first and last row, and it never grows as the run does.
    """
    runs: list[list[int]] = []
    for member in members:
        if runs and common_length(rows[runs[-1][0]].ids, rows[member].ids) >= depth + min_shared:
            runs[-1].append(member)
        else:
            runs.append([member])
    return runs
