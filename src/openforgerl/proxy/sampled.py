"""What the engine gave for one call so far."""

from __future__ import annotations

import time

import msgspec

from openforgerl.types import CallStatus, Chunk, FinishReason, ModelCall, WeightsSpan


class SampledTokens:
    """Sampled ids with what is known about each. Log-probs count only when every id has one."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._sampling_logprobs: list[float] = []
        self._versions: list[WeightsSpan] = []
        self._first_token: float | None = None

    def add(self, chunk: Chunk) -> None:
        """Take in one chunk, in order."""
        if not chunk.ids:
            return
        if self._first_token is None:
            self._first_token = time.time()
        start = len(self.ids)
        self.ids += chunk.ids
        self._logprobs += chunk.logprobs or ()
        self._sampling_logprobs += chunk.sampling_logprobs or ()
        if self._versions and self._versions[-1].version == chunk.weights_version:
            self._versions[-1] = msgspec.structs.replace(self._versions[-1], stop=len(self.ids))
        else:
            self._versions.append(WeightsSpan(start=start, stop=len(self.ids), version=chunk.weights_version))

    def onto(self, call: ModelCall, *, status: CallStatus, finish: FinishReason) -> ModelCall:
        """`call` as it ended, at this moment."""
        whole = len(self._logprobs) == len(self.ids)
        under_one = all(span.version == call.weights_version for span in self._versions)
        return msgspec.structs.replace(
            call,
            status=status,
            sampled_ids=tuple(self.ids),
            logprobs=tuple(self._logprobs) if whole and self.ids else None,
            sampling_logprobs=(
                tuple(self._sampling_logprobs) if self.ids and len(self._sampling_logprobs) == len(self.ids) else None
            ),
            weights_spans=() if under_one else tuple(self._versions),
            finish_reason=finish,
            timing=msgspec.structs.replace(call.timing, first_token=self._first_token, finished=time.time()),
        )
