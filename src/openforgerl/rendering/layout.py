"""A rendered conversation as pieces: where its structure is, whose its characters are, where its turns lie."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from openforgerl.errors import TemplateError
from openforgerl.rendering.images import MeasuredImage
from openforgerl.rendering.tokenizer import AddedToken, Piece, Stretch, TokenCodec
from openforgerl.rendering.traced import TEMPLATE, UNKNOWN, Traced, expand, runs_of


class Turn(msgspec.Struct, frozen=True):
    """Where an assistant message stands: its text `[start, stop)`, and the piece that is its stop token."""

    start: int
    stop: int
    stop_piece: int


class Layout:
    """One rendering, split once."""

    def __init__(self, codec: TokenCodec, traced: Traced, data: Callable[[], Iterable[str]]) -> None:
        """`data` gives every string of the conversation; it is asked only if some text's origin is unknown."""
        self.text = str.__str__(traced)
        self.origins = expand(traced)
        """One origin per character (see `traced`)."""
        proven = stretches_of(traced, (TEMPLATE,))
        self.pieces: list[Piece] = codec.split(self.text, proven)
        if UNKNOWN in self.origins:
            possible = codec.split(self.text, stretches_of(traced, (TEMPLATE, UNKNOWN)))
            if possible != self.pieces and not _could_spell(codec.added.values(), data()):
                self.pieces = possible
        self.images: dict[int, MeasuredImage] = {}
        """Piece → the image whose placeholder it is."""
        self._tokens = [i for i, piece in enumerate(self.pieces) if piece.token is not None]
        self._starts = [self.pieces[i].start for i in self._tokens]
        self._first: dict[int, int] = {}
        at = 0
        for length, origin in runs_of(traced):
            self._first.setdefault(origin, at)
            at += length

    def place(self, token_id: int, images: Sequence[MeasuredImage]) -> None:
        """Say which image each structural placeholder stands for, in order. TemplateError when their numbers differ."""
        pieces = [i for i in self._tokens if (token := self.pieces[i].token) is not None and token.id == token_id]
        if len(pieces) != len(images):
            raise TemplateError(f"the chat template wrote {len(pieces)} places for {len(images)} images")
        self.images = dict(zip(pieces, images, strict=True))

    def turn(self, message: int, header: str, stop_ids: Collection[int]) -> Turn | None:
        """The turn of assistant message `message`, or None if it cannot be located with certainty.

        It begins after the last `header` before the message's own text (after the last structural token where
        the template has no header) and ends at the first structural stop token after that text began. In
        between nobody but the template and this message may have written, and no other turn may have ended.
        """
        first = self._first.get(message)
        if first is None:
            return None
        start = self._after_header(header, first)
        if start is None or any(self.origins[i] != TEMPLATE for i in range(start, first)):
            return None
        index = self._stop_after(start, stop_ids)
        if index is None or self.pieces[index].start < first:
            return None
        stop = self.pieces[index].start
        if any(self.origins[i] not in (TEMPLATE, UNKNOWN, message) for i in range(first, stop)):
            return None
        return Turn(start, stop, index)

    def last_turn(self, header: str, stop_ids: Collection[int]) -> Turn | None:
        """The turn after the last header that the template wrote; `stop_piece` is past the end if it has none."""
        start = self._after_header(header, len(self.text))
        if start is None:
            return None
        index = self._stop_after(start, stop_ids)
        if index is None:
            return Turn(start, len(self.text), len(self.pieces))
        return Turn(start, self.pieces[index].start, index)

    def _stop_after(self, start: int, stop_ids: Collection[int]) -> int | None:
        """Index of the first structural stop token at or after a character."""
        for index in self._tokens[bisect_left(self._starts, start) :]:
            token = self.pieces[index].token
            if token is not None and token.id in stop_ids:
                return index
        return None

    def _after_header(self, header: str, before: int) -> int | None:
        if not header:
            at = bisect_left(self._starts, before)
            stops = [self.pieces[i].stop for i in self._tokens[max(at - 2, 0) : at]]
            return max((stop for stop in stops if stop <= before), default=None)
        at = self.text.rfind(header, 0, before)
        while at >= 0:
            if all(self.origins[i] == TEMPLATE for i in range(at, at + len(header))):
                return at + len(header)
            at = self.text.rfind(header, 0, at + len(header) - 1)
        return None


def stretches_of(traced: Traced, origins: Collection[int]) -> list[Stretch]:
    """The stretches of characters that only `origins` wrote."""
    found: list[Stretch] = []
    at = 0
    for length, origin in runs_of(traced):
        if origin in origins:
            if found and found[-1][1] == at:
                found[-1] = (found[-1][0], at + length)
            else:
                found.append((at, at + length))
        at += length
    return found


def _could_spell(tokens: Iterable[AddedToken], data: Iterable[str]) -> bool:
    """Whether data can have written an added token, whole or by being joined to other text."""
    texts: Sequence[str] = list(data)
    for token in tokens:
        content = token.content
        for text in texts:
            if content in text:
                return True
            if any(text.endswith(content[:i]) or text.startswith(content[-i:]) for i in range(1, len(content))):
                return True
    return False
