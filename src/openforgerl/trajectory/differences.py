"""Where two conversations that should be the same first differ, and what kind of change that is."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from openforgerl.conversation import digest_outline, same_message, same_tools
from openforgerl.types import Conversation, Message, Role, Text, ToolSpec

Cause = Literal[
    "tools_changed",
    "date_changed",
    "marker_changed",
    "blocks_changed",
    "system_prompt_changed",
    "reasoning_dropped",
    "arguments_changed",
    "unicode_normalised",
    "spaces_trimmed",
    "answer_edited",
    "observation_edited",
    "compacted",
    "history_edited",
    "thought_stripped_by_template",
    "turn_not_restored",
    "template",
    "sampling_changed",
]
"""What broke a prefix: what the harness did, and then the three that the chat template did. The last breaks none: in
a replay the harness asked for another sampling."""

_AROUND = 16
_SHOWN = 48

_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm])?"
_DATES = re.compile(
    rf"\b(?:\d{{4}}[-/]\d{{1,2}}[-/]\d{{1,2}}(?:[T ]{_CLOCK})?(?:Z|[+-]\d{{2}}:?\d{{2}})?"
    rf"|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}|{_CLOCK}|{_DAY}"
    rf"|(?:\d{{1,2}}\s)?{_MONTH}(?:\s\d{{1,2}}(?:st|nd|rd|th)?)?(?:,?\s\d{{4}})?)\b"
)
"""Dates and times of day as harnesses write them into prompts."""
_MARKERS = re.compile(r"[0-9A-Za-z_-]*\d[0-9A-Za-z_-]*")
"""Counters, nonces, hashes, cache markers: words with a digit in them."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that is not as it was."""

    cause: Cause
    where: str
    """`tools`, `messages[3]`, or `id 512` of the prompt."""
    before: str = ""
    """What stood there, around the first difference."""
    now: str = ""


def first_difference(
    expected: Conversation, now: Conversation, *, summaries: Collection[str] = ()
) -> Difference | None:
    """Where `now` does not begin with `expected`, by canonical equality; None when it does.

    `summaries`: answers of compactions, to know a history that goes on from one.
    """
    if not same_tools(expected.tools, now.tools):
        was, new = _tool_difference(expected.tools, now.tools)
        return Difference(cause="tools_changed", where="tools", before=was, now=new)
    theirs, ours = expected.messages, now.messages
    at = 0
    while at < min(len(theirs), len(ours)) and same_message(theirs[at], ours[at]):
        at += 1
    if at == len(theirs):
        return None
    where = f"messages[{at}]"
    if at == len(ours):
        return Difference(cause="history_edited", where=where, before=_shown(theirs[at].text))
    left, right = theirs[at], ours[at]
    cause: Cause = "compacted" if _summarised(ours[at:], summaries) else _message_cause(left, right)
    if cause == "reasoning_dropped":
        was, new = _text_difference(left.reasoning, right.reasoning)
    elif cause == "arguments_changed":
        was, new = _text_difference(*(" ".join(call.arguments for call in side.tool_calls) for side in (left, right)))
    else:
        was, new = _text_difference(left.text, right.text)
    return Difference(cause=cause, where=where, before=was, now=new)


def _message_cause(left: Message, right: Message) -> Cause:
    if left.role is not right.role:
        return "history_edited"
    if left.role is Role.ASSISTANT:
        return _answer_cause(left, right)
    if left.text == right.text:
        # A cache marker splits a text in two blocks, and moves on with the next request.
        return "blocks_changed" if _blocks(left) != _blocks(right) else "observation_edited"
    if _DATES.sub("", left.text) == _DATES.sub("", right.text):
        return "date_changed"
    if left.role is Role.TOOL:
        return "observation_edited"
    if _MARKERS.sub("", left.text) == _MARKERS.sub("", right.text):
        return "marker_changed"
    return "system_prompt_changed" if left.role is Role.SYSTEM else "observation_edited"


def _answer_cause(left: Message, right: Message) -> Cause:
    if digest_outline(left) == digest_outline(right):
        return "reasoning_dropped"
    if left.text == right.text:
        return "arguments_changed"
    if unicodedata.normalize("NFC", left.text) == unicodedata.normalize("NFC", right.text):
        return "unicode_normalised"
    if left.text.strip() == right.text.strip():
        return "spaces_trimmed"
    return "answer_edited"


def _blocks(message: Message) -> list[str]:
    return [part.text for part in message.parts if isinstance(part, Text)]


def _summarised(messages: Sequence[Message], summaries: Collection[str]) -> bool:
    """Whether these messages hold one of the summaries."""
    wanted = [summary.strip() for summary in summaries]
    return any(summary and summary in message.text for summary in wanted for message in messages)


def _tool_difference(left: Sequence[ToolSpec], right: Sequence[ToolSpec]) -> tuple[str, str]:
    """Names only on one side; of a tool that is on both but differs, or of another order, the names as listed."""
    names = [tool.name for tool in left], [tool.name for tool in right]
    gone = [name for name in names[0] if name not in names[1]]
    new = [name for name in names[1] if name not in names[0]]
    if not gone and not new:
        ours = {tool.name: tool for tool in right}
        gone = new = [tool.name for tool in left if not same_tools((tool,), (ours[tool.name],))]
    if not gone and not new:
        gone, new = names
    return _shown(", ".join(gone)), _shown(", ".join(new))


def _text_difference(left: str, right: str) -> tuple[str, str]:
    """Both texts around their first difference."""
    at = 0
    while at < min(len(left), len(right)) and left[at] == right[at]:
        at += 1
    start = max(0, at - _AROUND)
    return _shown(left[start:]), _shown(right[start:])


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
