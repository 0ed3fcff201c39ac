"""Sampled ids to an assistant message, while they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from openforgerl.rendering.answers import Grammar
from openforgerl.rendering.tokenizer import TokenCodec
from openforgerl.types import Message, MessageDelta


def opens_thought(text: str, thought: tuple[str, str]) -> bool:
    """Whether a prompt that ends in `text` (the template's own) leaves a thought open."""
    _, mark, after = text.rpartition(thought[0])
    return bool(mark) and not after.strip()


class IdParser:
    """An `AnswerParser`: ids are joined as bytes, so a character may span any number of them.

    Bytes that are no UTF-8 become U+FFFD, none before the sequence is certainly broken. The first stop id ends the
    answer and shows nothing; what an engine may have sampled beyond it is not part of the message.
    """

    def __init__(self, codec: TokenCodec, stop_ids: Collection[int], grammar: Grammar) -> None:
        self._codec = codec
        self._stop_ids = stop_ids
        self._grammar = grammar
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ended = False

    def feed(self, ids: Sequence[int]) -> Sequence[MessageDelta]:
        """The newly certain pieces."""
        data = bytearray()
        for token_id in ids:
            self._ended = self._ended or token_id in self._stop_ids
            if self._ended:
                break
            data += self._codec.bytes_of(token_id)
        text = self._utf8.decode(bytes(data))
        return self._grammar.write(text) if text else ()

    def finish(self) -> tuple[Sequence[MessageDelta], Message]:
        """The last pieces and the whole message."""
        before = self._grammar.write(self._utf8.decode(b"", final=True))
        after, message = self._grammar.end()
        return (*before, *after), message
