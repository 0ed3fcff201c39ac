"""A layout that begins with what an earlier one found is the layout that the text alone would give."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from openforgerl.rendering.layout import Layout
from openforgerl.rendering.tokenizer import TokenCodec
from openforgerl.rendering.traced import TEMPLATE, UNKNOWN, Traced, concat, uniform


def codec(*tokens: dict[str, object]) -> TokenCodec:
    """A byte-level tokenizer with these added tokens."""
    whole = Tokenizer(BPE(vocab={char: at for at, char in enumerate(ByteLevel.alphabet())}, merges=[]))
    whole.pre_tokenizer = ByteLevel(add_prefix_space=False)
    whole.decoder = ByteLevelDecoder()
    state = json.loads(whole.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    state["added_tokens"] = [{"id": 300 + at, **plain, **token} for at, token in enumerate(tokens)]
    return TokenCodec(json.dumps(state))


def contents(*names: str) -> TokenCodec:
    return codec(*({"content": name} for name in names))


FOUND = [
    ("tokens that share nothing", contents("<a>", "<b>", "[x]"), {"<a>", "<b>", "[x]"}),
    ("one that begins another", contents("<a>", "<a>b", "<c>"), {"<a>b", "<c>"}),
    ("one that ends in another's beginning", contents("<a>", "<b><", "<c>"), {"<a>", "<c>"}),
    ("one inside the beginning of another", contents("<a>", "x<a>y", "<c>"), {"x<a>y", "<c>"}),
    ("one that takes the blanks behind it", codec({"content": "<a>", "rstrip": True}, {"content": "<b>"}), {"<b>"}),
    ("one of a later pass", codec({"content": "<a>", "normalized": True}, {"content": "<b>"}), {"<b>"}),
    ("any that stands alone", codec({"content": "<a>", "single_word": True}, {"content": "<b>"}), set[str]()),
]


@pytest.mark.parametrize(("codec", "expected"), [row[1:] for row in FOUND], ids=[row[0] for row in FOUND])
def test_behind_which_tokens_a_text_may_be_cut(codec: TokenCodec, expected: set[str]) -> None:
    pieces = [codec.split(token.content, [(0, len(token.content))])[0] for token in codec.added.values()]
    assert {piece.token.content for piece in pieces if piece.token is not None and codec.divides(piece)} == expected


CODECS = [row[1] for row in FOUND] + [
    codec(
        {"content": "<a>"}, {"content": "b", "lstrip": True, "normalized": True}, {"content": "\n", "special": False}
    ),
    codec({"content": "<a>", "lstrip": True}, {"content": "<b>"}, {"content": "a", "normalized": True}),
]
PARTS = ["<a>", "<b>", "<b><", "<a>b", "x", "y", "<", ">", "a", "b", " ", "\n", "[x]", "<c>"]


@st.composite
def texts(draw: st.DrawFn, origins: tuple[int, ...]) -> list[Traced]:
    """Texts that each begin with a part of the one before."""
    part = st.builds(uniform, st.sampled_from(PARTS), st.sampled_from(origins))
    found: list[list[str]] = []
    for _ in range(draw(st.integers(2, 4))):
        kept = found[-1][: draw(st.integers(0, len(found[-1])))] if found else []
        found.append([*kept, *draw(st.lists(part, max_size=8))])
    return [concat(parts) for parts in found]


def spelled() -> list[str]:
    """What the conversation's data hold."""
    return ["<a>", "x"]


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_it_is_as_if_nothing_had_been_known(codec: TokenCodec, data: st.DataObject) -> None:
    origins = data.draw(st.sampled_from([(TEMPLATE, 0), (TEMPLATE, 0, 1, 2), (TEMPLATE, UNKNOWN, 0)]))
    earlier: Layout | None = None
    for traced in data.draw(texts(origins)):
        alone = Layout(codec, traced, spelled)
        after = Layout(codec, traced, spelled, earlier)
        assert vars(after) == vars(alone)
        earlier = after


def test_what_is_known_is_not_split_again() -> None:
    """Counted in pieces that are the very same objects."""
    found = contents("<a>", "<b>")
    begun = Layout(found, concat([uniform("<a>", TEMPLATE), uniform("x" * 9, 0), uniform("<b>", TEMPLATE)]), list)
    more = concat([uniform("<a>", TEMPLATE), uniform("x" * 9, 0), uniform("<b>", TEMPLATE), uniform("<a>", 1)])
    layout = Layout(found, more, list, begun)
    assert [piece is other for piece, other in zip(layout.pieces, begun.pieces, strict=False)] == [True] * 3
    assert layout.text[layout.pieces[3].start :] == "<a>" and layout.pieces[3].token is None  # it is data


def test_the_same_text_by_other_writers_is_split_anew() -> None:
    found = contents("<a>", "<b>")
    begun = Layout(found, concat([uniform("<a>", TEMPLATE), uniform("<b>", TEMPLATE)]), list)
    layout = Layout(found, concat([uniform("<a>", 0), uniform("<b>", TEMPLATE), uniform("x", 1)]), list, begun)
    assert [piece.token is not None for piece in layout.pieces] == [False, True, False]


@pytest.mark.parametrize("codec", CODECS)
def test_no_text_that_goes_on_is_split_otherwise(codec: TokenCodec) -> None:
    """Every two parts, and every part behind them."""
    for parts in itertools.product(PARTS, repeat=2):
        begun = Layout(codec, uniform("".join(parts), TEMPLATE), list)
        for more in PARTS:
            text = uniform("".join((*parts, more)), TEMPLATE)
            assert vars(Layout(codec, text, list, begun)) == vars(Layout(codec, text, list)), (parts, more)
