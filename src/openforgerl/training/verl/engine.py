"""veRL's inference servers as our engine: ids in, ids out, sticky by session, the weights version of every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from openforgerl.errors import EngineError
from openforgerl.types import Chunk, FinishReason, Prompt, Sampling

_ABORTED = frozenset({"aborted", "abort"})
"""Stop reasons of an answer that a weight update cut short (veRL 0.9 `workers/rollout/*/*_server.py`)."""


class TokenAnswer(Protocol):
    """What we read of veRL's `TokenOutput`."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None
    extra_fields: dict[str, Any]


class Generate(Protocol):
    """`LLMServerClient.generate` of veRL 0.9: one whole answer, from the server that has seen `request_id` before."""

    async def __call__(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenAnswer: ...


class ServerEngine:
    """Implements `InferenceEngine` over veRL's servers.

    veRL answers whole, not token by token, and cannot be told to stop early: a client that leaves frees nothing.
    An answer that a weight update cuts short is continued under the new weights from the ids that it has, so a
    rollout survives the update; each piece says which version sampled it.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        context_length: int,
        stop_ids: Sequence[int],
        model_name: str = "policy",
        seeded: bool = True,
        retry_seconds: float = 0.5,
    ) -> None:
        """`seeded`: pass the session's seed on (SGLang's servers know no seed). `retry_seconds`: wait before an
        answer that was cut short without a new id is asked for again."""
        self._generate = generate
        self._context = context_length
        self._stop_ids = tuple(stop_ids)
        self._name = model_name
        self._seeded = seeded
        self._retry_seconds = retry_seconds
        self._version = 0

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def context_length(self) -> int:
        return self._context

    @property
    def weights_version(self) -> int:
        """The newest version seen in an answer, or told by `serves`: veRL counts versions in optimizer steps."""
        return self._version

    def serves(self, version: int) -> None:
        """The trainer says that the servers have at least this version."""
        self._version = max(self._version, version)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        affinity: str,
        priority: int = 0,
        deadline: float | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> AsyncIterator[Chunk]:
        """Sample an answer, one chunk for each weights version. Raises EngineError when the servers fail.

        Past `deadline` (Unix seconds) the last chunk says aborted and what was being sampled is lost.
        """
        left = min(sampling.max_tokens, self._context - len(prompt.ids))
        if prompt.images:
            raise EngineError("images cannot be sent to veRL's servers yet", status=400)
        if not prompt.ids or left < 1:
            raise EngineError(f"{len(prompt.ids)} prompt tokens do not fit a context of {self._context}", status=400)
        ids = list(prompt.ids)
        while True:
            answer = await self._ask(ids, sampling, left, len(prompt.ids), (affinity, deadline))
            if answer is None:
                yield Chunk(ids=(), logprobs=(), weights_version=self._version, finish=FinishReason.ABORTED)
                return
            chunk = self._chunk(answer, left)
            ids += chunk.ids
            left -= len(chunk.ids)
            if chunk.ids or chunk.finish is not None:
                yield chunk
            if chunk.finish is not None:
                return
            await asyncio.sleep(0 if chunk.ids else self._retry_seconds)

    async def close(self) -> None:
        """Nothing to free: the servers are veRL's."""

    async def _ask(
        self, ids: list[int], sampling: Sampling, left: int, prompted: int, scope: tuple[str, float | None]
    ) -> TokenAnswer | None:
        """One answer; None when the deadline passed first."""
        affinity, deadline = scope
        params = self._params(sampling, left, len(ids) - prompted)
        limit = asyncio.timeout(None if deadline is None else max(0.0, deadline - time.time()))
        try:
            async with limit:
                return await self._generate(affinity, prompt_ids=list(ids), sampling_params=params)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return None
            raise EngineError(f"veRL's inference server failed: {type(error).__name__}: {error}") from error

    def _params(self, sampling: Sampling, left: int, sampled: int) -> dict[str, Any]:
        """veRL's sampling parameters. Stop strings are the proxy's business."""
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": left,
            "logprobs": True,
            "stop_token_ids": list(self._stop_ids),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            if value := getattr(sampling, name):
                params[name] = value
        if self._seeded and sampling.seed is not None:
            # A continued answer must not draw the same numbers again.
            params["seed"] = (sampling.seed + sampled) & 0x7FFFFFFF
        return params

    def _chunk(self, answer: TokenAnswer, left: int) -> Chunk:
        ids = tuple(answer.token_ids)
        if len(ids) > left:
            raise EngineError(f"veRL's inference server sampled {len(ids)} tokens, {left} were asked for")
        known: Mapping[str, Any] = answer.extra_fields or {}
        version = known.get("max_global_steps", known.get("global_steps"))
        self.serves(self._version if version is None else int(version))
        logprobs = tuple(answer.log_probs) if answer.log_probs else None
        if logprobs is not None and len(logprobs) != len(ids):
            raise EngineError(f"veRL's inference server gave {len(logprobs)} log-probs for {len(ids)} tokens")
        finish = None
        if ids and ids[-1] in self._stop_ids:
            finish = FinishReason.STOP
        elif len(ids) == left or answer.stop_reason not in _ABORTED:
            finish = FinishReason.LENGTH  # also at a bound of the server's own
        return Chunk(
            ids=ids,
            logprobs=logprobs if ids else (),
            weights_version=self._version if version is None else int(version),
            finish=finish,
        )
