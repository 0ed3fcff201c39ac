"""A trainer's own inference servers as our engine: ids in, ids out, sticky by session, the version of every token.

veRL's `LLMServerClient` is such a server, and so is the vLLM actor that OpenRLHF gives an agent executor.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from PIL import Image, ImageOps

from openforgerl.engines.continuing import Answer
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
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
    ) -> TokenAnswer:
        """`image_data`: Pillow images in order of appearance; the prompt has all their placeholders."""
        ...


class BorrowedEngine:
    """Implements `InferenceEngine` over the servers of a trainer.

    They answer whole, not token by token, and cannot be told to stop early: a client that leaves frees nothing.
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
        owner: str = "veRL",
        seeded: bool = True,
        retry_seconds: float = 0.5,
    ) -> None:
        """`owner`: the trainer's name, for messages. `seeded`: pass the session's seed on (SGLang's servers know no
        seed). `retry_seconds`: wait before an answer that was cut short without a new id is asked for again.
        """
        self._generate = generate
        self._context = context_length
        self._stop_ids = tuple(stop_ids)
        self._name = model_name
        self._owner = owner
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
        asked = Answer.begin(prompt, sampling, context=self._context, images=images)
        shown = [upright(data) for data in asked.images]
        while True:
            answer = await self._ask(asked, shown, affinity, deadline)
            if answer is None:
                yield Chunk(ids=(), logprobs=(), weights_version=self._version, finish=FinishReason.ABORTED)
                return
            chunk = self._chunk(answer, asked.left)
            asked.take(chunk.ids)
            if chunk.ids or chunk.finish is not None:
                yield chunk
            if chunk.finish is not None:
                return
            await asyncio.sleep(0 if chunk.ids else self._retry_seconds)

    async def close(self) -> None:
        """Nothing to free: the servers are the trainer's."""

    async def _ask(
        self, asked: Answer, shown: list[Image.Image], affinity: str, deadline: float | None
    ) -> TokenAnswer | None:
        """One answer; None when the deadline passed first."""
        params = self._params(asked.rest)
        more: dict[str, Any] = {"image_data": shown} if shown else {}
        limit = asyncio.timeout(None if deadline is None else max(0.0, deadline - time.time()))
        try:
            async with limit:
                return await self._generate(affinity, prompt_ids=asked.ids, sampling_params=params, **more)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return None
            raise EngineError(f"{self._owner}'s inference server failed: {type(error).__name__}: {error}") from error

    def _params(self, sampling: Sampling) -> dict[str, Any]:
        """vLLM's sampling parameters. Stop strings are the proxy's business."""
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": sampling.max_tokens,
            "logprobs": True,
            "stop_token_ids": list(self._stop_ids),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            if value := getattr(sampling, name):
                params[name] = value
        if self._seeded and sampling.seed is not None:
            params["seed"] = sampling.seed
        return params

    def _chunk(self, answer: TokenAnswer, left: int) -> Chunk:
        ids = tuple(answer.token_ids)
        if len(ids) > left:
            raise EngineError(f"{self._owner}'s inference server sampled {len(ids)} tokens, {left} were asked for")
        known: Mapping[str, Any] = answer.extra_fields or {}
        version = known.get("max_global_steps", known.get("global_steps"))
        self.serves(self._version if version is None else int(version))
        logprobs = tuple(answer.log_probs) if answer.log_probs else None
        if logprobs is not None and len(logprobs) != len(ids):
            raise EngineError(f"{self._owner}'s inference server gave {len(logprobs)} log-probs for {len(ids)} tokens")
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


def upright(data: bytes) -> Image.Image:
    """An encoded image as its pixels, the way up that its placeholders were counted for."""
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")
