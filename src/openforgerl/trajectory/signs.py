"""What harnesses say about their conversations: the one table of headers and words, harness by harness.

Measured on the wire of the versions that are pinned in `harnesses/locks`. Words count only where the harness itself
puts them: at the very beginning of the system prompt, of the first user message, or of the last block of the last
user message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from openforgerl.conversation import parse_arguments
from openforgerl.types import Conversation, Message, Role, Text, ThreadRole


class AgentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A header whose presence announces a sub-agent, and the header that names which one."""

    harness: str
    announces: str
    names: str


SUBAGENT_HEADERS: tuple[AgentHeader, ...] = (
    AgentHeader(harness="codex", announces="x-codex-parent-thread-id", names="thread-id"),
    AgentHeader(harness="codex", announces="x-openai-subagent", names="thread-id"),
    AgentHeader(harness="claude-code", announces="x-claude-code-agent-id", names="x-claude-code-agent-id"),
    AgentHeader(harness="opencode", announces="x-parent-session-id", names="x-session-id"),
)


class ConversationHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A header that stays the same over the main agent's whole life, its compactions included (sub-agents are told
    apart first)."""

    harness: str
    header: str


CONVERSATION_HEADERS: tuple[ConversationHeader, ...] = (
    ConversationHeader(harness="codex", header="thread-id"),
    ConversationHeader(harness="opencode", header="x-session-id"),
    ConversationHeader(harness="claude-code", header="x-claude-code-session-id"),
    ConversationHeader(harness="openhands", header="x-litellm-session-id"),
)


class HeaderWords(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose `header` holds `words` has role `role`."""

    harness: str
    role: ThreadRole
    header: str
    words: str


HEADER_WORDS: tuple[HeaderWords, ...] = (
    HeaderWords(
        harness="codex",
        role=ThreadRole.COMPACTION,
        header="x-codex-turn-metadata",
        words='"request_kind":"compaction"',
    ),
)

Place = Literal["system", "first_user", "last_user"]


class OpeningWords(msgspec.Struct, frozen=True, kw_only=True):
    """A request in which what stands at `where` begins with `words` has role `role`."""

    harness: str
    role: ThreadRole
    where: Place
    words: str
    without_tools: bool = False
    """Counts only when the request offers no tools."""


OPENING_WORDS: tuple[OpeningWords, ...] = (
    OpeningWords(
        harness="pi",
        role=ThreadRole.COMPACTION,
        where="system",
        words="You are a context summarization assistant",
        without_tools=True,
    ),
    OpeningWords(
        harness="opencode",
        role=ThreadRole.COMPACTION,
        where="system",
        words="You are a context summarization agent",
        without_tools=True,
    ),
    OpeningWords(
        harness="qwen-code",
        role=ThreadRole.COMPACTION,
        where="system",
        words="You are the component that summarizes",
        without_tools=True,
    ),
    # First behind the conversation, with its tools; when that does not fit, as a system prompt.
    OpeningWords(
        harness="qwen-code",
        role=ThreadRole.COMPACTION,
        where="last_user",
        words="You are the component that summarizes",
    ),
    OpeningWords(
        harness="codex",
        role=ThreadRole.COMPACTION,
        where="last_user",
        words="You are performing a CONTEXT CHECKPOINT COMPACTION",
        without_tools=True,
    ),
    OpeningWords(
        harness="claude-code",
        role=ThreadRole.COMPACTION,
        where="last_user",
        words="CRITICAL: Respond with TEXT ONLY",
    ),
    OpeningWords(
        harness="opencode",
        role=ThreadRole.SIDE,
        where="system",
        words="You are a title generator",
        without_tools=True,
    ),
    OpeningWords(
        harness="gemini-cli",
        role=ThreadRole.SIDE,
        where="system",
        words="You are a specialized Task Routing AI",
        without_tools=True,
    ),
    # After an answer without a word: a last one, asked for without its system prompt and tools.
    OpeningWords(
        harness="openclaw",
        role=ThreadRole.SIDE,
        where="last_user",
        words="The previous assistant turn completed its tool calls but did not produce a user-visible answer",
        without_tools=True,
    ),
    OpeningWords(
        harness="qwen-code", role=ThreadRole.SIDE, where="system", words="You are a managed memory extraction"
    ),
    OpeningWords(
        harness="qwen-code", role=ThreadRole.SUBAGENT, where="system", words="You are a general-purpose subagent"
    ),
)


class Delegation(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that starts a sub-agent, and the argument that becomes part of the sub-agent's first user message.

    For harnesses whose headers say nothing: the conversation that carries what the policy itself sampled as the task
    of a sub-agent is that sub-agent's.
    """

    harness: str
    tool: str
    argument: str


DELEGATIONS: tuple[Delegation, ...] = (
    Delegation(harness="qwen-code", tool="agent", argument="prompt"),
    Delegation(harness="gemini-cli", tool="invoke_agent", argument="prompt"),
    Delegation(harness="openclaw", tool="sessions_spawn", argument="task"),
)


class Quotation(msgspec.Struct, frozen=True, kw_only=True):
    """After a failed call the harness asks anew, with a first user message that has `words` and quotes the old one."""

    harness: str
    words: str


QUOTATIONS: tuple[Quotation, ...] = (
    Quotation(harness="openclaw", words="[Queued user message from a previous active turn"),
)

PROBE_TOKENS = 1
"""A request for at most so many tokens, without tools, asks whether the model is there, nothing more."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers of a request say."""

    subagent: str | None = None
    """Id of the announced sub-agent."""
    conversation: str | None = None
    """Id of the conversation, where the harness sends one."""
    role: ThreadRole | None = None
    """Compaction or side request, where the harness says so."""
    evidence: str = ""
    """The header that announces the sub-agent or the role."""


def announcement(headers: Mapping[str, str]) -> Announcement:
    """Read the headers (names in any case)."""
    lower = {name.lower(): value for name, value in headers.items()}
    conversation = next((lower[sign.header] for sign in CONVERSATION_HEADERS if lower.get(sign.header)), None)
    said = next((sign for sign in HEADER_WORDS if sign.words in lower.get(sign.header, "")), None)
    role = None if said is None else said.role
    for header in SUBAGENT_HEADERS:
        if lower.get(header.announces):
            return Announcement(
                subagent=lower.get(header.names) or lower[header.announces],
                conversation=conversation,
                role=role,
                evidence=f"header {header.announces}",
            )
    return Announcement(
        conversation=conversation,
        role=role,
        evidence="" if said is None else f"header {said.header} holds {said.words}",
    )


def stated_role(conversation: Conversation, max_tokens: int | None) -> tuple[ThreadRole, str] | None:
    """The role that the request's own words or size state, with the evidence; or None."""
    if max_tokens is not None and max_tokens <= PROBE_TOKENS and not conversation.tools:
        return ThreadRole.SIDE, f"probe: max_tokens {max_tokens}, no tools"
    beginnings: dict[Place, str] = {
        "system": _system_beginning(conversation),
        "first_user": first_user(conversation),
        "last_user": _last_user_block(conversation),
    }
    for sign in OPENING_WORDS:
        if sign.without_tools and conversation.tools:
            continue
        if beginnings[sign.where].startswith(sign.words):
            return sign.role, f"{sign.where} begins {sign.words!r}"
    return None


def quotes(conversation: Conversation, earlier: Conversation) -> bool:
    """Does the first user message announce that it quotes an earlier one, and hold the one of `earlier`?"""
    text, quoted = first_user(conversation), _undated(first_user(earlier))
    return bool(quoted) and quoted in text and any(sign.words in text.partition("\n")[0] for sign in QUOTATIONS)


def _undated(text: str) -> str:
    """Without the time in brackets that OpenClaw puts before what a user says."""
    return text.partition("] ")[2] if text.startswith("[") else text


def delegated(answer: Message) -> Iterator[tuple[str, str]]:
    """Every task that an answer hands to a sub-agent, with the name of the tool."""
    for call in answer.tool_calls:
        sign = next((sign for sign in DELEGATIONS if sign.tool == call.name), None)
        arguments = parse_arguments(call.arguments) if sign is not None else None
        task = arguments.get(sign.argument) if sign is not None and isinstance(arguments, dict) else None
        if isinstance(task, str) and task.strip():
            yield task.strip(), call.name


_PLACES: Mapping[Place, str] = {
    "system": "system prompt begins",
    "first_user": "first user message begins",
    "last_user": "last block of the last user message begins",
}


def markdown() -> str:
    """The table as the documentation shows it: which harness is recognised by what."""
    rows: list[tuple[str, str, str]] = []
    for header in SUBAGENT_HEADERS:
        rows.append((header.harness, "subagent", f"header `{header.announces}`; which one: `{header.names}`"))
    for said in HEADER_WORDS:
        rows.append((said.harness, said.role.value, f"header `{said.header}` holds `{said.words}`"))
    for words in OPENING_WORDS:
        tools = "; no tools" if words.without_tools else ""
        rows.append((words.harness, words.role.value, f'{_PLACES[words.where]} "{words.words}"{tools}'))
    for given in DELEGATIONS:
        sign = f"first user message holds the `{given.argument}` that the policy gave to `{given.tool}`"
        rows.append((given.harness, "subagent", sign))
    for quoting in QUOTATIONS:
        sign = f'first user message holds "{quoting.words}" and the text of an earlier one; same system prompt, tools'
        rows.append((quoting.harness, "main", sign))
    for same in CONVERSATION_HEADERS:
        rows.append((same.harness, "main", f"header `{same.header}` as in the session's first conversation"))
    lines = ["| harness | role | sign |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {harness} | {role} | {sign} |" for harness, role, sign in sorted(rows)])


def _system_beginning(conversation: Conversation) -> str:
    first = conversation.messages[0] if conversation.messages else None
    return first.text.lstrip() if first is not None and first.role is Role.SYSTEM else ""


def first_user(conversation: Conversation) -> str:
    """Text of the first user message; empty when there is none."""
    first = next((message for message in conversation.messages if message.role is Role.USER), None)
    return "" if first is None else first.text.lstrip()


def _last_user_block(conversation: Conversation) -> str:
    # Claude Code may put system messages of its own behind the user's.
    last = next((message for message in reversed(conversation.messages) if message.role is not Role.SYSTEM), None)
    if last is None or last.role is not Role.USER:
        return ""
    texts = [part.text for part in last.parts if isinstance(part, Text)]
    return texts[-1].lstrip() if texts else ""
