"""What the engine gave for one call so far."""

from __future__ import annotations

import time

import msgspec

from openforgerl.errors import EngineError
from openforgerl.protocols import Renderer
from openforgerl.types import CallStatus, Chunk, FinishReason, ModelCall, WeightsSpan
from openforgerl.wire import ShownToken

_ROUNDING = 1e-3
"""What a log-prob of a token that is all but certain may be above 0 by."""


class SampledTokens:
    """Sampled ids with what is known about each. Log-probs count only when every id has one."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._sampling_logprobs: list[float] = []
        self._versions: list[tuple[int, int]] = []
        """Where each run of one weights version starts, and that version."""
        self._first_token: float | None = None

    def add(self, chunk: Chunk) -> None:
        """Take in one chunk, in order. EngineError when its log-probs are none; the ids count all the same."""
        if not chunk.ids:
            return
        if self._first_token is None:
            self._first_token = time.time()
        if not self._versions or self._versions[-1][1] != chunk.weights_version:
            self._versions.append((len(self.ids), chunk.weights_version))
        self.ids += chunk.ids
        for value in (*(chunk.logprobs or ()), *(chunk.sampling_logprobs or ())):
            if value > _ROUNDING:  # that they are finite `Chunk` sees to
                raise EngineError(f"the engine gave {value} as a log-prob, which is above 0")
        self._logprobs += chunk.logprobs or ()
        self._sampling_logprobs += chunk.sampling_logprobs or ()

    def shown(self, renderer: Renderer, start: int = 0) -> tuple[ShownToken, ...] | None:
        """The tokens from the `start`-th on as a client may see them, without the end of the turn.

        None unless every token has a log-prob.
        """
        if len(self._logprobs) != len(self.ids):
            return None
        return tuple(
            ShownToken(data=renderer.bytes_of(token_id), logprob=logprob)
            for token_id, logprob in zip(self.ids[start:], self._logprobs[start:], strict=True)
            if token_id not in renderer.stop_ids
        )

    def onto(self, call: ModelCall, *, status: CallStatus, finish: FinishReason) -> ModelCall:
        """`call` as it ended, at this moment."""
        whole = len(self._logprobs) == len(self.ids)
        stops = [start for start, _ in self._versions[1:]] + [len(self.ids)]
        spans = (
            tuple(
                WeightsSpan(start=start, stop=stop, version=version)
                for (start, version), stop in zip(self._versions, stops, strict=True)
            )
            if self.ids
            else ()
        )
        under_one = all(span.version == call.weights_version for span in spans)
        return msgspec.structs.replace(
            call,
            status=status,
            sampled_ids=tuple(self.ids),
            logprobs=tuple(self._logprobs) if whole and self.ids else None,
            sampling_logprobs=(
                tuple(self._sampling_logprobs) if self.ids and len(self._sampling_logprobs) == len(self.ids) else None
            ),
            weights_spans=() if under_one else spans,
            finish_reason=finish,
            timing=msgspec.structs.replace(call.timing, first_token=self._first_token, finished=time.time()),
        )
