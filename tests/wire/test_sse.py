"""Server-sent events: whatever is framed is read back, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforgerl.wire import SseEvent, SseReader, comment, encode_event

NAMES = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), min_size=1, max_size=8)
EVENTS = st.lists(st.tuples(st.text(max_size=40), NAMES), max_size=6)


@given(EVENTS, st.data())
def test_any_events_survive_any_cuts(events: list[tuple[str, str | None]], data: st.DataObject) -> None:
    sent = b"".join(comment("x") + encode_event(text.encode(), name) for text, name in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    reader = SseReader()
    got = [
        event
        for start, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True)
        for event in reader.feed(sent[start:stop])
    ]
    # Line ends inside data are all the same to the format.
    plain = [(text.replace("\r\n", "\n").replace("\r", "\n"), name) for text, name in events]
    assert got == [SseEvent(text, name) for text, name in plain]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_and_every_odd_line(end: bytes) -> None:
    lines = [
        b"\xef\xbb\xbfdata: a",
        b"id: 7",
        b"data:b",
        b": note",
        b"data",
        b"retry: 9",
        b"",
        b"event: x",
        b"",
        b"data: c",
    ]
    stream = end.join(lines) + end + end + b"data: last"
    reader = SseReader()
    events = [event for byte in stream for event in reader.feed(bytes([byte]))]
    # A lone CR at the end is decided by what follows; "data: last" is never ended.
    assert events == [SseEvent("a\nb\n"), SseEvent("c")]


def test_an_endless_line_is_refused() -> None:
    reader = SseReader(max_event_bytes=100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        for _ in range(20):
            reader.feed(b"data: xxxxx")


def test_endless_data_lines_are_refused() -> None:
    reader = SseReader(max_event_bytes=100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        for _ in range(20):
            reader.feed(b"data: xxxxx\n")
