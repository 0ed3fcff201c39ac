"""What goes back to a Gemini client: chunks, whole bodies, errors and the list of models."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from openforgerl.errors import ContextOverflow, WireError
from openforgerl.types import FinishReason, JsonValue, MessageDelta, ToolCall
from openforgerl.wire.dialect import Answer, Head
from openforgerl.wire.gemini_marks import Mark, sent_arguments, signature
from openforgerl.wire.sse import encode_event

_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""The words of google.rpc.Code; every other 4xx is an INVALID_ARGUMENT, every other 5xx is INTERNAL."""

_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that end a line for the regular expression or line reader of Google's clients, though not in SSE."""


class PartWriter:
    """Turns deltas into parts, each with the signature that it needs to be known again.

    The first part of a thought, the first text after one, and every call carry one: what a client joins keeps the
    first part's signature, and what it drops takes its signature along.
    """

    def __init__(self, head: Head, *, thoughts: bool) -> None:
        self._head = head
        self._thoughts = thoughts
        self._thought = False
        self._marked: set[str] = set()

    def thought(self, text: str) -> dict[str, JsonValue] | None:
        """A thought part, or None when the client did not ask for thoughts."""
        self._thought = True
        if not self._thoughts:
            return None
        return self._with_mark({"text": text, "thought": True}, "thought")

    def text(self, text: str) -> dict[str, JsonValue]:
        """A part of visible text."""
        return self._with_mark({"text": text}, "text") if self._thought else {"text": text}

    def call(self, call: ToolCall) -> dict[str, JsonValue]:
        """A whole function call: its arguments are an object and have no pieces."""
        args, unparsed, empty = sent_arguments(call.arguments)
        mark = Mark(handle=self._head.handle, thought=self._thought, call_id=call.id, unparsed=unparsed, empty=empty)
        return {
            "functionCall": {"id": call.id, "name": call.name, "args": args},
            "thoughtSignature": signature(mark),
        }

    def _with_mark(self, part: dict[str, JsonValue], kind: str) -> dict[str, JsonValue]:
        if kind not in self._marked:
            self._marked.add(kind)
            part["thoughtSignature"] = signature(Mark(handle=self._head.handle, thought=True))
        return part


class GeminiStream:
    """Chunks that are each a whole response; the last one has the finish reason and the usage."""

    def __init__(self, head: Head, *, thoughts: bool) -> None:
        self._head = head
        self._parts = PartWriter(head, thoughts=thoughts)
        self._call: MessageDelta | None = None
        self._arguments: list[str] = []

    def open(self, prompt_tokens: int) -> bytes:
        """Nothing: the first chunk opens the stream."""
        return b""

    def write(self, deltas: Sequence[MessageDelta]) -> bytes:
        """One chunk per part. A call is sent when the next delta shows that it is whole."""
        written = b""
        for delta in deltas:
            if delta.kind == "arguments":
                self._arguments.append(delta.text)
                continue
            written += self._called()
            if delta.kind == "call":
                self._call = delta
            else:
                part = self._parts.thought(delta.text) if delta.kind == "reasoning" else self._parts.text(delta.text)
                written += b"" if part is None else self._chunk(part)
        return written

    def close(self, answer: Answer) -> bytes:
        """The call that was still open, and the chunk that ends the stream."""
        last = {**_frame(self._head), "candidates": [_candidate([], answer)], "usageMetadata": usage(answer)}
        return self._called() + encode_event(_encoded(last))

    def keep_alive(self) -> bytes:
        """An empty line: Google's clients read events without knowing comments, and choke on them."""
        return b"\n"

    def fail(self, error: WireError) -> bytes:
        """The error as one bare line, which is where Google's clients look for it. No end mark follows."""
        return _encoded(error_body(error)) + b"\n\n"

    def _called(self) -> bytes:
        if self._call is None:
            return b""
        call = ToolCall(id=self._call.call_id, name=self._call.text, arguments="".join(self._arguments))
        self._call, self._arguments = None, []
        return self._chunk(self._parts.call(call))

    def _chunk(self, part: dict[str, JsonValue]) -> bytes:
        return encode_event(_encoded({**_frame(self._head), "candidates": [_candidate([part], None)]}))


def whole_body(head: Head, answer: Answer, *, thoughts: bool) -> dict[str, JsonValue]:
    """A GenerateContentResponse."""
    writer = PartWriter(head, thoughts=thoughts)
    message = answer.message
    parts = [writer.thought(message.reasoning)] if message.reasoning else []
    parts += [writer.text(message.text)] if message.text else []
    parts += [writer.call(call) for call in message.tool_calls]
    candidate = _candidate([part for part in parts if part is not None], answer)
    return {"candidates": [candidate], "usageMetadata": usage(answer), **_frame(head)}


def _frame(head: Head) -> dict[str, JsonValue]:
    return {"modelVersion": head.model, "responseId": head.call_id}


def _candidate(parts: list[dict[str, JsonValue]], answer: Answer | None) -> dict[str, JsonValue]:
    # A client that finds no part takes the answer for a broken one and forgets the turn.
    candidate: dict[str, JsonValue] = {"content": {"parts": parts or [{"text": ""}], "role": "model"}, "index": 0}
    if answer is not None:
        candidate["finishReason"] = finish_reason(answer)
    return candidate


def finish_reason(answer: Answer) -> str:
    """Google's word for how an answer ended. Calls and stop strings are a STOP."""
    return "MAX_TOKENS" if answer.finish is FinishReason.LENGTH else "STOP"


def usage(answer: Answer) -> dict[str, JsonValue]:
    """Token counts. `candidatesTokenCount` is every sampled id; how many of them were thought is not told."""
    return {
        "promptTokenCount": answer.prompt_tokens,
        "candidatesTokenCount": answer.completion_tokens,
        "totalTokenCount": answer.prompt_tokens + answer.completion_tokens,
    }


def _encoded(body: dict[str, JsonValue]) -> bytes:
    text = msgspec.json.encode(body).decode()
    # Outside its strings JSON has none of these characters, so an escape is the same value.
    for char, escape in _LINE_ENDS.items():
        text = text.replace(char, escape)
    return text.encode()


def error_body(error: WireError) -> dict[str, JsonValue]:
    """A google.rpc.Status: our code as the reason, the field as a violation, the wait as a RetryInfo."""
    message = error.message
    if isinstance(error, ContextOverflow):
        message = (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed "
            f"({error.limit})."
        )
    kind = "type.googleapis.com/google.rpc."
    details: list[JsonValue] = [{"@type": f"{kind}ErrorInfo", "reason": error.code.upper(), "domain": "openforgerl"}]
    if error.param is not None:
        violation = {"field": error.param, "description": message}
        details.append({"@type": f"{kind}BadRequest", "fieldViolations": [violation]})
    if error.retry_after is not None:
        details.append({"@type": f"{kind}RetryInfo", "retryDelay": f"{error.retry_after:.3f}s"})
    return {
        "error": {
            "code": error.status,
            "message": message,
            "status": _STATUS.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT"),
            "details": details,
        }
    }


def models_body(names: Sequence[str]) -> dict[str, JsonValue]:
    """The answer of `/v1beta/models`."""
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {
        "models": [
            {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods} for name in names
        ]
    }
