"""Text to ids and back, where only what the template wrote can be an added token.

The text is split at added tokens by the rules of Hugging Face's added vocabulary (leftmost, longest; `lstrip`,
`rstrip`, `single_word`), but only inside stretches that may hold structure. What lies between is encoded whole
by the same tokenizer without any added tokens, so template and data still merge across their border, and text
that merely spells an added token becomes ordinary ids. Where no data spells one, the ids are those of
`Tokenizer.encode(text, add_special_tokens=False)`; no BOS is ever added here (the template writes it).

One exception: added tokens that are only white space and not special (some code tokenizers have runs of
blanks) are vocabulary, not structure, and match everywhere.

An added token with `normalized=True` is looked for in the text as it stands, not in its normalised form.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from tokenizers import Tokenizer

from openforgerl.errors import InputError
from openforgerl.rendering.remembered import Remembered

_HELD = 64 * 2**20
"""Bytes of ordinary text with its ids that a codec remembers."""

Stretch = tuple[int, int]
"""Characters `[start, stop)`."""

_JOINERS = "\u200c\u200d"
_LETTER_SYMBOLS = (
    ("\u24b6", "\u24e9"),
    ("\U0001f130", "\U0001f149"),
    ("\U0001f150", "\U0001f169"),
    ("\U0001f170", "\U0001f189"),
)
"""Symbols that Unicode lists as Other_Alphabetic: circled and squared letters."""


class AddedToken(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `added_tokens` in tokenizer.json."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Characters `[start, stop)` of a text: an added token, or ordinary text when `token` is None."""

    start: int
    stop: int
    token: AddedToken | None = None


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """Ids with the characters `[start, stop)` that each stands for."""

    ids: tuple[int, ...]
    offsets: tuple[Stretch, ...]


class TokenCodec:
    """A `tokenizer.json`, both ways. Pure apart from a bounded cache."""

    def __init__(self, source: str, *, extra: Iterable[AddedToken] = (), held: int = _HELD) -> None:
        """`source` is the text of tokenizer.json; `extra` are added tokens that only other files name. `held`: bytes
        of ordinary text with its ids that are remembered.
        """
        try:
            state: dict[str, Any] = json.loads(source)
            listed = msgspec.convert(state.get("added_tokens") or [], list[AddedToken])
            self._whole = Tokenizer.from_str(source)
        except (ValueError, msgspec.ValidationError) as error:
            raise InputError(f"tokenizer.json cannot be read: {error}") from error
        except Exception as error:  # the tokenizers library raises bare Exception
            raise InputError(f"tokenizer.json is not a tokenizer the library knows: {error}") from error
        known = {token.content for token in listed}
        self.added: dict[int, AddedToken] = {token.id: token for token in listed}
        self.added.update({token.id: token for token in extra if token.content not in known})
        tokens = [token for token in self.added.values() if token.content]
        blank = [token for token in tokens if token.content.isspace() and not token.special]
        firm = [token for token in tokens if token not in blank]
        self._stages = (
            _Matcher([token for token in firm if not token.normalized], everywhere=False),
            _Matcher([token for token in firm if token.normalized], everywhere=False),
            _Matcher(blank, everywhere=True),
        )
        self._dividing = _dividing(tokens, [token for token in firm if not token.normalized])
        self._first, self._later = _ordinary_tokenizers(state)
        unknown = (state.get("model") or {}).get("unk_token")
        self._never = frozenset(self.added) - {self._whole.token_to_id(unknown) if isinstance(unknown, str) else None}
        self._to_bytes = _byte_reader(state.get("decoder"))
        self._known: Remembered[tuple[str, bool], Encoded] = Remembered(held)
        self.characters_encoded = 0
        """Characters of ordinary text that were turned into ids so far; what was remembered is not counted."""
        self._bytes_of = lru_cache(maxsize=None)(self._read_bytes)

    @property
    def held(self) -> int:
        """Bytes of what is remembered."""
        return self._known.size

    def forget(self) -> None:
        """Drop what is remembered: the next text is encoded anew."""
        self._known.clear()

    def spelled_in(self, text: str) -> bool:
        """Whether `text` contains the text of an added token that can be structure."""
        return any(stage.finds(text) for stage in self._stages[:2])

    def id_of(self, content: str) -> int | None:
        """Id of a token by its exact content."""
        found = next((token.id for token in self.added.values() if token.content == content), None)
        return found if found is not None else self._whole.token_to_id(content)

    def split(self, text: str, trusted: Sequence[Stretch], *, start: int = 0) -> list[Piece]:
        """`text` from a character on as pieces; added tokens only inside one of the `trusted` stretches (ordered,
        disjoint). `start`: 0, or where a piece ends that `divides`."""
        pieces = [Piece(start, len(text))] if start < len(text) else []
        for stage in self._stages:
            if stage.finds(text):  # a long text has ten thousand pieces, of which a later stage changes few or none
                pieces = [part for piece in pieces for part in stage.split(text, piece, trusted)]
        return pieces

    def divides(self, piece: Piece) -> bool:
        """Whether a piece ends there whatever follows, which is split as if nothing stood before."""
        return piece.token is not None and piece.token in self._dividing

    def encode_piece(self, text: str, piece: Piece, *, first: bool) -> Encoded:
        """Ids of one piece; offsets count from the start of `text`. `first`: nothing stands before the text."""
        if piece.token is not None:
            return Encoded((piece.token.id,), ((piece.start, piece.stop),))
        encoded = self._ordinary(text[piece.start : piece.stop], first and piece.start == 0)
        return Encoded(encoded.ids, tuple((piece.start + a, piece.start + b) for a, b in encoded.offsets))

    def encode_part(self, text: str, token: AddedToken | None, *, first: bool) -> Encoded:
        """Ids of the text of one piece; offsets count from its own start."""
        if token is not None:
            return Encoded((token.id,), ((0, len(text)),))
        return self._ordinary(text, first)

    def encode(self, text: str, trusted: Sequence[Stretch] | None = None, *, first: bool = True) -> Encoded:
        """Ids of a whole text; `trusted` None means that all of it may be structure."""
        ids: list[int] = []
        offsets: list[Stretch] = []
        for piece in self.split(text, [(0, len(text))] if trusted is None else trusted):
            encoded = self.encode_piece(text, piece, first=first)
            ids.extend(encoded.ids)
            offsets.extend(encoded.offsets)
        return Encoded(tuple(ids), tuple(offsets))

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes that an id stands for (maybe part of a character); none for an id without a token."""
        return self._bytes_of(token_id)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, added tokens included; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", errors="replace")

    def _ordinary(self, text: str, first: bool) -> Encoded:
        encoded = self._known.get((text, first))
        if encoded is None:
            encoded = self._encode_ordinary(text, first)
            self.characters_encoded += len(text)
            # A character is a byte or more, an id with its offsets some thirty words of memory.
            self._known.put((text, first), encoded, 4 * len(text) + 250 * len(encoded.ids))
        return encoded

    def _encode_ordinary(self, text: str, first: bool) -> Encoded:
        encoding = (self._first if first else self._later).encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        for token_id, (start, stop) in zip(ids, offsets, strict=True):
            # A model may know an added token's text as a word of its own; cutting that word keeps it text.
            if token_id in self._never and stop - start > 1:
                middle = (start + stop) // 2
                left = self._encode_ordinary(text[:middle], first)
                right = self._encode_ordinary(text[middle:], False)
                moved = tuple((middle + a, middle + b) for a, b in right.offsets)
                return Encoded(left.ids + right.ids, left.offsets + moved)
        return Encoded(tuple(ids), tuple(offsets))

    def _read_bytes(self, token_id: int) -> bytes:
        added = self.added.get(token_id)
        if added is not None:
            return added.content.encode()
        token = self._whole.id_to_token(token_id)
        return b"" if token is None else self._to_bytes(token)


class _Matcher:
    """Finds one class of added tokens, as one pass of the added vocabulary does."""

    def __init__(self, tokens: Sequence[AddedToken], *, everywhere: bool) -> None:
        self._by_text: Mapping[str, AddedToken] = {token.content: token for token in tokens}
        longest_first = sorted(self._by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
        self._everywhere = everywhere

    def finds(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def split(self, text: str, piece: Piece, trusted: Sequence[Stretch]) -> Iterator[Piece]:
        """The tokens inside a piece of ordinary text, and the ordinary text between them."""
        if self._pattern is None or piece.token is not None:
            yield piece
            return
        at = piece.start
        for start, stop, token in self._matches(text, piece, trusted):
            if token.single_word and not _stands_alone(text, piece, start, stop):
                continue
            if token.lstrip:
                before = text[at:start]
                start -= len(before) - len(before.rstrip())
            if token.rstrip:
                after = text[stop : piece.stop]
                stop += len(after) - len(after.lstrip())
            if start < at:
                continue
            if at < start:
                yield Piece(at, start)
            yield Piece(start, stop, token)
            at = stop
        if at < piece.stop:
            yield Piece(at, piece.stop)

    def _matches(self, text: str, piece: Piece, trusted: Sequence[Stretch]) -> Iterator[tuple[int, int, AddedToken]]:
        """As a search of each stretch by itself would find them, but in one pass: most matches lie inside one."""
        assert self._pattern is not None
        stretches = [(piece.start, piece.stop)] if self._everywhere else trusted
        at = bisect_right(stretches, piece.start, key=_stop)
        start = piece.start
        while at < len(stretches) and stretches[at][0] < piece.stop:
            start = max(start, stretches[at][0])
            for match in self._pattern.finditer(text, start, piece.stop):
                low, high = match.span()
                while at < len(stretches) and stretches[at][1] <= low:
                    at += 1
                if at == len(stretches) or not stretches[at][0] <= low:
                    break
                if high > stretches[at][1]:
                    # It goes beyond its stretch, in which a shorter one may still lie.
                    for inner in self._pattern.finditer(text, low, min(stretches[at][1], piece.stop)):
                        yield inner.start(), inner.end(), self._by_text[inner.group()]
                    at += 1
                    break
                yield low, high, self._by_text[match.group()]
            else:
                return


def _dividing(tokens: Sequence[AddedToken], first_pass: Sequence[AddedToken]) -> frozenset[AddedToken]:
    """The tokens behind which a text may be cut in two and split part by part.

    Found in the first pass, because the others look at what lies between two of its tokens. No token can begin before
    the cut and end behind it: none has a beginning that such a one ends in, or that ends in it. And none takes the
    blanks that follow, or looks whether it stands alone.
    """
    if any(token.single_word for token in tokens):
        return frozenset()
    contents = {token.content for token in first_pass}
    beginnings = {content[:stop] for content in contents for stop in range(1, len(content))}
    inside = {part[start:] for part in beginnings for start in range(len(part))} & contents
    return frozenset(
        token
        for token in first_pass
        if not token.rstrip
        and token.content not in inside
        and beginnings.isdisjoint(token.content[start:] for start in range(len(token.content)))
    )


def _stop(stretch: Stretch) -> int:
    return stretch[1]


def _stands_alone(text: str, piece: Piece, start: int, stop: int) -> bool:
    before = start > piece.start and _is_word(text[start - 1])
    after = stop < piece.stop and _is_word(text[stop])
    return not before and not after


def _is_word(character: str) -> bool:
    """Whether the tokenizers library counts a character as part of a word.

    It asks its regular expressions' `\\w`, which is Unicode's (UTS #18, Annex C: Alphabetic, Mark, Decimal_Number,
    Connector_Punctuation, Join_Control) and differs from Python's on combining marks and superscripts.
    """
    category = unicodedata.category(character)
    if category[0] in "LM" or category in ("Nd", "Nl", "Pc"):
        return True
    return character in _JOINERS or any(low <= character <= high for low, high in _LETTER_SYMBOLS)


def _ordinary_tokenizers(state: Mapping[str, Any]) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer without added tokens: for the beginning of a text, and for text further on.

    They differ only where the pre-tokenizer marks the very first word of a text (Metaspace, scheme `first`).
    """
    first = {**state, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    later = {**first, "pre_tokenizer": _never_first(first.get("pre_tokenizer"))}
    whole = Tokenizer.from_str(json.dumps(first, ensure_ascii=False))
    if later == first:
        return whole, whole
    return whole, Tokenizer.from_str(json.dumps(later, ensure_ascii=False))


def _never_first(part: Any) -> Any:
    if isinstance(part, list):
        return [_never_first(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
        return {**part, "prepend_scheme": "never"}
    return {key: _never_first(value) for key, value in part.items()}


class _ByteLevel:
    """Reads the alphabet in which GPT-2 style tokenizers write bytes."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        moved = [byte for byte in range(256) if byte not in printable]
        self._byte = {chr(byte): byte for byte in printable}
        self._byte.update({chr(256 + i): byte for i, byte in enumerate(moved)})

    def __call__(self, token: str) -> bytes:
        if all(char in self._byte for char in token):
            return bytes(self._byte[char] for char in token)
        return token.encode()


class _Pieces:
    """Reads SentencePiece-style tokens: replaced blanks, and `<0xNN>` for single bytes."""

    def __init__(self, replaced: Sequence[tuple[str, str]], *, byte_fallback: bool) -> None:
        self._replaced = replaced
        self._byte = re.compile(r"<0x([0-9A-Fa-f]{2})>") if byte_fallback else None

    def __call__(self, token: str) -> bytes:
        byte = self._byte.fullmatch(token) if self._byte else None
        if byte is not None:
            return bytes([int(byte.group(1), 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _byte_reader(decoder: Any) -> _ByteLevel | _Pieces:
    parts: list[dict[str, Any]] = []
    if isinstance(decoder, dict):
        parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if kinds & {"Metaspace", "Replace", "ByteFallback"}:
        replaced = [(part.get("replacement", "▁"), " ") for part in parts if part.get("type") == "Metaspace"]
        for part in parts:
            if part.get("type") == "Replace" and "String" in part["pattern"]:
                replaced.append((part["pattern"]["String"], part["content"]))
        return _Pieces(replaced, byte_fallback="ByteFallback" in kinds)
    named = ", ".join(sorted(map(str, kinds))) or "none"
    raise InputError(f"tokenizer.json: decoder {named} is not supported; ByteLevel, Metaspace and ByteFallback are")
