"""Sampled ids to an assistant message, while they arrive.

Which grammar a model's answers follow is read off its chat template: one that writes `<tool_call>` with a JSON
`"name"` speaks hermes (Qwen and kin), one that mentions `</think>` reasons. Anything else answers in text.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from openforgerl.rendering.hermes import CALL, END_THINK, THINK, AnswerGrammar, Style
from openforgerl.rendering.tokenizer import TokenCodec
from openforgerl.types import Message, MessageDelta


def style_of(template: str) -> Style:
    """The grammar that answers to this template follow."""
    hermes = CALL in template and "name" in template and "<function=" not in template
    return Style(thinking=END_THINK in template, calls=hermes)


def opens_thought(text: str) -> bool:
    """Whether a prompt that ends in `text` (the template's own) leaves a thought open."""
    _, mark, after = text.rpartition(THINK)
    return bool(mark) and not after.strip()


class IdParser:
    """An `AnswerParser`: ids are joined as bytes, so a character may span any number of them.

    Bytes that are no UTF-8 become U+FFFD, none before the sequence is certainly broken. Stop ids show nothing.
    """

    def __init__(self, codec: TokenCodec, stop_ids: Collection[int], grammar: AnswerGrammar) -> None:
        self._codec = codec
        self._stop_ids = stop_ids
        self._grammar = grammar
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> Sequence[MessageDelta]:
        """The newly certain pieces."""
        data = b"".join(self._codec.bytes_of(i) for i in ids if i not in self._stop_ids)
        text = self._utf8.decode(data)
        return self._grammar.write(text) if text else ()

    def finish(self) -> tuple[Sequence[MessageDelta], Message]:
        """The last pieces and the whole message."""
        before = self._grammar.write(self._utf8.decode(b"", final=True))
        after, message = self._grammar.end()
        return (*before, *after), message
