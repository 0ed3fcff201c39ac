"""Continuous batching, without threads: every `step` is one forward pass over whoever has work.

A step decodes one token of every decoding sequence and computes a bounded number of prompt tokens besides, so
that a long prompt delays nobody for long. Sequences join and leave between steps. A prompt starts from the
longest prefix in the tree; if a sequence that is being filled is about to put a longer one there, it waits
for it, so that a group of rollouts computes its prompt once.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openforgerl.engines.torch_attention import Fill, Step
from openforgerl.engines.torch_kv import Ids, Node, PrefixTree, Rows, Segment, common_length
from openforgerl.engines.torch_model import PackedModel
from openforgerl.engines.torch_sampling import Drawn, draw
from openforgerl.engines.torch_sequence import Sequence
from openforgerl.errors import EngineError
from openforgerl.types import Chunk, FinishReason

_WORTH_WAITING = 32
"""Tokens that another sequence must be about to share before one waits for them."""
_WORTH_SHARING = 64
"""Shortest common segment attended in place; shorter ones are copied to the row (one kernel less a layer)."""
_WORTH_KEEPING = 512
"""A segment this long stays in place even when nobody else uses it, so that it does not pad everybody's row."""
_LONGEST_ROW = 1024
"""Keys in a row before they become a segment of their own: every other row is padded to the longest."""
_LEAST_FILL = 32
"""Prompt tokens computed in a step however many sequences decode."""

Event = tuple[Sequence, Chunk | EngineError]


@dataclass(slots=True)
class Counters:
    """Totals since the engine started, in tokens unless said otherwise."""

    filled: int = 0
    """Prompt tokens computed."""
    reused: int = 0
    """Prompt tokens whose keys were found in the tree."""
    decoded: int = 0
    """Tokens sampled."""
    steps: int = 0
    """Forward passes."""


class Batcher:
    """Owns the model, the keys and the sequences. Not thread-safe: one thread submits, steps and loads."""

    def __init__(
        self, model: PackedModel, *, max_batch_tokens: int, max_sequences: int, kv_tokens: int, version: int = 0
    ) -> None:
        """`kv_tokens`: budget of cached keys. Live sequences may outgrow it; then nothing else is kept."""
        self.model = model
        self.version = version
        self.counters = Counters()
        self.tree = PrefixTree(kv_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._rows = Rows(model.layers, model.key_heads, model.width, dtype=model.dtype, device=model.device)
        self._waiting: list[Sequence] = []
        self._filling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        """In row order."""
        self._groups: list[tuple[Node, Tensor | None]] = []
        self._groups_stale = True
        self._arrivals = 0
        self._loads = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._filling) + len(self._decoding)

    def scope(self) -> Hashable:
        """What cached keys depend on besides ids. The load count tells two loads of one version apart."""
        return (self.version, self._loads)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        bisect.insort(self._waiting, sequence, key=lambda item: item.order)

    def next_deadline(self) -> float:
        """The earliest deadline of any sequence, Unix seconds; infinity when none has one."""
        return min((sequence.deadline for sequence in self._all()), default=math.inf)

    def any_cancelled(self) -> bool:
        """Whether `drop` would free a cancelled sequence's place."""
        return any(sequence.cancelled for sequence in self._all())

    def load(self, weights: Path | Mapping[str, object], version: int) -> None:
        """Replace the weights. Sequences in flight go on under the new ones, their keys computed anew.

        Raises InputError, with nothing changed, when the weights do not fit.
        """
        self.model.replace_weights(weights)
        running = [*self._filling, *self._decoding]
        self._abandon_running()
        for sequence in running:
            bisect.insort(self._waiting, sequence, key=lambda item: item.order)
        self.version = version
        self._loads += 1
        self.tree.keep_only(self.scope())

    def fail_all(self, error: EngineError) -> list[Event]:
        """Drop every sequence, waiting or running, with `error`."""
        events: list[Event] = [(sequence, error) for sequence in self._all()]
        self._waiting.clear()
        self._abandon_running()
        return events

    def drop(self) -> list[Event]:
        """Free the places of cancelled and expired sequences. An expired one ends as aborted."""
        now = time.time()
        events: list[Event] = []
        for sequence in self._all():
            if sequence.cancelled or sequence.deadline <= now:
                self._remove(sequence)
                aborted = Chunk(ids=(), logprobs=(), weights_version=self.version, finish=FinishReason.ABORTED)
                events.append((sequence, aborted))
        return events

    def step(self) -> list[Event]:
        """One forward pass; what it sampled and whom it failed. Empty when nobody can run."""
        events = self.drop()
        self._admit()
        plan, finished_fills = self._plan()
        if plan is None:
            return events
        sampled = [*self._decoding, *finished_fills]
        try:
            drawn = self._run(plan, sampled)
        except (RuntimeError, IndexError, ValueError, EngineError) as error:
            # Whose fault it was cannot be told: everybody in the batch fails, everybody waiting goes on.
            failed = EngineError(f"the model failed in a step: {type(error).__name__}: {error}")
            failed.__cause__ = error
            events += [(sequence, failed) for sequence in (*self._filling, *self._decoding)]
            self._abandon_running()
            return events
        for row in range(plan.decoding):
            self._rows.lengths[row] += 1
        for fill, sequence in zip(plan.fills, self._filling, strict=False):
            sequence.done += fill.stop - fill.start
            self.counters.filled += fill.stop - fill.start
        for sequence, entry in zip(sampled, drawn, strict=True):
            events.append((sequence, self._take(sequence, entry)))
        for sequence in self._decoding:
            self._shorten(sequence)
        self.counters.steps += 1
        self.tree.evict(spare=sum(self._rows.lengths))
        return events

    def _run(self, plan: Step, sampled: Items[Sequence]) -> list[Drawn]:
        with torch.inference_mode():
            logits = self.model.forward(plan)
            return draw(logits, [sequence.draws for sequence in sampled]) if sampled else []

    def _take(self, sequence: Sequence, drawn: Drawn) -> Chunk | EngineError:
        if not math.isfinite(drawn.logprob):
            self._remove(sequence, keep_keys=False)
            return EngineError("the model gave no finite log-prob for this sequence")
        chunk = sequence.take(drawn, self.version)
        self.counters.decoded += 1
        if chunk.finish is not None:
            self._remove(sequence)
        elif sequence.row is None:
            self._join(sequence)
        return chunk

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting sequences in, as long as there is room and this step could compute their prompts."""
        tokens = sum(len(sequence.ids) for sequence in (*self._filling, *self._decoding))
        to_fill = sum(sequence.left_to_fill for sequence in self._filling)
        for sequence in list(self._waiting):
            if self.running >= self._max_sequences or to_fill >= self._max_batch_tokens:
                return
            if self.running and tokens + len(sequence.ids) > self.tree.budget:
                return
            if self._computed_elsewhere(sequence):
                continue
            self._waiting.remove(sequence)
            # The last id is always computed: its logits are wanted.
            path = self.tree.acquire(self.scope(), sequence.array[:-1], sequence)
            matched = sum(node.length for node in path)
            sequence.begin_filling(path, self.model.segment(len(sequence.array) - matched))
            self._filling.append(sequence)
            self.counters.reused += matched
            tokens += len(sequence.ids)
            to_fill += sequence.left_to_fill

    def _computed_elsewhere(self, sequence: Sequence) -> bool:
        """Whether a longer prefix of `sequence` is being computed right now for somebody else."""
        ids = sequence.array[:-1]
        known = self.tree.matched(self.scope(), ids)
        for other in self._filling:
            shared = common_length(ids, other.array)
            if shared - known < _WORTH_WAITING:
                continue
            if other.cached < shared:
                return True
            self.tree.insert(self.scope(), other.array[: other.cached], _own_keys(other))
            known = shared
        return False

    # -- the plan of a step ------------------------------------------------------------------------------------

    def _plan(self) -> tuple[Step | None, list[Sequence]]:
        """The next step, and the sequences whose prompt it completes (in the order of their logits)."""
        count = len(self._decoding)
        ids = [sequence.ids[-1] for sequence in self._decoding]
        positions = [len(sequence.ids) - 1 for sequence in self._decoding]
        logits_at = list(range(count))
        fills, finished = self._fills(ids, positions, logits_at)
        if not ids:
            return None, []
        device = self.model.device
        step = Step(
            ids=torch.tensor([ids], dtype=torch.long, device=device),
            positions=torch.tensor([positions], dtype=torch.long, device=device),
            logits_at=torch.tensor(logits_at, dtype=torch.long, device=device),
            fills=fills,
        )
        if count:
            self._plan_decoding(step)
        return step, finished

    def _fills(self, ids: list[int], positions: list[int], logits_at: list[int]) -> tuple[list[Fill], list[Sequence]]:
        """Chunks of prompts for this step; their tokens are appended to the packed row."""
        left = max(_LEAST_FILL, self._max_batch_tokens - len(ids))
        fills: list[Fill] = []
        finished: list[Sequence] = []
        for sequence in self._filling:
            if left <= 0:
                break
            count = min(left, sequence.left_to_fill)
            left -= count
            at = sequence.cached
            assert sequence.own is not None
            start = len(ids)
            fill = Fill(start=start, stop=start + count, past=sequence.path, own=sequence.own, done=sequence.done)
            fills.append(fill)
            ids += sequence.ids[at : at + count]
            positions += range(at, at + count)
            if count == sequence.left_to_fill:
                finished.append(sequence)
                logits_at.append(len(ids) - 1)
        return fills, finished

    def _plan_decoding(self, step: Step) -> None:
        rows, device = self._rows, self.model.device
        longest = max(rows.lengths) + 1
        rows.reserve(longest)
        lengths = torch.tensor(rows.lengths, device=device)
        step.decoding, step.rows, step.longest = rows.count, rows, longest
        step.write_at = torch.arange(rows.count, device=device) * rows.capacity + lengths
        if min(rows.lengths) + 1 < longest:
            absent = torch.arange(longest, device=device) > lengths[:, None]
            mask = torch.zeros(absent.shape, dtype=self.model.dtype, device=device)
            step.mask = mask.masked_fill_(absent, float("-inf"))[:, None, None]
        if self._groups_stale or any(sequence.layout_changed for sequence in self._decoding):
            self._groups = self._regroup()
            self._groups_stale = False
        step.groups = self._groups

    def _regroup(self) -> list[tuple[Node, Tensor | None]]:
        members: dict[Node, list[int]] = {}
        for row, sequence in enumerate(self._decoding):
            sequence.layout_changed = False
            for node in sequence.path[: sequence.in_place]:
                members.setdefault(node, []).append(row)
        return [
            (node, None if len(rows) == len(self._decoding) else torch.tensor(rows, device=self.model.device))
            for node, rows in members.items()
        ]

    # -- joining and leaving -------------------------------------------------------------------------------------

    def _join(self, sequence: Sequence) -> None:
        """A filled sequence starts to decode: its prompt becomes a shared prefix, it gets a row."""
        self.tree.insert(self.scope(), sequence.array, _own_keys(sequence))
        sequence.path = self.tree.acquire(self.scope(), sequence.array, sequence)
        sequence.in_place = _in_place(sequence.path)
        sequence.own, sequence.done = None, 0
        sequence.own_start = sum(node.length for node in sequence.path[: sequence.in_place])
        self._filling.remove(sequence)
        sequence.row = self._rows.add(sequence.path[sequence.in_place :])
        self._decoding.append(sequence)
        self._groups_stale = True

    def _shorten(self, sequence: Sequence) -> None:
        """Move a row that has grown long into the tree, where it pads nobody."""
        assert sequence.row is not None
        if self._rows.lengths[sequence.row] < _LONGEST_ROW:
            return
        ids = self._store_row(sequence, sequence.row)
        sequence.path = self.tree.acquire(self.scope(), ids, sequence)
        sequence.in_place = len(sequence.path)
        sequence.own_start = len(ids)
        self._rows.lengths[sequence.row] = 0
        self._groups_stale = True

    def _store_row(self, sequence: Sequence, row: int) -> Ids:
        """Put every key that a decoding sequence has computed into the tree; returns their ids."""
        start = sequence.own_start
        ids = np.array(sequence.ids[: start + self._rows.lengths[row]], dtype=np.int32)
        self.tree.insert(self.scope(), ids, lambda first, stop: self._rows.read(row, first - start, stop - start))
        return ids

    def _remove(self, sequence: Sequence, *, keep_keys: bool = True) -> None:
        """Free whatever the sequence holds; the keys it computed stay in the tree when `keep_keys`."""
        if sequence.row is not None:
            self._leave_row(sequence, sequence.row, keep_keys)
        elif sequence.own is not None:
            if keep_keys and sequence.done:
                self.tree.insert(self.scope(), sequence.array[: sequence.cached], _own_keys(sequence))
            self._filling.remove(sequence)
            sequence.own = None
        else:
            self._waiting.remove(sequence)
        self.tree.release(sequence.path, sequence)
        sequence.path = []

    def _leave_row(self, sequence: Sequence, row: int, keep_keys: bool) -> None:
        if keep_keys:
            self._store_row(sequence, row)
        self._rows.remove(row)
        last = self._decoding.pop()
        if last is not sequence:
            self._decoding[row] = last
            last.row = row
        sequence.row = None
        self._groups_stale = True

    def _abandon_running(self) -> None:
        for sequence in (*self._filling, *self._decoding):
            self.tree.release(sequence.path, sequence)
            sequence.wait_again()
        self._filling.clear()
        self._decoding.clear()
        self._rows.clear()
        self._groups_stale = True

    def _all(self) -> list[Sequence]:
        return [*self._waiting, *self._filling, *self._decoding]


def _own_keys(sequence: Sequence) -> Callable[[int, int], Segment]:
    """Reader of the keys that a filling sequence has computed."""

    def read(start: int, stop: int) -> Segment:
        own, first = sequence.own, sequence.own_start
        assert own is not None and start >= first
        if start == first and stop == len(sequence.array):
            return own  # complete and never written again: no copy needed
        return own.part(start - first, stop - first)

    return read


def _in_place(path: Items[Node]) -> int:
    """How many leading nodes of a path are attended where they are; the rest is copied to the sequence's row."""
    count = 0
    for index, node in enumerate(path):
        shared = len(node.users) > 1 or len(node.children) > 1
        if node.length >= (_WORTH_SHARING if shared else _WORTH_KEEPING):
            count = index + 1
    return count
