"""What goes back to a Responses client in one piece: items, response objects and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openforgerl.errors import WireError
from openforgerl.types import FinishReason, JsonValue
from openforgerl.wire.chat_answers import error_body
from openforgerl.wire.dialect import Answer, Head, Request
from openforgerl.wire.responses_calls import call_item, item_id, response_id, tool_of
from openforgerl.wire.responses_tools import WireTool

COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"


def reasoning_item(head: Head, index: int, text: str) -> dict[str, JsonValue]:
    """A thought: its text as the summary, which is what clients show, and our handle, which brings it back."""
    return {
        "type": "reasoning",
        "id": item_id("reasoning", head, index),
        "summary": [summary_part(text)],
        "encrypted_content": head.handle or None,
    }


def summary_part(text: str) -> dict[str, JsonValue]:
    """The one part of a thought's summary."""
    return {"type": "summary_text", "text": text}


def message_item(head: Head, index: int, text: str, status: str) -> dict[str, JsonValue]:
    """Visible text."""
    return {
        "type": "message",
        "id": item_id("message", head, index),
        "status": status,
        "role": "assistant",
        "content": [text_part(text)],
    }


def text_part(text: str) -> dict[str, JsonValue]:
    """The one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def says_nothing(kinds: Sequence[str], finish: FinishReason) -> bool:
    """Whether an answer with items of those kinds needs an empty message, so that its turn stays in the history.

    A thought alone is a turn only where the length limit cut it.
    """
    return not kinds or (finish is not FinishReason.LENGTH and all(kind == "reasoning" for kind in kinds))


def output_items(head: Head, answer: Answer, tools: Mapping[str, WireTool]) -> list[dict[str, JsonValue]]:
    """The items of an answer: thought, message, calls. The last one carries that the length limit cut it."""
    message = answer.message
    items: list[dict[str, JsonValue]] = []
    if message.reasoning:
        items.append(reasoning_item(head, 0, message.reasoning))
    if message.text:
        items.append(message_item(head, 0, message.text, COMPLETED))
    for index, call in enumerate(message.tool_calls):
        items.append(call_item(call, tool_of(call.name, tools), head, index, COMPLETED))
    if says_nothing([item["type"] for item in items], answer.finish):
        items.append(message_item(head, 0, "", COMPLETED))
    if answer.finish is FinishReason.LENGTH and "status" in items[-1]:
        items[-1]["status"] = INCOMPLETE
    return items


def response_object(
    head: Head, request: Request, status: str, output: list[dict[str, JsonValue]], answer: Answer | None = None
) -> dict[str, JsonValue]:
    """A `response` object.

    The request's tools and instructions are not repeated: with a real harness they are 40 kB, three times per
    answer, and no client reads them.
    """
    raw: dict[str, JsonValue] = request.raw if isinstance(request.raw, dict) else {}
    return {
        "id": response_id(head),
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "model": head.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": raw.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": raw.get("store", True),
        "temperature": raw.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": [],
        "top_p": raw.get("top_p"),
        "truncation": "disabled",
        "usage": None if answer is None else usage(answer),
        "metadata": raw.get("metadata") or {},
    }


def usage(answer: Answer) -> dict[str, JsonValue]:
    """Token counts; every sampled id counts. What of it was a thought or came from a cache is not told apart."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def ended(answer: Answer) -> str:
    """The status of a whole response."""
    return INCOMPLETE if answer.finish is FinishReason.LENGTH else COMPLETED


def http_error(error: WireError) -> dict[str, JsonValue]:
    """OpenAI's error object. What is wrong with the whole conversation is `input` here."""
    body = error_body(error)
    if error.param == "messages":
        body["error"]["param"] = "input"
    return body


def stream_error(error: WireError) -> dict[str, JsonValue]:
    """The error of a `response.failed` event, in the codes by which clients decide whether to try again.

    Codex retries what it does not know, gives up on `context_length_exceeded` and on `server_is_overloaded` (so
    our overload is a rate limit, which it waits out), and reads the time to wait off the message.
    """
    code = "server_error" if error.status >= 500 else error.code
    message = error.message
    if error.status in (429, 503) and error.retry_after is not None:
        code = "rate_limit_exceeded"
        message = f"{message.rstrip('. ')}. Please try again in {error.retry_after:g}s."
    elif error.status == 429:
        code = "rate_limit_exceeded"
    return {"code": code, "message": message}
