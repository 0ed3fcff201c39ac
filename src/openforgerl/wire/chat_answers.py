"""What goes back to a chat-completions client: chunks, whole bodies, errors and the list of models."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import FinishReason, JsonValue, Message, MessageDelta
from openforgerl.wire.dialect import Answer, Head, ShownToken
from openforgerl.wire.sse import comment, encode_event

DONE = b"data: [DONE]\n\n"
"""The end mark of a stream that ended well."""


class ChatStream:
    """Chunks in the order that clients rely on: role, deltas, finish reason, usage when asked for, `[DONE]`."""

    def __init__(self, head: Head, *, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._tokens: list[ShownToken] = []

    def open(self, prompt_tokens: int) -> bytes:
        """The chunk that names the role. It carries no tokens: those shown already made the delta after it."""
        return self._chunk({"role": "assistant", "content": ""}, ())

    def write(self, deltas: Sequence[MessageDelta]) -> bytes:
        """One chunk per delta."""
        return b"".join(self._chunk(_delta(delta), self._taken()) for delta in deltas)

    def show(self, tokens: Sequence[ShownToken]) -> None:
        """Tokens that go out with the next chunk."""
        self._tokens += tokens

    def close(self, answer: Answer) -> bytes:
        """The chunk with the finish reason, the usage chunk when asked for, and the end mark."""
        last = self._chunk({}, self._taken(), finish_reason(answer))
        if self._include_usage:
            body = {**self._frame(), "choices": [], "usage": usage(answer)}
            last += encode_event(msgspec.json.encode(body))
        return last + DONE

    def keep_alive(self) -> bytes:
        """A comment, which every client skips."""
        return comment("keep-alive")

    def fail(self, error: WireError) -> bytes:
        """The error as an event. No end mark follows: a client must not take the stream for a whole answer."""
        return encode_event(msgspec.json.encode(error_body(error)))

    def _frame(self) -> dict[str, JsonValue]:
        return {
            "id": f"chatcmpl-{self._head.call_id}",
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
        }

    def _taken(self) -> Sequence[ShownToken]:
        tokens, self._tokens = self._tokens, []
        return tokens

    def _chunk(self, delta: dict[str, JsonValue], tokens: Sequence[ShownToken], finish: str | None = None) -> bytes:
        shown = logprobs(tokens) if tokens else None
        body = {**self._frame(), "choices": [{"index": 0, "delta": delta, "logprobs": shown, "finish_reason": finish}]}
        if self._include_usage:
            body["usage"] = None
        return encode_event(msgspec.json.encode(body))


def _delta(delta: MessageDelta) -> dict[str, JsonValue]:
    if delta.kind == "text":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    call: dict[str, JsonValue] = {"index": delta.call_index}
    if delta.kind == "call":
        call |= {"id": delta.call_id, "type": "function", "function": {"name": delta.text, "arguments": ""}}
    else:
        call["function"] = {"arguments": delta.text}
    return {"tool_calls": [call]}


def logprobs(tokens: Sequence[ShownToken]) -> dict[str, JsonValue]:
    """OpenAI's `logprobs` object. A token that is part of a character only has its bytes to tell it by."""
    return {
        "content": [
            {
                "token": token.data.decode("utf-8", errors="replace"),
                "logprob": token.logprob,
                "bytes": list(token.data),
                "top_logprobs": [],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def finish_reason(answer: Answer) -> str:
    """OpenAI's word for how an answer ended."""
    if answer.finish is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def usage(answer: Answer) -> dict[str, JsonValue]:
    """Token counts; every sampled id counts, also those behind a stop string."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def whole_body(head: Head, answer: Answer) -> dict[str, JsonValue]:
    """A `chat.completion` object."""
    return {
        "id": f"chatcmpl-{head.call_id}",
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": 0,
                "message": _message(answer.message),
                "logprobs": None if answer.tokens is None else logprobs(answer.tokens),
                "finish_reason": finish_reason(answer),
            }
        ],
        "usage": usage(answer),
    }


def _message(message: Message) -> dict[str, JsonValue]:
    body: dict[str, JsonValue] = {
        "role": "assistant",
        "content": None if message.tool_calls and not message.text else message.text,
    }
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def error_body(error: WireError) -> dict[str, JsonValue]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": _error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def models_body(names: Sequence[str]) -> dict[str, JsonValue]:
    """The answer of `/v1/models`."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "openforgerl"} for name in names],
    }
