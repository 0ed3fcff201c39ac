"""Splitting at added tokens and encoding between them, against the library's own encoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from openforgerl.errors import InputError
from openforgerl.rendering.tokenizer import TokenCodec

SETTINGS = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = ["tiny", "opened", "inst", "pieces"]

PARTS = st.sampled_from(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<result>",
        "</result>",
        "REWARD",
        "<s>",
        "</s>",
        "[INST]",
        "<think>",
        "<|eot|>",
        "<unk>",
        "hello",
        " ",
        "  ",
        "    ",
        "\n",
        "\t",
        "x",
        "_",
        "é",
        "e\u0301",
        "😀",
        "<|im_",
        "end|>",
        "▁",
        "",
        "1",
    ]
)


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@example(text="e\u0301REWARD")
@example(text="REWARD\u20e3")
@example(text="x\u00b2REWARD")
@example(text="\u2167REWARD")
@example(text="\u24b6REWARD")
@example(text="\U0001f170REWARD")
@example(text="a\u200dREWARD")
@example(text="a\u203fREWARD")
@given(text=st.lists(PARTS, max_size=12).map("".join) | st.text(max_size=20))
def test_all_trusted_is_the_library(name: str, text: str, model_of: Callable[[str], Any]) -> None:
    codec: TokenCodec = model_of(name).codec
    expected = model_of(name).reference.backend_tokenizer.encode(text, add_special_tokens=False)
    assert list(codec.encode(text).ids) == expected.ids


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(text=st.lists(PARTS, max_size=12).map("".join) | st.text(max_size=20))
def test_nothing_trusted_is_text_only(name: str, text: str, model_of: Callable[[str], Any]) -> None:
    codec: TokenCodec = model_of(name).codec
    encoded = codec.encode(text, [])
    structure = {i for i, token in codec.added.items() if token.content.strip() and token.content != "<unk>"}
    assert not structure & set(encoded.ids)
    if name in ("tiny", "pieces"):
        assert codec.decode(encoded.ids) == text
    at = 0
    for start, stop in encoded.offsets:
        assert at <= start + 4  # ids of one character share it
        assert start <= stop <= len(text)
        at = start


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(text=st.lists(PARTS, max_size=12).map("".join), ids=st.lists(st.integers(0, 400), max_size=10))
def test_decoding_is_the_library(name: str, text: str, ids: list[int], model_of: Callable[[str], Any]) -> None:
    codec: TokenCodec = model_of(name).codec
    backend: Tokenizer = model_of(name).reference.backend_tokenizer
    for some in (ids, list(codec.encode(text).ids)):
        expected = backend.decode(some, skip_special_tokens=False)
        shown = codec.decode(some)
        if name == "inst":  # the library drops a blank at the very start, and decodes bytes one by one when broken
            if "\ufffd" in expected:
                continue
            shown = shown.removeprefix(" ")
        assert shown == expected


def small(**more: Any) -> TokenCodec:
    """Characters as words, and a word that spells an added token."""
    vocabulary = {char: i for i, char in enumerate("ab<>x|")}
    vocabulary.update({"<x": 6, "<x>": 7})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("<", "x"), ("<x", ">")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<x>", special=True, normalized=False), AddedToken("|", **more)])
    return TokenCodec(tokenizer.to_str())


def test_a_word_that_is_an_added_token_is_cut() -> None:
    codec = small()
    assert codec.encode("a<x>b").ids == (0, 7, 1)
    assert codec.encode("a<x>b", [(0, 1), (4, 5)]).ids == (0, 2, 4, 3, 1)
    assert codec.encode("a<x>b", [(0, 3)]).ids == (0, 2, 4, 3, 1), "a token that only begins in trusted text is text"


def test_flags() -> None:
    plain, strip, word = small(), small(lstrip=True, rstrip=True), small(single_word=True)
    bar = plain.id_of("|")
    assert [p.token.content if p.token else None for p in plain.split("a | b", [(0, 5)])] == [None, "|", None]
    assert [(p.start, p.stop) for p in strip.split("a | b", [(0, 5)])] == [(0, 1), (1, 4), (4, 5)]
    assert bar in plain.encode("a|b").ids
    assert [p.token for p in word.split("a|b", [(0, 3)])] == [None]
    assert [p.token is None for p in word.split("a <x>|<x>", [(0, 9)])] == [True, False, False, False]


def test_normalisers_apply_between_tokens_only() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<A>", special=True, normalized=False)])
    assert TokenCodec(tokenizer.to_str()).encode("AB<A>A").ids == (0, 1, 2, 0)


def test_first_word_marks_only_the_beginning(model_of: Callable[[str], Any]) -> None:
    codec: TokenCodec = model_of("inst").codec
    assert codec.encode("hello").ids != codec.encode("hello", first=False).ids
    assert codec.decode(codec.encode("hello").ids) == " hello"
    assert codec.decode(codec.encode("hello", first=False).ids) == "hello"


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read"):
        TokenCodec("{")
    with pytest.raises(InputError, match="not a tokenizer"):
        TokenCodec("{}")
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(InputError, match="decoder none is not supported"):
        TokenCodec(tokenizer.to_str())
    assert json.loads(tokenizer.to_str())["decoder"] is None
