"""A rendered conversation as pieces: where its structure is, whose its characters are, where its turns lie."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec

from openforgerl.errors import TemplateError
from openforgerl.rendering.images import MeasuredImage
from openforgerl.rendering.tokenizer import AddedToken, Piece, Stretch, TokenCodec
from openforgerl.rendering.traced import TEMPLATE, UNKNOWN, Runs, Traced, expand_part, runs_of

_LEAD = 32
"""Characters before a thought by which the end of a prompt is known."""


class Turn(msgspec.Struct, frozen=True):
    """Where an assistant message stands: its text `[start, stop)`, and the piece that is its stop token."""

    start: int
    stop: int
    stop_piece: int
    lead: str = ""
    """What the template wrote right before it, by which a prompt that ended there is known."""


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """How turns end in one model's prompts."""

    stop_ids: frozenset[int]
    """Ids that end an answer when they are sampled."""
    ends: frozenset[int]
    """Those, and ids that the template writes at the end of a turn though no answer ends in them."""
    goes_on: str = ""
    """Text after such a token that shows that the turn goes on."""
    marks: tuple[str, ...] = ()
    """What opens and what closes a thought."""


class Layout:
    """One rendering, split once."""

    def __init__(
        self, codec: TokenCodec, traced: Traced, data: Callable[[], Iterable[str]], earlier: Layout | None = None
    ) -> None:
        """`data` gives every string of the conversation; it is asked only if some text's origin is unknown.

        `earlier`: one by the same codec. What both texts begin with is split only once.
        """
        self.text = str.__str__(traced)
        self.runs = runs_of(traced)
        """Who wrote each character (see `traced`)."""
        self._unknown = any(origin == UNKNOWN for _, origin in self.runs)
        self.images: dict[int, MeasuredImage] = {}
        """Piece → the image whose placeholder it is."""
        self.pieces: list[Piece] = []
        self._run_starts: list[int] = []
        self._tokens: list[int] = []
        self._first: dict[int, int] = {}
        start = 0
        if earlier is not None and not self._unknown and not earlier._unknown:
            start = self._begin_as(earlier, codec)
        runs = self.runs[len(self._run_starts) :]
        begin = self._run_starts[-1] + self.runs[len(self._run_starts) - 1][0] if self._run_starts else 0
        self._run_starts += [*accumulate((length for length, _ in runs), initial=begin)][:-1]
        for (_, origin), at in zip(runs, self._run_starts[len(self._run_starts) - len(runs) :], strict=True):
            self._first.setdefault(origin, at)
        pieces = codec.split(self.text, self._stretches(start, (TEMPLATE,)), start=start)
        if self._unknown:
            possible = codec.split(self.text, self._stretches(start, (TEMPLATE, UNKNOWN)), start=start)
            if possible != pieces and not _could_spell(codec.added.values(), data()):
                pieces = possible
        known = len(self.pieces)
        self.pieces += pieces
        self._tokens += [at for at, piece in enumerate(pieces, known) if piece.token is not None]
        self._starts = [self.pieces[at].start for at in self._tokens]

    def _begin_as(self, earlier: Layout, codec: TokenCodec) -> int:
        """Take over what `earlier` found in the text up to a structural token that this text has too; where that ends.

        The text behind such a token is split as if nothing stood before.
        """
        back = 1
        while back <= len(earlier._tokens):
            index = earlier._tokens[-back]
            piece = earlier.pieces[index]
            back *= 2
            if not codec.divides(piece):
                continue
            if self.text.startswith(earlier.text[: piece.stop]) and earlier.begins_as(self, piece.stop):
                whole = bisect_left(earlier._run_starts, piece.stop) - 1  # runs that end before, or with, the token
                self._run_starts = earlier._run_starts[:whole]
                self._first = {origin: at for origin, at in earlier._first.items() if at < piece.stop}
                self.pieces = earlier.pieces[: index + 1]
                self._tokens = earlier._tokens[: bisect_left(earlier._tokens, index) + 1]
                return piece.stop
        return 0

    def _stretches(self, start: int, origins: Collection[int]) -> list[Stretch]:
        """The stretches of characters that only `origins` wrote, from that which holds the character at `start`."""
        first = max(bisect_left(self._run_starts, start + 1) - 1, 0)
        return stretches_of(self.runs[first:], origins, self._run_starts[first] if self.runs else 0)

    def origins(self, start: int, stop: int) -> list[int]:
        """One origin for each character of `[start, stop)`."""
        return expand_part(self.runs, self._run_starts, start, stop)

    def begins_as(self, earlier: Layout, stop: int) -> bool:
        """Whether the text up to `stop` was written by whom `earlier` has there."""
        at = bisect_left(self._run_starts, stop) - 1
        runs = earlier.runs
        if at < 0 or len(runs) <= at or runs[:at] != self.runs[:at]:
            return at < 0
        ours, theirs = self.runs[at], runs[at]
        return ours[1] == theirs[1] and min(ours[0], theirs[0]) >= stop - self._run_starts[at]

    def place(self, token_id: int, images: Sequence[MeasuredImage]) -> None:
        """Say which image each structural placeholder stands for, in order. TemplateError when their numbers differ."""
        pieces = [i for i in self._tokens if (token := self.pieces[i].token) is not None and token.id == token_id]
        if len(pieces) != len(images):
            raise TemplateError(f"the chat template wrote {len(pieces)} places for {len(images)} images")
        self.images = dict(zip(pieces, images, strict=True))

    def images_before(self, stop: int) -> list[tuple[str, int, tuple[int, int, int]]]:
        """(sha256, placeholders, grid) of the images placed before a character, in order."""
        placed = (image for at, image in self.images.items() if self.pieces[at].start < stop)
        return [(image.sha256, image.count, image.grid) for image in placed]

    def turns(self, message: int, header: str, turns: Turns) -> Iterator[Turn]:
        """Where the turn of assistant message `message` may lie; none if it cannot be located with certainty.

        It begins after the last `header` before the message's own text, or, between that text and whatever else was
        written before, after any structural token or before the mark of a thought. It ends at the first structural
        token that ends a turn after its text began. In between nobody but the template and this message may have
        written, and no other turn may have ended.
        """
        first = self._first.get(message)
        if first is None:
            return
        for start, lead in self._starts_before(header, first, turns.marks):
            index = self._end_after(start, turns)
            if index is None or self.pieces[index].start < first:
                continue
            stop = self.pieces[index].start
            if all(origin in (TEMPLATE, UNKNOWN, message) for origin in self.origins(first, stop)):
                yield Turn(start, stop, index, lead)

    def turn_from(self, start: int, turns: Turns) -> Turn:
        """The turn that begins at a character; `stop_piece` is past the end where nothing ends it."""
        index = self._end_after(start, turns)
        if index is None:
            return Turn(start, len(self.text), len(self.pieces))
        return Turn(start, self.pieces[index].start, index)

    def after_header(self, header: str, message: int) -> int | None:
        """Where the last `header` before the message's own text ends; of a message without text, the last of all.

        Without a header: the end of the structural token before.
        """
        first = self._first.get(message)
        if first is None and header:
            return self._after(header, len(self.text))
        return next(
            (start for start, _ in self._starts_before(header, len(self.text) if first is None else first)), None
        )

    def _starts_before(self, header: str, first: int, marks: Sequence[str] = ()) -> Iterator[tuple[int, str]]:
        """Where only the template wrote from there to `first`, with what it wrote right before."""
        run = bisect_left(self._run_starts, first) - 1
        written = self._run_starts[run] if run >= 0 and self.runs[run][1] == TEMPLATE else first
        after = self._after(header, first) if header else None
        if after is not None and after >= written:
            yield after, header
        for index in reversed(range(bisect_left(self._starts, first))):
            piece = self.pieces[self._tokens[index]]
            if piece.stop < written:
                break
            if piece.stop <= first and piece.stop != after:
                yield piece.stop, self.text[piece.start : piece.stop]
        for mark in marks:
            at = self.text.find(mark, written, first)
            if at > written:
                yield at, self.text[max(written, at - _LEAD) : at]

    def _end_after(self, start: int, turns: Turns) -> int | None:
        """Index of the first structural token at or after a character that ends a turn."""
        for at in range(bisect_left(self._starts, start), len(self._tokens)):
            index = self._tokens[at]
            piece = self.pieces[index]
            if piece.token is not None and piece.token.id in turns.ends:
                if turns.goes_on and self.text.startswith(turns.goes_on, piece.stop):
                    continue
                return index
        return None

    def _after(self, header: str, before: int) -> int | None:
        at = self.text.rfind(header, 0, before)
        while at >= 0:
            if all(origin == TEMPLATE for origin in self.origins(at, at + len(header))):
                return at + len(header)
            at = self.text.rfind(header, 0, at + len(header) - 1)
        return None


def stretches_of(runs: Runs, origins: Collection[int], start: int = 0) -> list[Stretch]:
    """The stretches of characters that only `origins` wrote; `start`: the character that the first run begins with."""
    found: list[Stretch] = []
    at = start
    for length, origin in runs:
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
