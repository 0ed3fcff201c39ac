"""An answer that came as text: what is known of it, and its ids as our own renderer writes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import msgspec

from openforgerl.conversation import parse_arguments, same_message
from openforgerl.errors import TemplateError
from openforgerl.protocols import ConversationEngine, Engine, Renderer
from openforgerl.proxy.prompting import LONG, characters
from openforgerl.types import (
    Chunk,
    FinishReason,
    Message,
    ModelCall,
    Prompt,
    Session,
    TextChunk,
    Usage,
)

RELAYED = "relay"
"""Why RL masks such a call: its ids are a re-encoding, and nobody's log-probs belong to them."""


class SpokenAnswer:
    """What an engine that answers in text gave for one call so far."""

    def __init__(self, renderer: Renderer, session: Session) -> None:
        self._renderer = renderer
        self._session = session
        self._warnings: list[str] = []
        self._first: float | None = None
        self.usage: Usage | None = None
        """What the engine counted, when it said so."""

    @classmethod
    def of(cls, engine: Engine, renderer: Renderer, session: Session) -> SpokenAnswer | None:
        """For an engine that answers in text; None for one that takes and gives ids."""
        return cls(renderer, session) if isinstance(engine, ConversationEngine) else None

    def add(self, chunk: TextChunk) -> None:
        """Take in one chunk, in order."""
        if chunk.deltas and self._first is None:
            self._first = time.time()
        if chunk.usage is not None:
            self.usage = chunk.usage
        self._warnings += chunk.warnings

    def note(self, warning: str) -> None:
        """Something for the record."""
        self._warnings.append(warning)

    async def encoded(self, call: ModelCall, message: Message, finish: FinishReason) -> Chunk:
        """`encode`, in a thread when the conversation is long: other calls must not wait for it."""
        if characters(call.conversation) < LONG:
            return self.encode(call, message, finish)
        return await asyncio.to_thread(self.encode, call, message, finish)

    def encode(self, call: ModelCall, message: Message, finish: FinishReason) -> Chunk:
        """The answer's ids as the template writes `message` after the call's conversation; none where that is no use.

        An answer that did not end by itself has no closing token. One cut inside a tool call is not encoded: the
        template would close what nobody closed.
        """
        none = Chunk(ids=(), logprobs=None, weights_version=call.weights_version)
        cut = finish is not FinishReason.STOP
        if not call.prompt.ids:
            return none
        if cut and message.tool_calls and parse_arguments(message.tool_calls[-1].arguments) is None:
            self._warnings.append("not encoded: the answer was cut inside a tool call")
            return none
        kwargs = self._session.template_kwargs
        try:
            ids = self._renderer.encode_answer(message, call.conversation, clock=self._session.opened_at, kwargs=kwargs)
        except TemplateError as error:
            self._warnings.append(f"not encoded: {error}")
            return none
        parser = self._renderer.parser(call.conversation, call.prompt, seed=call.call_id)
        parser.feed(ids)
        if not same_message(parser.finish()[1], message):
            self._warnings.append("the chat template writes this answer differently from what was said")
        if cut and ids and ids[-1] in self._renderer.stop_ids:
            ids = ids[:-1]
        return Chunk(ids=ids, logprobs=None, weights_version=call.weights_version)

    def counts(self, prompt_tokens: int, completion_tokens: int) -> tuple[int, int]:
        """Size of prompt and answer: the engine's own numbers, else ours (given)."""
        if self.usage is None:
            return prompt_tokens, completion_tokens
        return self.usage.prompt_tokens, self.usage.completion_tokens

    def onto(self, call: ModelCall) -> ModelCall:
        """`call` with what only the engine knew."""
        return msgspec.structs.replace(
            call,
            usage=self.usage,
            warnings=(*call.warnings, *dict.fromkeys(self._warnings)),
            timing=msgspec.structs.replace(call.timing, first_token=self._first),
        )


async def render_or_note(rendering: Coroutine[Any, Any, Prompt], spoken: SpokenAnswer) -> Prompt:
    """The prompt; an empty one, noted, where our template cannot write what the engine may well take.

    Such a call is answered and recorded, but no training row can be made of it.
    """
    try:
        return await rendering
    except TemplateError as error:
        spoken.note(f"not encoded: {error}")
        return Prompt(ids=())
