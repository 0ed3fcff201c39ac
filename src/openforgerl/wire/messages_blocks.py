"""Content blocks of the Messages dialect as parts and messages (API reference, "Create a Message", `messages`)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import Image, JsonValue, Message, Part, Reasoning, Role, Text, ToolCall
from openforgerl.wire import images, reading
from openforgerl.wire.dialect import Memory
from openforgerl.wire.notes import Notes
from openforgerl.wire.reading import bad

_BLOCK = "messages[].content[]"
"""How unlisted fields of a block are written, whichever message it is in."""

_MARKS = frozenset({"type", "cache_control"})
_FIELDS: Mapping[str, frozenset[str]] = {
    "text": _MARKS | {"text", "citations"},
    "image": _MARKS | {"source"},
    "document": _MARKS | {"source", "title", "context", "citations"},
    "thinking": _MARKS | {"thinking", "signature"},
    "redacted_thinking": _MARKS | {"data"},
    "tool_use": _MARKS | {"id", "name", "input", "caller"},
    "tool_result": _MARKS | {"tool_use_id", "content", "is_error"},
    "tool_reference": _MARKS | {"tool_name"},
    "mid_conv_system": _MARKS | {"content"},
    "fallback": _MARKS | {"from", "to", "trigger"},
    "tool_addition": _MARKS | {"tool"},
    "tool_removal": _MARKS | {"tool"},
}
"""Fields of every kind of block that is taken."""


class BlockReader:
    """Reads the blocks of one request; `notes` collect what is met on the way."""

    def __init__(self, memory: Memory, notes: Notes) -> None:
        self._memory = memory
        self.notes = notes

    def system(self, value: JsonValue, path: str) -> tuple[Text, ...]:
        """Text blocks. Mid-conversation changes of the tools on offer are left out and reported."""
        parts: list[Text] = []
        for block, kind, at in self._blocks(value, path):
            if kind == "text":
                parts += self._text(block, at)
            elif kind in ("tool_addition", "tool_removal"):
                self.notes.warn(f"{at}: {kind} was left out of the prompt; every tool in `tools` stays on offer")
            else:
                raise _not_here(kind, at, "a system prompt holds `text`")
        return tuple(parts)

    def user(self, value: JsonValue, path: str) -> list[Message]:
        """A user turn as messages in the order of its blocks: every tool result, and what stands between them."""
        messages: list[Message] = []
        parts: list[Part] = []
        blocks = self._blocks(value, path)
        for block, kind, at in blocks:
            if kind not in ("tool_result", "mid_conv_system"):
                parts += self._shown(block, kind, at)
                continue
            if parts:
                messages.append(Message(role=Role.USER, parts=tuple(parts)))
                parts = []
            if kind == "tool_result":
                messages.append(self._tool_result(block, at))
            elif system := self.system(reading.items(block.get("content"), f"{at}.content"), f"{at}.content"):
                messages.append(Message(role=Role.SYSTEM, parts=system))
        if parts or all(kind not in ("tool_result", "mid_conv_system") for _, kind, _ in blocks):
            messages.append(Message(role=Role.USER, parts=tuple(parts)))
        return messages

    def assistant(self, value: JsonValue, path: str) -> Message:
        """An assistant turn: thoughts joined, text joined, calls in order."""
        texts: list[str] = []
        thoughts: dict[str, list[str]] = {}
        calls: list[ToolCall] = []
        for block, kind, at in self._blocks([] if value is None else value, path):
            if kind == "text":
                texts += [part.text for part in self._text(block, at)]
            elif kind == "thinking":
                signature = block.get("signature")
                signature = "" if signature is None else reading.text(signature, f"{at}.signature")
                thoughts.setdefault(signature, []).append(reading.text(block.get("thinking"), f"{at}.thinking"))
            elif kind == "redacted_thinking":
                thoughts.setdefault(reading.text(block.get("data"), f"{at}.data"), []).append("")
            elif kind == "tool_use":
                calls.append(_call(block, at))
            elif kind != "fallback":  # a mark between the answers of two models, without content
                raise _not_here(kind, at, "an assistant turn holds `text`, `thinking`, `redacted_thinking`, `tool_use`")
        parts: list[Part] = list(self._thought(thoughts, path))
        if text := "".join(texts):
            parts.append(Text(text))
        return Message(role=Role.ASSISTANT, parts=tuple(parts), tool_calls=tuple(calls))

    def _blocks(self, value: JsonValue, path: str) -> list[tuple[dict[str, JsonValue], str, str]]:
        """(block, kind, path) of every block; a string is one text block."""
        if isinstance(value, str):
            return [({"type": "text", "text": value}, "text", path)]
        if not isinstance(value, list):
            raise bad(path, f"must be a string or a list of content blocks, not {reading.type_name(value)}")
        blocks: list[tuple[dict[str, JsonValue], str, str]] = []
        for index, item in enumerate(value):
            at = f"{path}[{index}]"
            block = reading.mapping(item, at)
            kind = reading.text(block.get("type"), f"{at}.type")
            if kind in _FIELDS:
                self.notes.check(block, _FIELDS[kind], _BLOCK, at)
            blocks.append((block, kind, at))
        return blocks

    def _shown(self, block: Mapping[str, JsonValue], kind: str, at: str) -> tuple[Text | Image, ...]:
        """The parts of a block that shows something; a document may hold several."""
        if kind == "text":
            return self._text(block, at)
        if kind == "image":
            return (self._image(reading.mapping(block.get("source"), f"{at}.source"), f"{at}.source"),)
        if kind == "document":
            return self._document(block, at)
        raise _not_here(kind, at, "a user turn holds `text`, `image`, `document`, `tool_result`")

    def _text(self, block: Mapping[str, JsonValue], at: str) -> tuple[Text, ...]:
        text = reading.text(block.get("text"), f"{at}.text")
        return (Text(text),) if text else ()

    def _image(self, source: Mapping[str, JsonValue], at: str) -> Image:
        kind = source.get("type")
        if kind != "base64":
            shown = repr(kind) if isinstance(kind, str) else reading.type_name(kind)
            raise WireError(
                400,
                "unsupported_content",
                f"{at}.type: only `base64` is taken, not {shown}; the proxy fetches nothing",
                param=f"{at}.type",
            )
        self.notes.check(source, {"type", "media_type", "data"}, f"{_BLOCK}.source", at)
        media_type = reading.text(source.get("media_type"), f"{at}.media_type")
        image, content = images.from_base64(reading.text(source.get("data"), f"{at}.data"), media_type, at)
        self.notes.images[image.sha256] = content
        return image

    def _document(self, block: Mapping[str, JsonValue], at: str) -> tuple[Text | Image, ...]:
        """Title and context, a line each, and then the document's text or its blocks."""
        head = [
            Text(reading.text(block[name], f"{at}.{name}") + "\n") for name in ("title", "context") if block.get(name)
        ]
        source = reading.mapping(block.get("source"), f"{at}.source")
        if source.get("type") == "text":
            self.notes.check(source, {"type", "media_type", "data"}, f"{_BLOCK}.source", f"{at}.source")
            text = reading.text(source.get("data"), f"{at}.source.data")
            return (*head, *([Text(text)] if text else []))
        if source.get("type") == "content":
            self.notes.check(source, {"type", "content"}, f"{_BLOCK}.source", f"{at}.source")
            inner = self._blocks(source.get("content"), f"{at}.source.content")
            for _, kind, path in inner:
                if kind not in ("text", "image"):
                    raise _not_here(kind, path, "a document holds `text` and `image`")
            return (*head, *(part for item in inner for part in self._shown(*item)))
        raise WireError(
            400,
            "unsupported_content",
            f"{at}.source.type: documents are taken as `text` or `content`; send other formats as text",
            param=f"{at}.source.type",
        )

    def _tool_result(self, block: Mapping[str, JsonValue], at: str) -> Message:
        parts: list[Part] = []
        content, is_error = block.get("content"), block.get("is_error")
        for inner, kind, path in self._blocks([] if content is None else content, f"{at}.content"):
            if kind == "tool_reference":
                # The tool itself is on offer from the start, so its name says all that is new.
                parts.append(Text(reading.text(inner.get("tool_name"), f"{path}.tool_name") + "\n"))
            elif kind in ("text", "image", "document"):
                parts += self._shown(inner, kind, path)
            else:
                raise _not_here(kind, path, "a tool result holds `text`, `image`, `document`, `tool_reference`")
        return Message(
            role=Role.TOOL,
            parts=tuple(parts),
            tool_call_id=reading.text(block.get("tool_use_id"), f"{at}.tool_use_id"),
            is_error=False if is_error is None else reading.flag(is_error, f"{at}.is_error"),
        )

    def _thought(self, thoughts: Mapping[str, list[str]], path: str) -> tuple[Reasoning, ...]:
        """The thoughts by signature, as one. Our own signature brings back what was thought, text shown or not."""
        texts: list[str] = []
        handles: list[str] = []
        for signature, pieces in thoughts.items():
            given = "".join(pieces)
            if not signature:
                texts.append(given)
                continue
            remembered = self._memory.reasoning(signature)
            if remembered is None:
                self.notes.warn(f"{path}: a thought with an unknown signature was left out of the prompt")
            elif given and given != remembered.text:
                self.notes.warn(f"{path}: a thought was altered under its signature; it is taken as it came")
                texts.append(given)
            else:
                texts.append(remembered.text)
                handles.append(signature)
        text = "".join(texts)
        return (Reasoning(text, handles[0] if len(handles) == 1 else None),) if text else ()


def _call(block: Mapping[str, JsonValue], at: str) -> ToolCall:
    arguments = reading.mapping(block.get("input"), f"{at}.input")
    return ToolCall(
        id=reading.text(block.get("id"), f"{at}.id"),
        name=reading.text(block.get("name"), f"{at}.name"),
        arguments=msgspec.json.encode(arguments).decode(),
    )


def _not_here(kind: str, at: str, accepted: str) -> WireError:
    return WireError(
        400, "unsupported_content", f"{at}.type: {kind!r} is not supported here; {accepted}", param=f"{at}.type"
    )
