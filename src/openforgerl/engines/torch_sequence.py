"""One generation on its way through the torch engine."""

from __future__ import annotations

import math
from collections.abc import Sequence as IdSequence

import numpy as np

from openforgerl.engines.torch_kv import Ids, Node, Segment
from openforgerl.engines.torch_sampling import Drawn, Draws
from openforgerl.types import Chunk, FinishReason


class Sequence:
    """Ids so far and where their keys are.

    Waiting: keys nowhere. Filling: keys of `path` and of `own[:done]`. Decoding: keys of `path[:in_place]` and,
    behind them, of row `row`; every id but the last has its key.
    """

    def __init__(
        self,
        prompt_ids: IdSequence[int],
        draws: Draws,
        *,
        most_tokens: int,
        stop_ids: frozenset[int],
        priority: int,
        deadline: float | None,
    ) -> None:
        """`most_tokens`: most ids sampled. `deadline`: Unix seconds."""
        self.ids: list[int] = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.draws = draws
        self.most_tokens = most_tokens
        self.stop_ids = stop_ids
        self.priority = priority
        self.deadline = math.inf if deadline is None else deadline
        self.arrival = 0
        self.cancelled = False
        """Set from any thread; the engine drops the sequence before its next step."""
        self.layout_changed = False
        """A shared segment was split: the step's plan must be made anew."""
        self.path: list[Node] = []
        self.in_place = 0
        """`path[:in_place]` is attended where it is; the rest of the path was copied to the row."""
        self.own: Segment | None = None
        self.own_start = 0
        """Position of the first token of `own` (filling) or of the row (decoding)."""
        self.done = 0
        self.row: int | None = None
        self.array: Ids = np.array(self.ids, dtype=np.int32)
        """`ids` when the sequence began to wait."""

    @property
    def order(self) -> tuple[int, int]:
        """Higher priority first, then first come first served."""
        return (-self.priority, self.arrival)

    @property
    def cached(self) -> int:
        """While filling: tokens whose keys exist."""
        return self.own_start + self.done

    @property
    def left_to_fill(self) -> int:
        return len(self.array) - self.cached

    def node_split(self, index: int) -> None:
        """`path[index]` has become two nodes (called by the tree)."""
        if index < self.in_place:
            self.in_place += 1
        self.layout_changed = True

    def begin_filling(self, path: list[Node], own: Segment) -> None:
        """Start on the ids that `path` does not hold; their keys go to `own`."""
        self.path, self.own = path, own
        self.own_start = sum(node.length for node in path)
        self.done = self.in_place = 0

    def wait_again(self) -> None:
        """Keys are gone (other weights): the ids so far will be computed anew."""
        self.path, self.own, self.row = [], None, None
        self.own_start = self.done = self.in_place = 0
        self.array = np.array(self.ids, dtype=np.int32)

    def take(self, drawn: Drawn, version: int) -> Chunk:
        """Append a sampled id; its chunk says whether the answer ends."""
        self.ids.append(drawn.id)
        finish = None
        if drawn.id in self.stop_ids:
            finish = FinishReason.STOP
        elif len(self.ids) - self.prompt_length >= self.most_tokens:
            finish = FinishReason.LENGTH
        return Chunk(
            ids=(drawn.id,),
            logprobs=(drawn.logprob,),
            weights_version=version,
            finish=finish,
            sampling_logprobs=None if drawn.sampling_logprob is None else (drawn.sampling_logprob,),
        )
