"""An upstream that speaks Anthropic Messages (API reference, "Messages", "Streaming Messages")."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.conversation import parse_arguments, plain_call_id
from openforgerl.engines.relay_api import (
    AnswerReader,
    Asking,
    Calls,
    base64_of,
    count_of,
    mapping_of,
    text_of,
    tool_function,
)
from openforgerl.engines.relay_faults import cut, in_stream, malformed
from openforgerl.errors import EngineError
from openforgerl.types import (
    FinishReason,
    Image,
    JsonValue,
    Message,
    MessageDelta,
    Part,
    Role,
    Sampling,
    Text,
    TextChunk,
    Usage,
)
from openforgerl.wire import SseEvent

VERSION = "2023-06-01"
"""Of the API; sent as `anthropic-version`."""

_FINISHES = {
    "end_turn": FinishReason.STOP,
    "tool_use": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
}

Block = dict[str, JsonValue]


class KeptThoughts:
    """Thought blocks with the provider's signatures, by session and by the tool call that they led to.

    With thinking on, this API wants them back, byte for byte, while a chain of tool calls goes on; harnesses only
    ever see our own handles. Call ids are compared as `conversation.plain_call_id` has them: dialects and harnesses
    write them in their own punctuation. Bounded: the oldest go first.
    """

    MOST = 5_000

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, str], tuple[Block, ...]] = OrderedDict()

    def put(self, affinity: str, call_id: str, blocks: Sequence[Block]) -> None:
        """Keep what stood before that call."""
        self._blocks[affinity, plain_call_id(call_id)] = tuple(blocks)
        while len(self._blocks) > self.MOST:
            self._blocks.popitem(last=False)

    def get(self, affinity: str, message: Message) -> tuple[Block, ...]:
        """The blocks that an assistant message began with; none when it is not one of ours."""
        if not message.tool_calls:
            return ()
        return self._blocks.get((affinity, plain_call_id(message.tool_calls[0].id)), ())


class AnthropicApi:
    """Questions as `messages` requests, always streamed."""

    path = "messages"

    def __init__(self) -> None:
        self._thoughts = KeptThoughts()

    def headers(self, key: str) -> dict[str, str]:
        """The key and the API's version."""
        return {"anthropic-version": VERSION, **({"x-api-key": key} if key else {})}

    def body(self, asking: Asking) -> tuple[dict[str, JsonValue], tuple[str, ...]]:
        """The request body. EngineError for a penalty, which this API has not; a seed is left out with a warning."""
        question, messages = asking.question, asking.question.conversation.messages
        leading = next((at for at, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
        body: dict[str, JsonValue] = {
            "model": asking.model,
            "max_tokens": asking.sampling.max_tokens,
            "stream": True,
            "messages": self._messages(messages[leading:], question.images, asking.affinity),
            **_sampling(asking.sampling),
        }
        if system := "\n\n".join(message.text for message in messages[:leading] if message.text):
            body["system"] = system
        if question.conversation.tools:
            described = [tool_function(tool) for tool in question.conversation.tools]
            body["tools"] = [
                {"name": name, "description": description, "input_schema": {"type": "object", **schema}}
                for name, description, schema in described
            ]
        if question.forced is not None:
            name = question.forced.name
            body["tool_choice"] = {"type": "any"} if name is None else {"type": "tool", "name": name}
        unsent = asking.sampling.seed is not None
        return body, ("the seed was not sent: the upstream's API has none",) if unsent else ()

    def reader(self, asking: Asking) -> AnswerReader:
        """A reader of the event sequence from `message_start` to `message_stop`."""
        return _Reader(asking, self._thoughts)

    def _messages(self, messages: Sequence[Message], images: Mapping[str, bytes], affinity: str) -> list[JsonValue]:
        """Turns that alternate: what stands next to each other in one role is one turn here."""
        turns: list[tuple[str, list[JsonValue]]] = []
        for message in messages:
            role = "assistant" if message.role is Role.ASSISTANT else "user"
            blocks = self._blocks(message, images, affinity)
            if not blocks:
                continue
            if not turns or turns[-1][0] != role:
                turns.append((role, []))
            turns[-1][1].extend(blocks)
        return [{"role": role, "content": blocks} for role, blocks in turns]

    def _blocks(self, message: Message, images: Mapping[str, bytes], affinity: str) -> list[JsonValue]:
        content = _content(message.parts, images)
        if message.role is Role.TOOL:
            result: Block = {"type": "tool_result", "tool_use_id": _plain_id(message.tool_call_id or "")}
            if content:
                result["content"] = content
            if message.is_error:
                result["is_error"] = True
            return [result]
        if message.role is Role.SYSTEM:
            return [{"type": "text", "text": f"<system>\n{message.text}\n</system>"}] if message.text else []
        blocks = [*self._thoughts.get(affinity, message), *content]
        for call in message.tool_calls:
            given = parse_arguments(call.arguments)
            # This API takes objects only; what is none was not written by its model, and must not be lost.
            shown = given if isinstance(given, dict) else {"arguments": call.arguments} if call.arguments else {}
            blocks.append({"type": "tool_use", "id": _plain_id(call.id), "name": call.name, "input": shown})
        return blocks


class _Reader:
    """`message_start`, blocks one after another, `message_delta` with the stop reason, `message_stop`."""

    def __init__(self, asking: Asking, thoughts: KeptThoughts) -> None:
        self._asking = asking
        self._thoughts = thoughts
        self._calls = Calls(asking.seed)
        self._kept: list[Block] = []
        """Thought blocks so far; the first tool call keeps them."""
        self._block = ""
        """Type of the block that is open."""
        self._argued = False
        self._finish: str | None = None
        self._usage: dict[str, int] = {}
        self._warnings: list[str] = []
        self.complete = False

    def feed(self, event: SseEvent) -> Sequence[MessageDelta]:
        """The pieces of one event. Raises Fault. Events of unknown types are skipped, as the API asks for."""
        try:
            decoded = msgspec.json.decode(event.data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise malformed("an event is not JSON") from error
        value = mapping_of(decoded, "an event")
        match value.get("type"):
            case "message_start":
                self._count(mapping_of(mapping_of(value.get("message"), "message").get("usage"), "usage"))
            case "content_block_start":
                return self._open(mapping_of(value.get("content_block"), "content_block"))
            case "content_block_delta":
                return self._more(mapping_of(value.get("delta"), "delta"))
            case "content_block_stop":
                return self._stop()
            case "message_delta":
                self._count(mapping_of(value.get("usage"), "usage"))
                reason = mapping_of(value.get("delta"), "delta").get("stop_reason")
                self._finish = reason if isinstance(reason, str) else self._finish
            case "message_stop":
                self.complete = True
            case "error":
                raise in_stream(value, self._asking.question.prompt_tokens, self._asking.limit)
            case _:
                return ()
        return ()

    def close(self) -> TextChunk:
        """Whole only with a stop reason and the end mark."""
        if self._finish is None or not self.complete:
            raise cut("the stream ended before the answer did")
        if self._kept and self._calls.count:
            self._thoughts.put(self._asking.affinity, self._calls.id(0), self._kept)
        finish = _FINISHES.get(self._finish)
        if finish is None:
            self._warnings.append(f"the upstream ended the answer with stop_reason {self._finish!r}")
        usage = self._usage
        cached, written = usage.get("cache_read_input_tokens", 0), usage.get("cache_creation_input_tokens", 0)
        return TextChunk(
            finish=finish or FinishReason.STOP,
            usage=Usage(
                # Input tokens leave out the cached ones in this API.
                prompt_tokens=usage.get("input_tokens", 0) + cached + written,
                completion_tokens=usage.get("output_tokens", 0),
                cached_tokens=cached,
                cache_written_tokens=written,
            )
            if usage
            else None,
            warnings=tuple(self._warnings),
        )

    def _open(self, block: Block) -> list[MessageDelta]:
        kind = text_of(block.get("type"), "a block's type")
        self._block = kind
        if kind == "text":
            return _piece("text", block.get("text"))
        if kind == "thinking":
            thought = text_of(block.get("thinking"), "a thought")
            signature = text_of(block.get("signature"), "a signature")
            self._kept.append({"type": "thinking", "thinking": thought, "signature": signature})
            return _piece("reasoning", thought)
        if kind == "redacted_thinking":
            self._kept.append(block)
        elif kind == "tool_use":
            self._argued = False
            opened = [self._calls.open(block.get("name"))]
            given = block.get("input")
            if isinstance(given, dict) and given:
                self._argued = True
                opened += self._calls.more(msgspec.json.encode(given).decode())
            return opened
        else:
            self._warnings.append(f"a block of type {kind!r} was left out of the answer")
        return []

    def _more(self, delta: Block) -> list[MessageDelta]:
        kind = delta.get("type")
        if kind == "text_delta" and self._block == "text":
            return _piece("text", delta.get("text"))
        if kind == "thinking_delta" and self._block == "thinking":
            thought = text_of(delta.get("thinking"), "a thought")
            self._kept[-1]["thinking"] += thought
            return _piece("reasoning", thought)
        if kind == "signature_delta" and self._block == "thinking":
            self._kept[-1]["signature"] += text_of(delta.get("signature"), "a signature")
        elif kind == "input_json_delta" and self._block == "tool_use":
            more = self._calls.more(text_of(delta.get("partial_json"), "partial_json"))
            self._argued = self._argued or bool(more)
            return more
        elif kind in ("text_delta", "thinking_delta", "input_json_delta") and self._block in ("", "text", "tool_use"):
            raise malformed(f"a {kind} outside its block")
        return []

    def _stop(self) -> list[MessageDelta]:
        block, self._block = self._block, ""
        # A tool without arguments gets no delta; what the model means by that is an empty object.
        return self._calls.more("{}") if block == "tool_use" and not self._argued else []

    def _count(self, usage: Block) -> None:
        for name in ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            if usage.get(name) is not None:
                self._usage[name] = count_of(usage[name])


def _piece(kind: str, text: JsonValue) -> list[MessageDelta]:
    said = text_of(text, f"a piece of {kind}")
    return [MessageDelta(kind="reasoning" if kind == "reasoning" else "text", text=said)] if said else []


def _sampling(sampling: Sampling) -> dict[str, JsonValue]:
    """What differs from this API's defaults."""
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, name):
            raise EngineError(f"the upstream's API has no {name}; the session must not set it")
    if sampling.repetition_penalty != 1:
        raise EngineError("the upstream's API has no repetition_penalty; the session must not set it")
    given: dict[str, tuple[JsonValue, JsonValue]] = {
        "temperature": (sampling.temperature, 1.0),
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, 0),
    }
    return {name: value for name, (value, default) in given.items() if value != default}


def _content(parts: Sequence[Part], images: Mapping[str, bytes]) -> list[JsonValue]:
    """Text and image blocks. This API refuses text of white space only."""
    blocks: list[JsonValue] = []
    for part in parts:
        if isinstance(part, Text) and part.text.strip():
            blocks.append({"type": "text", "text": part.text})
        elif isinstance(part, Image):
            source = {"type": "base64", "media_type": part.media_type, "data": base64_of(part, images)}
            blocks.append({"type": "image", "source": source})
    return blocks


def _plain_id(call_id: str) -> str:
    """A call id in the letters that this API takes."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", call_id) or "_"
