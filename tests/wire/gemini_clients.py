"""What Gemini clients do to our answers before they send them back, rebuilt from what was measured of each."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from openforgerl.types import Message, MessageDelta, Reasoning
from openforgerl.wire import Answer, Head, Request
from openforgerl.wire.gemini import GeminiDialect
from openforgerl.wire.rereading import Rereading

Json = dict[str, Any]
GEMINI = GeminiDialect()
_LINE = re.compile("^\\s*data: ([^\\n\\r\\u2028\\u2029]*)(?:\\n\\n|\\r\\r|\\r\\n\\r\\n)")
"""How Google's JavaScript client finds the next event at the head of its buffer."""


class OneSession:
    """A session's memory: the thought behind each handle."""

    def __init__(self) -> None:
        self.rereading = Rereading()
        self.thoughts: dict[str, Reasoning] = {}

    def reasoning(self, handle: str) -> Reasoning | None:
        return self.thoughts.get(handle)

    def answered(self, call_id: str) -> None:
        return None

    def keep(self, head: Head, message: Message) -> None:
        if message.reasoning:
            self.thoughts[head.handle] = Reasoning(message.reasoning, head.handle)


def javascript(data: bytes) -> list[Json]:
    """The chunks in a stream as Google's JavaScript client reads them; ValueError where it would throw."""
    buffer, chunks = data.decode(), []
    while found := _LINE.match(buffer):
        chunks.append(json.loads(found[1]))
        buffer = buffer[found.end() :]
    if buffer.strip():
        raise ValueError(f"Incomplete JSON segment at the end: {buffer[:80]!r}")
    return chunks


def deltas(message: Message, size: int) -> list[MessageDelta]:
    """`message` in pieces of at most `size` characters."""

    def cut(text: str) -> list[str]:
        return [text[at : at + size] for at in range(0, len(text), size)]

    pieces = [MessageDelta(kind="reasoning", text=text) for text in cut(message.reasoning)]
    pieces += [MessageDelta(kind="text", text=text) for text in cut(message.text)]
    for index, call in enumerate(message.tool_calls):
        pieces.append(MessageDelta(kind="call", text=call.name, call_index=index, call_id=call.id))
        pieces += [MessageDelta(kind="arguments", text=text, call_index=index) for text in cut(call.arguments)]
    return pieces


def streamed(head: Head, request: Request, answer: Answer, size: int = 7) -> bytes:
    """The whole stream of `answer`, written piece by piece."""
    writer = GEMINI.writer(head, request)
    pieces = [writer.write([delta]) for delta in deltas(answer.message, size)]
    return writer.open(answer.prompt_tokens) + b"".join(pieces) + writer.close(answer)


def parts_of(chunks: list[Json]) -> list[Json]:
    return [dict(part) for chunk in chunks for part in chunk["candidates"][0]["content"].get("parts", ())]


def doubles(value: Any) -> Any:
    """A JSON value as JavaScript has it: every number is a double."""
    return json.loads(json.dumps(value), parse_int=float)


def keeps_all(chunks: list[Json]) -> list[Json]:
    """Google's chat helper: every chunk is a content of its own, just as it came."""
    contents = [chunk["candidates"][0]["content"] for chunk in chunks]
    # One content without parts, and it drops the whole turn.
    return contents if all(content["parts"] for content in contents) else []


def keeps_bytes(chunks: list[Json]) -> list[Json]:
    """Google's Python client: signatures are bytes, written back in the URL alphabet; fields in snake case."""
    parts: list[Json] = []
    for part in parts_of(chunks):
        if "thoughtSignature" in part:
            data = base64.b64decode(part.pop("thoughtSignature"), validate=True)
            part["thought_signature"] = base64.urlsafe_b64encode(data).decode()
        if "functionCall" in part:
            part["function_call"] = part.pop("functionCall")
        parts.append(part)
    return [{"role": "model", "parts": parts}]


def gemini_cli(chunks: list[Json]) -> list[Json]:
    """gemini-cli: no thoughts, text joined (the first part's signature stays), call ids of its own."""
    kept: list[Json] = []
    for part in parts_of(chunks):
        if part.get("thought") or part == {"text": ""}:
            continue
        if "functionCall" in part:
            call = dict(part["functionCall"], args=doubles(part["functionCall"]["args"]))
            call["id"] = f"{call['name']}_1796049890{len(kept):03}_{len(kept)}"
            kept.append(dict(part, functionCall=call))
        elif kept and kept[-1].get("text"):
            kept[-1] = dict(kept[-1], text=kept[-1]["text"] + part["text"])
        else:
            kept.append(part)
    return [{"parts": kept, "role": "model"}] if kept else []


def pi(chunks: list[Json]) -> list[Json]:
    """pi: thoughts and text joined (the last signature stays), blank ones without a signature dropped, no call ids."""
    blocks: list[Json] = []
    for part in parts_of(chunks):
        if "functionCall" in part:
            call = part["functionCall"]
            blocks.append(dict(part, functionCall={"name": call["name"], "args": doubles(call["args"])}))
        elif blocks and "text" in blocks[-1] and blocks[-1].get("thought") == part.get("thought"):
            blocks[-1] = {**blocks[-1], **part, "text": blocks[-1]["text"] + part["text"]}
        else:
            blocks.append(part)
    kept = [
        block for block in blocks if "functionCall" in block or block["text"].strip() or block.get("thoughtSignature")
    ]
    return [{"role": "model", "parts": kept}] if kept else []


def results(contents: list[Json], outputs: list[str]) -> Json:
    """The content with a result for every call in `contents`, with whatever id the client has."""
    calls = [
        part.get("functionCall") or part["function_call"]
        for content in contents
        for part in content["parts"]
        if part.keys() & {"functionCall", "function_call"}
    ]
    return {
        "role": "user",
        "parts": [
            {
                "functionResponse": {
                    "name": call["name"],
                    "response": {"output": output},
                    **({"id": call["id"]} if "id" in call else {}),
                }
            }
            for call, output in zip(calls, outputs, strict=True)
        ],
    }
