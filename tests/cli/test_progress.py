"""What progress prints may quote a hostile agent: neither markup nor control characters of it count."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from openforgerl.cli.progress import BarProgress, LineProgress, plain

HOSTILE = "a0: harness failure: [/red] \x1b[2J[bold]x"
SHOWN = "a0: harness failure: [/red] ␛[2J[bold]x"


def test_bars_say_hostile_text_as_it_is() -> None:
    stream = io.StringIO()
    BarProgress(Progress(console=Console(file=stream, width=200))).say(HOSTILE)
    assert SHOWN in stream.getvalue()


def test_lines_say_hostile_text_as_it_is() -> None:
    stream = io.StringIO()
    LineProgress(stream).say(HOSTILE)
    assert stream.getvalue() == SHOWN + "\n"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a\tb\nc\u00a0d é 한", "a\tb\nc\u00a0d é 한"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("a\rb\x00\x7f", "a␍b␀␡"),
        ("\x9b2J \u202e \ud800", "?2J ? ?"),
    ],
)
def test_only_newlines_and_tabs_of_all_controls_stay(given: str, shown: str) -> None:
    assert plain(given) == shown
