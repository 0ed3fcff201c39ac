"""What a client of the Messages API makes of our answers, written from the API's documentation alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from openforgerl.types import Reasoning
from openforgerl.wire import SseReader
from openforgerl.wire.rereading import Rereading

Json = dict[str, Any]
KINDS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "thinking",
    "input_json_delta": "tool_use",
}


class Remembered:
    """A session that has given out these handles."""

    def __init__(self, thoughts: dict[str, str]) -> None:
        self.rereading = Rereading()
        self._thoughts = thoughts

    def reasoning(self, handle: str) -> Reasoning | None:
        text = self._thoughts.get(handle)
        return None if text is None else Reasoning(text, handle)

    def answered(self, call_id: str) -> None:
        return None


def no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("number out of range")
    return value


def read_input(text: str) -> Json:
    """A streamed input as claude-code 2.1 reads it: nothing is {}, what is no object is kept whole and marked."""
    if not text:
        return {}
    try:
        value = json.loads(text, parse_constant=no_constant, parse_float=finite)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    return {"__unparsedToolInput": {"raw": text, "len": len(text.encode("utf-16-le")) // 2}}


def events_of(pieces: Iterable[bytes]) -> list[Json]:
    """The events, pings left out. Every event is named after its type."""
    reader = SseReader()
    events: list[Json] = []
    for piece in pieces:
        for event in reader.feed(piece):
            body = json.loads(event.data)
            assert event.event == body["type"]
            if body["type"] != "ping":
                events.append(body)
    return events


def assembled(events: list[Json]) -> Json:
    """The message that the events make. Refuses any order that the API's documentation does not allow."""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    start, *inner = events[:-2]
    assert start["type"] == "message_start"
    message: Json = start["message"]
    assert message["content"] == []
    open_at: int | None = None
    inputs: dict[int, str] = {}
    for event in inner:
        if event["type"] == "content_block_start":
            assert open_at is None
            open_at = event["index"]
            assert open_at == len(message["content"])
            message["content"].append(event["content_block"])
            continue
        assert event["index"] == open_at
        block = message["content"][event["index"]]
        if event["type"] == "content_block_stop":
            open_at = None
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = read_input(inputs.get(event["index"], ""))
            continue
        assert event["type"] == "content_block_delta"
        delta = event["delta"]
        assert KINDS[delta["type"]] == block["type"]
        if delta["type"] == "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
        elif delta["type"] == "signature_delta":
            block["signature"] = delta["signature"]
        else:
            block[block["type"]] += delta[block["type"]]
    assert open_at is None
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    return message


def echo(message: Json) -> Json:
    """The assistant turn that a client adds to its history."""
    return {"role": "assistant", "content": message["content"]}
