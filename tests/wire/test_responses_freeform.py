"""The text of freeform calls: the documented rule, whatever the pieces are."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openforgerl.wire.responses_freeform import FreeformText, echoed_arguments, freeform_arguments, freeform_text

PATCH = '*** Begin Patch\n*** Update File: a "b".txt\n@@\n-ä\n+\\n 😀\t\n*** End Patch\n'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (json.dumps({"input": PATCH}), PATCH),
        (json.dumps({"input": PATCH}, ensure_ascii=False), PATCH),
        ('\n{ "input" :\t"a\\/b\\u00e9\\ud83d\\ude00"\r}', "a/bé😀"),
        ('{"input": ""}', ""),
        # Broken JSON whose opening is right: as far as it goes, raw control characters and strange escapes as written.
        ('{"input": "line\nline', "line\nline"),
        ('{"input": "a\\qb\\', "a\\qb\\"),
        ('{"input": "\\u12', "\\u12"),
        ('{"input": "\\u12g"', "\\u12g"),
        ('{"input": "\\ud83d x \\ude00 \\ud83d\\ud83d\\ude00"', "\ufffd x \ufffd \ufffd😀"),
        ('{"input": "\\ud83d', "\ufffd"),
        ('{"input": "\\ud83d\\u00', "\ufffd\\u00"),
        # What follows the string is not carried.
        ('{"input": "a", "more": 1}', "a"),
        ('{"input": "a"} and words', "a"),
        # All else is the text itself.
        ("", ""),
        (PATCH, PATCH),
        ("{", "{"),
        ('{"inp', '{"inp'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": null}', '{"input": null}'),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"more": 1, "input": "a"}', '{"more": 1, "input": "a"}'),
        ('{"Input": "a"}', '{"Input": "a"}'),
        ('"just a string"', '"just a string"'),
        ('[{"input": "a"}]', '[{"input": "a"}]'),
        ("null", "null"),
    ],
)
def test_the_rule(arguments: str, text: str) -> None:
    assert freeform_text(arguments) == text
    for cut in range(len(arguments) + 1):
        reader = FreeformText()
        assert reader.feed(arguments[:cut]) + reader.feed(arguments[cut:]) + reader.finish() == text
    reader = FreeformText()
    assert "".join(map(reader.feed, arguments)) + reader.finish() == text


def test_text_comes_out_as_soon_as_it_is_certain() -> None:
    reader = FreeformText()
    pieces = ['{"in', 'put": "*** Be', "gin\\", "nnext \\ud83d", "\\ude0", '0 end"', "}"]
    assert [reader.feed(piece) for piece in pieces] == ["", "*** Be", "gin", "\nnext ", "", "😀 end", ""]
    assert reader.finish() == ""


@pytest.mark.parametrize(
    ("arguments", "echoed"),
    [
        ('{"input": "a"}', '{"input": "a"}'),
        ('{ "input":"\\u0061" }', '{ "input":"\\u0061" }'),
        ('{"input": "a", "more": 1}', '{"input":"a"}'),
        ('{"input": "a', '{"input":"a"}'),
        ("*** Begin", '{"input":"*** Begin"}'),
        ('{"patch": "x"}', '{"input":"{\\"patch\\": \\"x\\"}"}'),
        ('{"input": "a", "input": "b"}', '{"input":"a"}'),  # JSON's value would be b, so this is not exact
    ],
)
def test_only_exact_arguments_are_echoed_as_sampled(arguments: str, echoed: str) -> None:
    assert echoed_arguments(arguments) == echoed


@given(st.text())
def test_any_text_survives_its_own_encoding(text: str) -> None:
    arguments = freeform_arguments(text)
    assert freeform_text(arguments) == text
    assert echoed_arguments(arguments) == arguments


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["{", '"', "input", ":", " ", "\\", "u", "d83d", "\\ude00", "a", "}", "\\n", "😀"])))
def test_pieces_do_not_matter(pieces: list[str]) -> None:
    reader = FreeformText()
    assert "".join(map(reader.feed, pieces)) + reader.finish() == freeform_text("".join(pieces))


def test_a_flood_of_blanks_takes_no_quadratic_time() -> None:
    reader = FreeformText()
    began = time.process_time()
    for _ in range(100_000):
        assert reader.feed("  ") == ""
    assert time.process_time() - began < 5
