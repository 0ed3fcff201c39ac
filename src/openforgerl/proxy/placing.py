"""A request's place in its session: volatile lines removed, thoughts restored where that is wished, attributed."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import msgspec

from openforgerl.proxy.options import ProxyOptions
from openforgerl.proxy.sessions import LiveSession
from openforgerl.trajectory.breaks import BROKEN
from openforgerl.trajectory.threads import Attribution, attribute, with_thoughts
from openforgerl.types import Conversation, Message, ModelCall, Part, Role, Text
from openforgerl.wire import Request

logger = logging.getLogger(__name__)

THOUGHTS_RESTORED = "thoughts restored that the harness had dropped"
"""Warning of a call whose conversation is not as it came, under `reasoning = "restore"`."""
_SCRUBBED = (Role.SYSTEM, Role.USER)


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request belongs, and what is rendered for it. The request as it came is in the record too."""

    conversation: Conversation
    found: Attribution
    warnings: tuple[str, ...]
    """What of the conversation is not as it came."""


def place(session: LiveSession, request: Request, headers: Mapping[str, str], options: ProxyOptions) -> Placed:
    """Scrub, restore and attribute a request. Changes nothing."""
    conversation, warnings = scrubbed(request.conversation, options.scrub)
    conversation = session.recognised(conversation)
    known = session.known
    if options.reasoning == "restore":
        restored = with_thoughts(known, conversation, headers=headers, histories=session.histories)
        warnings += (THOUGHTS_RESTORED,) if restored is not conversation else ()
        conversation = restored
    found = attribute(
        known,
        conversation,
        headers=headers,
        opening=not known,
        max_tokens=request.max_tokens,
        histories=session.histories,
    )
    return Placed(conversation=conversation, found=found, warnings=warnings)


def scrubbed(conversation: Conversation, patterns: tuple[str, ...]) -> tuple[Conversation, tuple[str, ...]]:
    """The conversation without the lines of system and user messages that a pattern fits, and a warning for each
    pattern that did. A text of which nothing is left goes with its lines."""
    if not patterns:
        return conversation, ()
    used: dict[str, None] = {}
    messages = tuple(
        _without_lines(message, patterns, used) if message.role in _SCRUBBED else message
        for message in conversation.messages
    )
    if not used:
        return conversation, ()
    return msgspec.structs.replace(conversation, messages=messages), tuple(f"scrubbed: {name}" for name in used)


def _without_lines(message: Message, patterns: tuple[str, ...], used: dict[str, None]) -> Message:
    parts: list[Part] = []
    for part in message.parts:
        if not isinstance(part, Text):
            parts.append(part)
            continue
        kept: list[str] = []
        for line in part.text.splitlines(keepends=True):
            fitting = next((pattern for pattern in patterns if re.search(pattern, line.rstrip("\r\n"))), None)
            if fitting is None:
                kept.append(line)
            else:
                used[fitting] = None
        text = "".join(kept)
        if text or not part.text:
            parts.append(part if text == part.text else Text(text))
    return msgspec.structs.replace(message, parts=tuple(parts))


class Notices:
    """Says of every harness once what makes its rows more than they need be; further times go to the debug log."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def noticed(self, session: LiveSession, call: ModelCall) -> ModelCall:
        """`call`, with a warning if its prompt does not go on where its conversation left off."""
        found = session.breaks.arrived(call, session.by_id)
        if found is None:
            return call
        harness = session.record.metadata.get("harness") or call.request_headers.get("user-agent", "")
        level = logging.DEBUG if (found.cause, harness) in self._said else logging.WARNING
        self._said.add((found.cause, harness))
        logger.log(
            level,
            "%s (session %s): a prefix broke at %s, %s: %r became %r; only %d of %d prompt tokens are shared with the "
            "call before. Said once for each cause; `openforgerl audit` and docs/exports.md say what to do",
            harness or "a harness",
            call.session_id,
            found.where,
            found.cause,
            found.before,
            found.now,
            found.common,
            len(call.prompt.ids),
        )
        return msgspec.structs.replace(call, warnings=(*call.warnings, BROKEN + found.cause))
