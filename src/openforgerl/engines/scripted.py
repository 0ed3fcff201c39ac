"""An engine that answers from a script: for tests, for teachers, for trying a harness without a model.

Each session (`affinity`) walks through the script on its own: the first entry that fits the last message and
is not used up answers. The count is kept in memory; a restarted engine begins again.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from openforgerl.engines.options import EngineOptions
from openforgerl.engines.script import Answer, Script, ScriptedError
from openforgerl.errors import EngineError, EngineOverloaded, InputError
from openforgerl.protocols import Renderer
from openforgerl.types import Chunk, Conversation, FinishReason, Message, Prompt, Role, Sampling, Text

DEFAULT_CONTEXT = 32768
"""Tokens, when nothing else is said: a script has no limit of its own."""


class ScriptedEngine:
    """Gives a script's answers as ids, token by token. It has no log-probs: chunks carry None (never RL data)."""

    def __init__(
        self,
        script: Script | Callable[[str], Script],
        renderer: Renderer,
        *,
        model_name: str = "scripted",
        context_length: int = DEFAULT_CONTEXT,
        weights_version: int = 0,
    ) -> None:
        """`script` for every session, or a function from session id to that session's script (called once)."""
        self._source = script
        self._renderer = renderer
        self._model_name = model_name
        self._context_length = context_length
        self._weights_version = weights_version
        self._scripts: dict[str, Script] = {}
        self._used: dict[str, Counter[int]] = {}
        self._closed = False

    @classmethod
    def open(cls, path: Path, renderer: Renderer, options: EngineOptions) -> ScriptedEngine:
        """An engine that answers from the file at `path`. Raises InputError naming entry and field."""
        script = Script.load(path)
        for at, answer in enumerate(script.answers):
            unknown = [number for number in answer.token_ids or () if not renderer.bytes_of(number)]
            if unknown:
                raise InputError(f"{path}: answers[{at}].token_ids: {unknown[0]} is no token of this tokenizer")
        return cls(
            script,
            renderer,
            model_name=options.model_name or "scripted",
            context_length=options.context_length or DEFAULT_CONTEXT,
        )

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def weights_version(self) -> int:
        return self._weights_version

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
        """The next fitting answer of session `affinity`, `chunk_tokens` ids at a time.

        Sampling parameters other than `max_tokens` change nothing. Past `deadline` (Unix seconds) the last
        chunk says aborted. Raises EngineError(500) with the last message's text when no entry is left.
        """
        if self._closed:
            raise EngineError("the scripted engine is closed", status=503)
        room = self._context_length - len(prompt.ids)
        if room < 1:
            raise EngineError(f"{len(prompt.ids)} prompt tokens leave no room in a context of {self._context_length}")
        answer = self._next_answer(affinity, last_message_text(prompt, self._renderer))
        ids, finish = self._ids(answer, prompt)
        limit = min(sampling.max_tokens, room)
        if len(ids) > limit:
            ids, finish = ids[:limit], FinishReason.LENGTH
        for start in range(0, max(len(ids), 1), answer.chunk_tokens):
            if not await _waited(answer.delay_s, deadline):
                yield Chunk(ids=(), logprobs=None, weights_version=self._weights_version, finish=FinishReason.ABORTED)
                return
            stop = start + answer.chunk_tokens
            cut = answer.cut_after_tokens
            if cut is not None and cut <= min(stop, len(ids)):
                if ids[start:cut]:
                    yield Chunk(ids=ids[start:cut], logprobs=None, weights_version=self._weights_version)
                raise EngineError(f"the script cuts this answer after {cut} tokens", status=500)
            yield Chunk(
                ids=ids[start:stop],
                logprobs=None,
                weights_version=self._weights_version,
                finish=finish if stop >= len(ids) else None,
            )

    async def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def _next_answer(self, session: str, text: str) -> Answer:
        if session not in self._scripts:
            self._scripts[session] = self._source if isinstance(self._source, Script) else self._source(session)
            self._used[session] = Counter()
        used = self._used[session]
        for index, answer in enumerate(self._scripts[session].answers):
            if answer.times and used[index] >= answer.times:
                continue
            if answer.match is not None and re.search(answer.match, text) is None:
                continue
            used[index] += 1
            if answer.error is not None:
                raise _as_engine_error(answer.error)
            return answer
        raise EngineError(
            f"the script has no unused answer for session {session!r}, whose last message is {text[-400:]!r}",
            status=500,
        )

    def _ids(self, answer: Answer, prompt: Prompt) -> tuple[tuple[int, ...], FinishReason]:
        stops = self._renderer.stop_ids
        if answer.token_ids is not None:
            ids = answer.token_ids
        elif answer.raw is not None:
            ids = self._renderer.encode(answer.raw)
            if not ids or ids[-1] not in stops:
                ids = (*ids, *stops[:1])
        else:
            # Templates may treat an answer without a question differently, so it gets the one that was asked.
            question = Message(role=Role.USER, parts=(Text(last_message_text(prompt, self._renderer)),))
            ids = self._renderer.encode_answer(answer.message(), Conversation(messages=(question,)))
        if answer.finish_reason == "length" and answer.token_ids is None and ids and ids[-1] in stops:
            ids = ids[:-1]
        ends = bool(ids) and ids[-1] in stops
        if answer.finish_reason is None:
            return ids, FinishReason.STOP if ends else FinishReason.LENGTH
        return ids, FinishReason.LENGTH if answer.finish_reason == "length" else FinishReason.STOP


def last_message_text(prompt: Prompt, renderer: Renderer) -> str:
    """Text of the last message that put data into the prompt; of the whole prompt when its origins are unknown."""
    indices = [span.message for span in prompt.origins if span.kind == "data" and span.message is not None]
    if not indices:
        return renderer.decode(prompt.ids)
    last = max(indices)
    ids = [
        id
        for span in prompt.origins
        if span.kind == "data" and span.message == last
        for id in prompt.ids[span.start : span.stop]
    ]
    return renderer.decode(ids)


async def _waited(seconds: float, deadline: float | None) -> bool:
    """Wait before a chunk; False when the deadline comes first."""
    left = float("inf") if deadline is None else deadline - time.time()
    await asyncio.sleep(max(0.0, min(seconds, left)))
    return seconds <= left


def _as_engine_error(error: ScriptedError) -> EngineError:
    if error.status == 429:
        return EngineOverloaded(
            "the script says: overloaded", retry_after=1.0 if error.retry_after is None else error.retry_after
        )
    return EngineError(f"the script says: error {error.status}", status=error.status, retry_after=error.retry_after)
