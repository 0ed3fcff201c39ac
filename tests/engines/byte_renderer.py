"""A renderer small enough to check by eye: one id a byte, 256 opens a message, 257 ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openforgerl.protocols import AnswerParser
from openforgerl.types import Conversation, JsonValue, Message, ModelCall, OriginSpan, Prompt

OPEN, END = 256, 257


class ByteRenderer:
    digest = "bytes"
    stop_ids = (END,)

    def render(
        self,
        conversation: Conversation,
        *,
        restored: Mapping[int, ModelCall],
        clock: float,
        kwargs: Mapping[str, JsonValue],
        images: Mapping[str, bytes] | None = None,
    ) -> Prompt:
        ids: list[int] = []
        origins: list[OriginSpan] = []
        for index, message in enumerate(conversation.messages):
            data = list(message.text.encode())
            start = len(ids) + 1
            origins.append(OriginSpan(start=len(ids), stop=start, kind="template"))
            if data:
                origins.append(OriginSpan(start=start, stop=start + len(data), kind="data", message=index))
            ids += [OPEN, *data, END]
            origins.append(OriginSpan(start=len(ids) - 1, stop=len(ids), kind="template"))
        origins.append(OriginSpan(start=len(ids), stop=len(ids) + 1, kind="template"))
        return Prompt(ids=(*ids, OPEN), origins=tuple(origins))

    def parser(self, conversation: Conversation, prompt: Prompt) -> AnswerParser:
        raise AssertionError("engines do not parse")

    def encode_answer(self, message: Message, conversation: Conversation) -> tuple[int, ...]:
        text = message.reasoning + message.text + "".join(f"{call.name}{call.arguments}" for call in message.tool_calls)
        return (*text.encode(), END)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join({OPEN: "<", END: ">"}.get(id) or bytes([id]).decode("latin-1") for id in ids)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple({"<": OPEN, ">": END}.get(letter, ord(letter)) for letter in text)

    def bytes_of(self, token_id: int) -> bytes:
        return {OPEN: b"<", END: b">"}.get(token_id) or (bytes([token_id]) if token_id < 256 else b"")
