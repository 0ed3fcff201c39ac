"""Stop strings and the message that a client has in hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforgerl.errors import ExactnessError
from openforgerl.types import Message, MessageDelta, Role, Text, ToolCall
from openforgerl.wire import MessageBuilder, StopStrings


def text(*pieces: str) -> list[MessageDelta]:
    return [MessageDelta(kind="text", text=piece) for piece in pieces]


def shown(stops: StopStrings, pieces: list[str]) -> str:
    seen = "".join(delta.text for piece in pieces for delta in stops.feed(text(piece)))
    return seen + "".join(delta.text for delta in stops.flush())


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_text_ends_before_the_first_stop_string_at_every_cut(whole: str, stop: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    stops = StopStrings(stop)
    # By definition: the shortest beginning that holds a stop string decides; the earliest such string ends the text.
    first = next((end for end in range(len(whole) + 1) if any(s in whole[:end] for s in stop)), None)
    expected = whole if first is None else whole[: min(at for s in stop if (at := whole[:first].find(s)) >= 0)]
    assert shown(stops, pieces) == expected
    assert (stops.hit is None) == (first is None)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["</code>"])
    assert [delta.text for delta in stops.feed(text("x = 1 <"))] == ["x = 1 "]
    assert stops.feed(text("/co")) == []
    assert [delta.text for delta in stops.feed(text("ol"))] == ["</cool"]


def test_nothing_follows_a_hit() -> None:
    stops = StopStrings(["END"])
    call = MessageDelta(kind="call", text="ls", call_index=0, call_id="c")
    assert [delta.text for delta in stops.feed([*text("a EN", "D b"), call])] == ["a "]
    assert stops.hit == "END"
    assert stops.feed(text("more")) == [] == stops.flush()


def test_thoughts_and_arguments_hold_no_stop_strings_and_end_a_beginning() -> None:
    stops = StopStrings(["END"])
    deltas = [
        *text("EN"),
        MessageDelta(kind="reasoning", text="END"),
        *text("D"),
        MessageDelta(kind="arguments", text="END", call_index=0),
    ]
    assert stops.feed(deltas) == deltas
    assert stops.hit is None


def test_interleaved_calls_are_kept_apart() -> None:
    builder = MessageBuilder()
    assert builder.empty
    for delta in (
        MessageDelta(kind="call", text="a", call_index=0, call_id="c0"),
        MessageDelta(kind="call", text="b", call_index=1, call_id="c1"),
        MessageDelta(kind="arguments", text="0", call_index=0),
        MessageDelta(kind="arguments", text="1", call_index=1),
        MessageDelta(kind="arguments", text="00", call_index=0),
    ):
        builder.add([delta])
    assert [(call.id, call.name, call.arguments) for call in builder.message().tool_calls] == [
        ("c0", "a", "000"),
        ("c1", "b", "1"),
    ]


@pytest.mark.parametrize(
    "whole",
    [
        Message(role=Role.ASSISTANT, parts=(Text("b"),)),
        Message(role=Role.ASSISTANT, parts=(Text("a"),), tool_calls=(ToolCall(id="c", name="n", arguments=""),)),
        Message(role=Role.ASSISTANT),
    ],
)
def test_pieces_that_are_not_the_whole_are_an_error(whole: Message) -> None:
    builder = MessageBuilder()
    builder.add(text("a"))
    with pytest.raises(ExactnessError):
        builder.expect(whole)


def test_calls_open_in_order() -> None:
    with pytest.raises(ExactnessError, match="tool call 1 opened after 0 calls"):
        MessageBuilder().add([MessageDelta(kind="call", text="a", call_index=1, call_id="c")])
