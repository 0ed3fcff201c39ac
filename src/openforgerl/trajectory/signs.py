"""What harnesses say about their conversations: the one table of headers and opening words.

Measured on the wire of codex 0.171, claude-code 2.1, opencode 1.18, pi 1.6, qwen-code 0.24, gemini-cli 0.61. Words
count only where the harness itself puts them: at the very beginning of the system prompt, or of the last block
of the last user message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from openforgerl.types import Conversation, Role, Text, ThreadRole


class AgentHeader(msgspec.Struct, frozen=True):
    """A header whose presence announces a sub-agent, and the header that names which one."""

    announces: str
    names: str


SUBAGENT_HEADERS: tuple[AgentHeader, ...] = (
    AgentHeader("x-codex-parent-thread-id", "thread-id"),
    AgentHeader("x-openai-subagent", "thread-id"),
    AgentHeader("x-claude-code-agent-id", "x-claude-code-agent-id"),
    AgentHeader("x-parent-session-id", "x-session-id"),
)

CONVERSATION_HEADERS: tuple[str, ...] = (
    "thread-id",
    "x-session-id",
    "x-claude-code-session-id",
    "x-litellm-session-id",
)
"""Headers that stay the same over the main agent's whole life, its compactions included (sub-agents are told apart
first)."""


class OpeningWords(msgspec.Struct, frozen=True):
    """A conversation whose system prompt, or last user block, begins with `words` has role `role`."""

    role: ThreadRole
    where: Literal["system", "last_user"]
    words: str
    without_tools: bool
    """Counts only when the request offers no tools."""


OPENING_WORDS: tuple[OpeningWords, ...] = (
    OpeningWords(ThreadRole.COMPACTION, "system", "You are a context summarization assistant", True),  # pi
    OpeningWords(ThreadRole.COMPACTION, "system", "You are a context summarization agent", True),  # opencode
    OpeningWords(ThreadRole.COMPACTION, "system", "You are the component that summarizes", True),  # qwen-code
    OpeningWords(
        ThreadRole.COMPACTION, "last_user", "You are performing a CONTEXT CHECKPOINT COMPACTION", True
    ),  # codex
    OpeningWords(ThreadRole.COMPACTION, "last_user", "CRITICAL: Respond with TEXT ONLY", False),  # claude-code
    OpeningWords(ThreadRole.SIDE, "system", "You are a title generator", True),  # opencode
    OpeningWords(ThreadRole.SIDE, "system", "You are a specialized Task Routing AI", True),  # gemini-cli
    OpeningWords(ThreadRole.SIDE, "system", "You are a managed memory extraction", False),  # qwen-code
)

PROBE_TOKENS = 1
"""A request for at most so many tokens, without tools, asks whether the model is there, nothing more."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers of a request say."""

    subagent: str | None = None
    """Id of the announced sub-agent."""
    conversation: str | None = None
    """Id of the conversation, where the harness sends one."""
    evidence: str = ""


def announcement(headers: Mapping[str, str]) -> Announcement:
    """Read the headers (names in any case)."""
    lower = {name.lower(): value for name, value in headers.items()}
    conversation = next((lower[name] for name in CONVERSATION_HEADERS if lower.get(name)), None)
    for header in SUBAGENT_HEADERS:
        if lower.get(header.announces):
            return Announcement(
                subagent=lower.get(header.names) or lower[header.announces],
                conversation=conversation,
                evidence=f"header {header.announces}",
            )
    return Announcement(conversation=conversation)


def stated_role(conversation: Conversation, max_tokens: int | None) -> tuple[ThreadRole, str] | None:
    """Compaction or side role that the request's own words or size state, with the evidence; or None."""
    if max_tokens is not None and max_tokens <= PROBE_TOKENS and not conversation.tools:
        return ThreadRole.SIDE, f"probe: max_tokens {max_tokens}, no tools"
    beginnings = {"system": _system_beginning(conversation), "last_user": _last_user_block(conversation)}
    for sign in OPENING_WORDS:
        if sign.without_tools and conversation.tools:
            continue
        if beginnings[sign.where].startswith(sign.words):
            return sign.role, f"{sign.where} begins {sign.words!r}"
    return None


def _system_beginning(conversation: Conversation) -> str:
    first = conversation.messages[0] if conversation.messages else None
    return first.text.lstrip() if first is not None and first.role is Role.SYSTEM else ""


def _last_user_block(conversation: Conversation) -> str:
    last = conversation.messages[-1] if conversation.messages else None
    if last is None or last.role is not Role.USER:
        return ""
    texts = [part.text for part in last.parts if isinstance(part, Text)]
    return texts[-1].lstrip() if texts else ""
