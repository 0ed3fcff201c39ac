"""What kind of change made a conversation another one: every kind by an example, and its neighbours."""

from __future__ import annotations

import pytest

from openforgerl.trajectory import first_difference
from openforgerl.types import Conversation, Message, Role, Text, ToolSpec


def said(role: Role, text: str) -> Conversation:
    return Conversation(messages=(Message(role=role, parts=(Text(text),)),))


@pytest.mark.parametrize(
    ("before", "now", "cause"),
    [
        ("Today's date is 2026-11-30.", "Today's date is 2026-12-01.", "date_changed"),
        ("Now: 2026-11-30T23:59:58Z", "Now: 2026-12-01T00:00:03.25Z", "date_changed"),
        ("Monday, November 30, 2026 at 9:41 PM", "Tuesday, December 1, 2026 at 10:02 AM", "date_changed"),
        ("on 30 Nov 2026", "on 1 Dec 2026", "date_changed"),
        ("11/30/2026", "12/1/2026", "date_changed"),
        (
            "x-anthropic-billing-header: cc=2.1; cch=0f3a1;",
            "x-anthropic-billing-header: cc=2.1; cch=b771c;",
            "marker_changed",
        ),
        ("request 17 of session 4f1d-22", "request 18 of session 4f1d-22", "marker_changed"),
        ("2026-11-30, request 17", "2026-12-01, request 18", "marker_changed"),
        ("Be good.", "Be bad.", "system_prompt_changed"),
        ("Today is 2026-11-30. Be good.", "Today is 2026-12-01. Be bad.", "system_prompt_changed"),
        ("Monday", "Mondays", "system_prompt_changed"),
    ],
)
def test_what_changed_in_a_system_prompt(before: str, now: str, cause: str) -> None:
    found = first_difference(said(Role.SYSTEM, before), said(Role.SYSTEM, now))
    assert found is not None and found.cause == cause


def test_numbers_in_what_a_tool_printed_are_no_marker() -> None:
    found = first_difference(said(Role.TOOL, "12 files"), said(Role.TOOL, "13 files"))
    assert found is not None and found.cause == "observation_edited"


def test_a_conversation_that_goes_on_is_no_difference() -> None:
    start = said(Role.SYSTEM, "Be good.")
    longer = Conversation(messages=(*start.messages, *said(Role.USER, "go").messages))
    assert first_difference(start, longer) is None
    cut = first_difference(longer, start)
    assert cut is not None and (cut.cause, cut.where, cut.before, cut.now) == (
        "history_edited",
        "messages[1]",
        "go",
        "",
    )


def test_tools_come_first_and_are_named() -> None:
    bare = said(Role.SYSTEM, "Be good.")
    found = first_difference(bare, Conversation(messages=bare.messages, tools=(ToolSpec(name="read"),)))
    assert found is not None and (found.cause, found.where, found.before, found.now) == (
        "tools_changed",
        "tools",
        "",
        "read",
    )
