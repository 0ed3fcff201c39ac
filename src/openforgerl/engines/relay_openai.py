"""An upstream that speaks OpenAI chat completions (API reference, "Chat Completions", "Streaming")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.conversation import parse_arguments
from openforgerl.engines.options import RelayOptions
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
    ToolCall,
    ToolSpec,
    Usage,
)
from openforgerl.wire import SseEvent

_FINISHES = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.LENGTH,
}


class OpenAiApi:
    """Questions as `chat/completions` requests, always streamed."""

    path = "chat/completions"

    def __init__(self, options: RelayOptions) -> None:
        self._options = options

    def headers(self, key: str) -> dict[str, str]:
        """The key as bearer token."""
        return {"Authorization": f"Bearer {key}"} if key else {}

    def body(self, asking: Asking) -> tuple[dict[str, JsonValue], tuple[str, ...]]:
        """The request body. Nothing that we apply is lost in this API."""
        question = asking.question
        body: dict[str, JsonValue] = {
            "model": asking.model,
            "messages": self._messages(question.conversation.messages, question.images),
            "stream": True,
            "stream_options": {"include_usage": True},
            self._options.max_tokens_field: asking.sampling.max_tokens,
            **_sampling(asking.sampling),
        }
        if question.conversation.tools:
            body["tools"] = [_tool(tool) for tool in question.conversation.tools]
        if question.forced is not None:
            name = question.forced.name
            body["tool_choice"] = "required" if name is None else {"type": "function", "function": {"name": name}}
        return body, ()

    def reader(self, asking: Asking) -> AnswerReader:
        """A reader of `chat.completion.chunk` events."""
        return _Reader(asking)

    def _messages(self, messages: Sequence[Message], images: Mapping[str, bytes]) -> list[JsonValue]:
        """Messages as this API takes them. A tool result holds text only, so images of a run of results follow it."""
        written: list[JsonValue] = []
        seen: list[JsonValue] = []
        for message in messages:
            if message.role is not Role.TOOL and seen:
                written.append({"role": "user", "content": seen})
                seen = []
            if message.role is Role.TOOL:
                shown = [_image(part, images) for part in message.parts if isinstance(part, Image)]
                text = message.text or ("(an image; it follows)" if shown else "")
                written.append({"role": "tool", "tool_call_id": message.tool_call_id or "", "content": text})
                seen += shown
            elif message.role is Role.ASSISTANT:
                written.append(self._assistant(message))
            else:
                written.append({"role": message.role.value, "content": _content(message.parts, images)})
        if seen:
            written.append({"role": "user", "content": seen})
        return written

    def _assistant(self, message: Message) -> dict[str, JsonValue]:
        body: dict[str, JsonValue] = {
            "role": "assistant",
            "content": message.text if message.text or not message.tool_calls else None,
        }
        if self._options.send_reasoning and message.reasoning:
            body["reasoning_content"] = message.reasoning
        if message.tool_calls:
            body["tool_calls"] = [_call(call) for call in message.tool_calls]
        return body


class _Told(msgspec.Struct, kw_only=True):
    """One tool call as the upstream tells it."""

    index: JsonValue
    id: str
    """The upstream's own; "" when it gives none."""
    name: JsonValue
    held: list[str]
    """Pieces of arguments that are not passed on yet."""
    passed: list[str] = []
    opened: bool = False

    @property
    def whole(self) -> bool:
        """Whether its arguments are one JSON object: then nothing but white space can follow."""
        if not (self.passed and self.passed[-1].rstrip().endswith("}")):
            return False
        return isinstance(parse_arguments("".join(self.passed)), dict)


class _Reader:
    """Content, thoughts, calls, the finish reason, then the usage, then `[DONE]`.

    Upstreams may tell several calls in turns, a piece of each at a time; answers go on one call after another.
    Nothing in this API says where a call ends, so a later one is held back until the arguments of all earlier ones
    are whole, or else to the end of the answer.
    """

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._calls = Calls(asking.seed)
        self._told: list[_Told] = []
        self._at = 0
        """Place in `_told` of the call whose pieces are passed on as they come."""
        self._finish: str | None = None
        self._usage: Usage | None = None
        self._warnings: list[str] = []
        self.complete = False

    def feed(self, event: SseEvent) -> Sequence[MessageDelta]:
        """The pieces of one chunk. Raises Fault."""
        if event.data.strip() == "[DONE]":
            self.complete = True
            return ()
        try:
            value = msgspec.json.decode(event.data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise malformed("an event is not JSON") from error
        chunk = mapping_of(value, "an event")
        if chunk.get("error"):
            raise in_stream(chunk, self._asking.question.prompt_tokens, self._asking.limit)
        if chunk.get("usage") is not None:
            self._usage = _usage(mapping_of(chunk["usage"], "usage"))
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            if choices is None:
                return ()
            raise malformed("choices is no list")
        return [delta for choice in choices[:1] for delta in self._choice(mapping_of(choice, "a choice"))]

    def close(self) -> TextChunk:
        """A finish reason makes the answer whole: not every server sends `[DONE]`."""
        if self._finish is None:
            raise cut("the stream ended before the answer did")
        finish = _FINISHES.get(self._finish)
        if finish is None:
            self._warnings.append(f"the upstream ended the answer with finish_reason {self._finish!r}")
            finish = FinishReason.STOP
        elif self._finish == "content_filter":
            self._warnings.append("the upstream's content filter cut the answer")
        deltas = tuple(self._passed_on(ended=True))
        return TextChunk(deltas=deltas, finish=finish, usage=self._usage, warnings=tuple(self._warnings))

    def _choice(self, choice: dict[str, JsonValue]) -> list[MessageDelta]:
        delta = mapping_of(choice.get("delta"), "a delta")
        deltas: list[MessageDelta] = []
        thought = text_of(delta.get("reasoning_content"), "reasoning_content")
        if not thought and isinstance(delta.get("reasoning"), str):
            thought = delta["reasoning"]
        for kind, text in (
            ("reasoning", thought),
            ("text", text_of(delta.get("content"), "content")),
            ("text", text_of(delta.get("refusal"), "refusal")),
        ):
            if text:
                deltas.append(MessageDelta(kind="reasoning" if kind == "reasoning" else "text", text=text))
        calls = delta.get("tool_calls") or []
        if not isinstance(calls, list):
            raise malformed("tool_calls is no list")
        for call in calls:
            deltas += self._call(mapping_of(call, "a tool call"))
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self._finish = reason
        return deltas

    def _call(self, call: dict[str, JsonValue]) -> list[MessageDelta]:
        """A call opens with an index not seen before, or with another id: some servers give every call index 0."""
        function = mapping_of(call.get("function"), "a tool call's function")
        index, their_id = call.get("index"), text_of(call.get("id"), "a tool call's id")
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        piece = text_of(arguments, "a tool call's arguments")
        named_anew = index is None and not their_id and bool(function.get("name"))
        at = None if named_anew else self._place(index, their_id)
        if at is None:
            self._told.append(_Told(index=index, id=their_id, name=function.get("name"), held=[piece]))
        elif at >= self._at:
            self._told[at].held.append(piece)
        elif piece.strip():
            raise malformed("a tool call goes on after its arguments were whole")
        return self._passed_on(ended=False)

    def _place(self, index: JsonValue, their_id: str) -> int | None:
        """Which call a piece belongs to: the last that its index and id, as far as given, fit."""
        for at in reversed(range(len(self._told))):
            told = self._told[at]
            if index in (None, told.index) and their_id in ("", told.id):
                return at
        return None

    def _passed_on(self, *, ended: bool) -> list[MessageDelta]:
        """What can go out now, one call after another; at the end of the answer, everything."""
        deltas: list[MessageDelta] = []
        while self._at < len(self._told):
            told = self._told[self._at]
            if not told.opened:
                deltas.append(self._calls.open(told.name))
                told.opened = True
            pieces = [piece for piece in told.held if piece]
            deltas += self._calls.more("".join(pieces))
            told.passed += pieces
            told.held.clear()
            if self._at + 1 == len(self._told) or not (ended or told.whole):
                break
            self._at += 1
        return deltas


def _sampling(sampling: Sampling) -> dict[str, JsonValue]:
    """What differs from this API's defaults: not every upstream takes a field that it has at its default."""
    given: dict[str, tuple[JsonValue, JsonValue]] = {
        "temperature": (sampling.temperature, 1.0),
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, 0),
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
        "repetition_penalty": (sampling.repetition_penalty, 1.0),
        "seed": (sampling.seed, None),
    }
    return {name: value for name, (value, default) in given.items() if value != default}


def _content(parts: Sequence[Part], images: Mapping[str, bytes]) -> JsonValue:
    """A string where there is only text."""
    if not any(isinstance(part, Image) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, Text))
    return [
        _image(part, images) if isinstance(part, Image) else {"type": "text", "text": part.text}
        for part in parts
        if isinstance(part, Text | Image)
    ]


def _image(image: Image, images: Mapping[str, bytes]) -> JsonValue:
    return {"type": "image_url", "image_url": {"url": f"data:{image.media_type};base64,{base64_of(image, images)}"}}


def _call(call: ToolCall) -> JsonValue:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool(tool: ToolSpec) -> JsonValue:
    name, description, parameters = tool_function(tool)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _usage(usage: dict[str, JsonValue]) -> Usage:
    """Prompt tokens include cached ones in this API."""
    details = mapping_of(usage.get("prompt_tokens_details"), "prompt_tokens_details")
    return Usage(
        prompt_tokens=count_of(usage.get("prompt_tokens")),
        completion_tokens=count_of(usage.get("completion_tokens")),
        cached_tokens=count_of(details.get("cached_tokens")),
    )
