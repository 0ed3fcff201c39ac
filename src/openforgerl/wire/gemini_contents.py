"""Gemini's contents as messages.

A model turn is every `model` content up to the next one of another role, because clients keep a streamed answer as
one content or as many. Its thoughts become one part and its text another, as in every answer that we give.
A content of results holds the tool messages first; what else it holds follows as one user message.
"""

from __future__ import annotations

from copy import copy

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import Image, JsonValue, Message, Part, Reasoning, Role, Text, ToolCall
from openforgerl.wire import images, reading
from openforgerl.wire.dialect import Memory
from openforgerl.wire.gemini_fields import read
from openforgerl.wire.gemini_marks import FOREIGN, Mark, padded, read_signature, received_arguments
from openforgerl.wire.notes import Notes
from openforgerl.wire.reading import bad, present

_DATA = (
    "text",
    "inlineData",
    "fileData",
    "functionCall",
    "functionResponse",
    "executableCode",
    "codeExecutionResult",
    "toolCall",
    "toolResponse",
)
_PART = {*_DATA, "thought", "thoughtSignature", "videoMetadata", "mediaResolution", "partMetadata"}
_CALL = {"id", "name", "args"}
_RESPONSE = {"id", "name", "response", "parts", "scheduling", "willContinue"}
_BLOB = {"mimeType", "data", "displayName"}
_MODEL = "model"
_USER = ("user", "function", "tool")


class _Result(msgspec.Struct):
    """A function response; `parts` grows by the images that follow it."""

    given_id: str
    name: str
    parts: list[Part]
    is_error: bool
    path: str


class _Asked(msgspec.Struct):
    """A call that waits for its result."""

    given_id: str
    name: str
    call_id: str
    answered: bool = False


class _Turn:
    """One model turn as it is put together."""

    def __init__(self) -> None:
        self.handle: str | None = None
        self.thoughts: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []
        self.asked: list[_Asked] = []
        self.thought_behind = False

    def message(self, memory: Memory, notes: Notes) -> Message:
        """The turn. A thought that the client left out is brought back by our handle."""
        parts: list[Part] = []
        if thought := "".join(self.thoughts):
            parts.append(Reasoning(thought, self.handle))
        elif self.thought_behind and self.handle is not None:
            remembered = memory.reasoning(self.handle)
            if remembered is not None:
                parts.append(remembered)
            else:
                notes.warn("contents[].parts[].thoughtSignature: unknown here; the turn has no thought")
        if text := "".join(self.texts):
            parts.append(Text(text))
        return Message(role=Role.ASSISTANT, parts=tuple(parts), tool_calls=tuple(self.calls))


class Reader:
    """Reads contents one after the other; `messages` are the result; images go to the notes."""

    def __init__(self, memory: Memory, notes: Notes) -> None:
        self.messages: list[Message] = []
        self._memory = memory
        self._notes = notes
        self._turn: _Turn | None = None
        self._asked: list[_Asked] = []
        self._calls = 0

    def system(self, value: JsonValue) -> None:
        """`systemInstruction` in any of the spellings that clients use."""
        path = "systemInstruction"
        if isinstance(value, str):
            parts: list[JsonValue] = [{"text": value}]
        elif isinstance(value, list):
            parts = value
        else:
            given = reading.mapping(value, path)
            if "parts" not in given and given.keys() & {"text", "thought"}:
                parts = [given]
            else:
                content = read(given, {"role", "parts"}, path, path, self._notes)
                parts, path = _parts(content, path), f"{path}.parts"
        texts: list[Part] = []
        for at, item in enumerate(parts):
            where = f"{path}[{at}]"
            part = read({"text": item} if isinstance(item, str) else item, _PART, f"{path}[]", where, self._notes)
            if (kind := _kind(part, where)) not in (None, "text"):
                raise _refused(f"{where}.{kind}", "a system instruction is text only")
            if text := reading.text(part.get("text") or "", f"{where}.text"):
                texts.append(Text(text))
        if texts:
            self.messages.append(Message(role=Role.SYSTEM, parts=tuple(texts)))

    def contents(self, value: JsonValue) -> None:
        """`contents`, all of them."""
        given = reading.items(value, "contents")
        if not given:
            raise bad("contents", "must hold at least one content")
        outer = self._notes
        passages = self._memory.rereading.passages(given, "gemini", outer, self.messages)
        if passages.state is not None:
            self._calls, asked = passages.state
            self._asked = [copy(call) for call in asked]
        for at in range(passages.start, len(given)):
            self._notes = passages.notes
            self._content(given[at], f"contents[{at}]")
            state = self._calls, [copy(call) for call in self._asked]
            passages.item_read(ended=self._turn is None, state=state)
        self._notes = passages.notes
        self._close()
        passages.end()
        self._notes = outer

    def _content(self, item: JsonValue, path: str) -> None:
        content = read(item, {"role", "parts"}, "contents[]", path, self._notes)
        role = content.get("role") or "user"
        parts = [
            (
                read(part, _PART, "contents[].parts[]", f"{path}.parts[{index}]", self._notes),
                f"{path}.parts[{index}]",
            )
            for index, part in enumerate(_parts(content, path))
        ]
        if role == _MODEL:
            self._turn = self._turn or _Turn()
            for part, where in parts:
                self._model_part(part, where)
        elif role in _USER:
            self._close()
            self._user_content(parts)
        else:
            raise bad(f"{path}.role", f"must be one of user, model, function; got {role!r}")

    def _close(self) -> None:
        """End the open model turn."""
        if self._turn is not None:
            self.messages.append(self._turn.message(self._memory, self._notes))
            self._asked = self._turn.asked
            self._turn = None

    def _model_part(self, part: dict[str, JsonValue], path: str) -> None:
        kind = _kind(part, path)
        mark = self._mark(part, path)
        turn = self._turn or _Turn()
        if mark is not None:
            if turn.handle not in (None, mark.handle):
                # Another answer of ours begins: a client may keep two in a row.
                self._close()
                turn = _Turn()
            turn.handle = mark.handle
            turn.thought_behind = turn.thought_behind or mark.thought
        self._turn = turn
        if kind == "text":
            text = reading.text(part["text"], f"{path}.text")
            (turn.thoughts if part.get("thought") is True else turn.texts).append(text)
        elif kind == "functionCall":
            self._call(turn, part["functionCall"], f"{path}.functionCall", mark)
        elif kind in ("executableCode", "codeExecutionResult"):
            turn.texts.append(self._code(part[kind], kind, f"{path}.{kind}"))
        elif kind in ("toolCall", "toolResponse"):
            self._notes.warn(f"contents[].parts[].{kind}: server-side tools were left out of the prompt")
        elif kind is not None:
            raise _refused(f"{path}.{kind}", "cannot stand in a model turn: the model writes text and function calls")

    def _mark(self, part: dict[str, JsonValue], path: str) -> Mark | None:
        value = part.get("thoughtSignature")
        if value is None or value == "":
            return None
        given = reading.text(value, f"{path}.thoughtSignature")
        mark = read_signature(given)
        if mark is None and given not in FOREIGN:
            self._notes.warn("contents[].parts[].thoughtSignature: not one of ours; it was left out")
        return mark

    def _call(self, turn: _Turn, value: JsonValue, path: str, mark: Mark | None) -> None:
        given = read(value, _CALL, "contents[].parts[].functionCall", path, self._notes)
        name = reading.text(given.get("name"), f"{path}.name")
        given_id = reading.text(given.get("id") or "", f"{path}.id")
        args = reading.mapping(given["args"], f"{path}.args") if present(given, "args") else {}
        # Without any id the place in the conversation is one: it stays the same while the history only grows.
        call_id = (mark.call_id if mark is not None else "") or given_id or f"call{self._calls}"
        self._calls += 1
        turn.calls.append(ToolCall(id=call_id, name=name, arguments=received_arguments(args, mark)))
        turn.asked.append(_Asked(given_id, name, call_id))

    def _code(self, value: JsonValue, kind: str, path: str) -> str:
        """Code that another server ran, and what came out: as text, because this server runs none."""
        given = read(
            value, {"id", "language", "code", "outcome", "output"}, f"contents[].parts[].{kind}", path, self._notes
        )
        self._notes.warn(f"contents[].parts[].{kind} was read as text")
        field = "code" if kind == "executableCode" else "output"
        language = reading.text(given.get("language") or "", f"{path}.language").lower()
        label = language if kind == "executableCode" and language != "language_unspecified" else ""
        return f"```{label}\n{reading.text(given.get(field) or '', f'{path}.{field}')}\n```\n"

    def _user_content(self, parts: list[tuple[dict[str, JsonValue], str]]) -> None:
        results: list[_Result] = []
        rest: list[Part] = []
        follows = False
        for part, path in parts:
            kind = _kind(part, path)
            follows = follows and kind == "inlineData"
            if kind == "text":
                text = reading.text(part["text"], f"{path}.text")
                rest += [Text(text)] if text else []
            elif kind == "functionResponse":
                results.append(self._result(part["functionResponse"], f"{path}.functionResponse"))
                follows = True
            elif kind == "inlineData":
                # A file that a tool read stands right behind the tool's result.
                (results[-1].parts if follows else rest).append(self._image(part["inlineData"], f"{path}.inlineData"))
            elif kind in ("executableCode", "codeExecutionResult"):
                rest.append(Text(self._code(part[kind], kind, f"{path}.{kind}")))
            elif kind in ("toolCall", "toolResponse"):
                self._notes.warn(f"contents[].parts[].{kind}: server-side tools were left out of the prompt")
            elif kind == "fileData":
                raise _refused(f"{path}.fileData", "no files are kept here; send the bytes as `inlineData`")
            elif kind is not None:
                raise bad(f"{path}.{kind}", "belongs into a content of role `model`")
        self.messages += self._tool_messages(results)
        if rest or not results:
            self.messages.append(Message(role=Role.USER, parts=tuple(rest)))

    def _result(self, value: JsonValue, path: str) -> _Result:
        given = read(value, _RESPONSE, "contents[].parts[].functionResponse", path, self._notes)
        response = given.get("response")
        text, is_error = _output(None if response is None else reading.mapping(response, f"{path}.response"))
        parts: list[Part] = [Text(text)] if text else []
        for at, item in enumerate(reading.items(given.get("parts") or [], f"{path}.parts")):
            where = f"{path}.parts[{at}]"
            part = read(item, _PART, "contents[].parts[].functionResponse.parts[]", where, self._notes)
            kind = _kind(part, where)
            if kind == "inlineData":
                parts.append(self._image(part["inlineData"], f"{where}.inlineData"))
            elif kind == "text":
                parts.append(Text(reading.text(part["text"], f"{where}.text")))
            elif kind is not None:
                raise _refused(f"{where}.{kind}", "a result's parts are `inlineData` images")
        return _Result(
            given_id=reading.text(given.get("id") or "", f"{path}.id"),
            name=reading.text(given.get("name") or "", f"{path}.name"),
            parts=parts,
            is_error=is_error,
            path=path,
        )

    def _tool_messages(self, results: list[_Result]) -> list[Message]:
        """Each result with the true id of the call that it answers: by id, else the first open call of its name."""
        answers = {at: asked for at, result in enumerate(results) if (asked := self._answered(result, by_id=True))}
        for at, result in enumerate(results):
            if at not in answers and (asked := self._answered(result, by_id=False)):
                answers[at] = asked
        messages: list[Message] = []
        for at, result in enumerate(results):
            asked = answers.get(at)
            if asked is None:
                self._notes.warn("contents[].parts[].functionResponse: a result answers no call")
            messages.append(
                Message(
                    role=Role.TOOL,
                    parts=tuple(result.parts),
                    tool_call_id=result.given_id if asked is None else asked.call_id,
                    name=result.name or None,
                    is_error=result.is_error,
                )
            )
        return messages

    def _answered(self, result: _Result, *, by_id: bool) -> _Asked | None:
        """The first call of the turn before that still waits for this result."""
        for asked in self._asked:
            same = result.given_id in (asked.given_id, asked.call_id) if by_id else result.name == asked.name
            if same and not asked.answered and (result.given_id or not by_id):
                asked.answered = True
                return asked
        return None

    def _image(self, value: JsonValue, path: str) -> Image:
        given = read(value, _BLOB, "contents[].parts[].inlineData", path, self._notes)
        media_type = reading.text(given.get("mimeType"), f"{path}.mimeType")
        if not media_type.startswith("image/"):
            raise _refused(f"{path}.mimeType", f"images are taken, not {media_type[:40]!r}")
        image, content = images.from_base64(padded(reading.text(given.get("data"), f"{path}.data")), media_type, path)
        self._notes.images[image.sha256] = content
        return image


def _parts(content: dict[str, JsonValue], path: str) -> list[JsonValue]:
    return reading.items(content.get("parts") or [], f"{path}.parts")


def _kind(part: dict[str, JsonValue], path: str) -> str | None:
    """The one data field that a part holds; None when it holds none, as a bare signature does."""
    held = [name for name in _DATA if present(part, name)]
    if len(held) > 1:
        raise bad(path, f"must hold one kind of data, not {' and '.join(held)}")
    return held[0] if held else None


def _output(response: dict[str, JsonValue] | None) -> tuple[str, bool]:
    """A function's output as text, and whether it is an error.

    `output` holds the output and `error` an error; without either the whole object is the output (API reference,
    FunctionResponse).
    """
    if response is None:
        return "", False
    if len(response) == 1:
        ((name, value),) = response.items()
        if name in ("output", "error"):
            return value if isinstance(value, str) else msgspec.json.encode(value).decode(), name == "error"
    failed = response.get("error") is not None and "output" not in response
    return msgspec.json.encode(response).decode(), failed


def _refused(path: str, reason: str) -> WireError:
    return WireError(400, "unsupported_content", f"{path}: {reason}", param=path)
