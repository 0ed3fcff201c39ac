"""What is tried on every harness: a row is what the model says, and under which circumstances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .speech import SPEECH, Json, Speech

COPY = "cp a.txt b.txt"
PICTURE = "/workspace/red.png"
CHILD = "Copy a.txt to b.txt for me, child."
"""What a sub-agent is told: its conversation is known by these words."""
SUMMARY = "The user wants a.txt copied to b.txt; nothing is copied yet, go on with that."
SUMMARISER = (
    "CONTEXT CHECKPOINT COMPACTION|CRITICAL: Respond with TEXT ONLY|<conversation>|# Instructions\nThe messages above|"
    "Create a structured|Update the anchored|anchored summary|summar(y|ize) of (the|our) conversation|"
    "context summarization|You are the component that summarizes|<state_snapshot>"
)
"""Words of the requests that ask for a summary."""
AWAIT = "until test -s b.txt; do sleep 0.2; done; sleep 8"
FILLER = "seq -s ' ' 1 6000 | fold -w 200"
"""A command with a long output: 28,893 characters, and 144 line ends."""


COMPACTING: Mapping[str, int] = MappingProxyType(
    {
        "pi": 12_000,
        "codex": 34_000,
        "claude-code": 70_000,
        "opencode": 40_000,
        "qwen-code": 90_000,
        "gemini-cli": 50_000,
        "openclaw": 24_000,
    }
)
"""Harnesses that summarise their own history → a context that one long output fills, in the tiny model's tokens."""


@dataclass(frozen=True)
class Row:
    """One scenario."""

    name: str
    about: str
    says: Callable[[Speech], list[Json]]
    """The script's answers, in order of preference."""
    told: Mapping[str, int] = field(default_factory=dict)
    """Harness → the context length that it is told, in the tiny model's tokens; others are told a long one."""
    room: int | None = None
    """Tokens that the engine's context leaves after the first prompt; None: it is never full."""
    pictures: bool = False
    """Whether the model is one that can see, and a picture lies beside the task's file."""
    drops: bool = False
    """Whether the connection closes where the script cuts an answer, instead of an error that says so."""
    only: tuple[str, ...] = ()
    """The harnesses that have what the row is about; empty = all."""


def multi_call(say: Speech) -> list[Json]:
    return [
        {"text": "I copy it.", "tool_calls": [say.run(COPY)]},
        {"tool_calls": [say.run("cat b.txt")]},
        say.end(),
    ]


def parallel(say: Speech) -> list[Json]:
    return [{"tool_calls": [say.run(COPY), say.run("cat a.txt"), say.run("echo three")]}, say.end()]


def malformed(say: Speech) -> list[Json]:
    return [say.broken(), *multi_call(say)]


def cut(say: Speech) -> list[Json]:
    return [{"text": "I am about to say something that nobody will hear.", "cut_after_tokens": 6}, *multi_call(say)]


def image(say: Speech) -> list[Json]:
    return [{"tool_calls": [say.look_at(PICTURE)]}, *multi_call(say)]


def unknown_tool(say: Speech) -> list[Json]:
    return [{"tool_calls": [{"name": "no_such_tool", "arguments": {"x": 1}}]}, *multi_call(say)]


def overloaded(say: Speech) -> list[Json]:
    return [{"error": {"status": 429, "retry_after": 1}}, *multi_call(say)]


def engine_error(say: Speech) -> list[Json]:
    return [{"error": {"status": 500}}, *multi_call(say)]


def overflow(say: Speech) -> list[Json]:
    return [
        {"match": SUMMARISER, "times": 0, "text": SUMMARY},
        {"tool_calls": [say.run(f"{COPY}; {FILLER}")]},
        *[say.end() for _ in range(3)],
    ]


def silent(say: Speech) -> list[Json]:
    first, *rest = multi_call(say)
    return [{**first, "delay_s": 65, "chunk_tokens": 10_000}, *rest]


def subagent(say: Speech) -> list[Json]:
    if say.waits:
        work = [{"tool_calls": [say.hand_over(CHILD)]}, {"tool_calls": [say.run(COPY)]}]
    else:
        # The parent goes on at once: its next request and the child's first are told apart by their words.
        work = [
            {"match": CHILD, "tool_calls": [say.run(COPY)]},
            {"tool_calls": [say.hand_over(CHILD)]},
            {"match": "agent_id", "tool_calls": [say.run(AWAIT)]},
        ]
    return [*work, say.hand_back("It is copied."), say.end(), say.end()]


def compaction(say: Speech) -> list[Json]:
    return [
        {"match": SUMMARISER, "times": 0, "text": SUMMARY},
        {"tool_calls": [say.run(FILLER)]},
        {"tool_calls": [say.run(COPY)]},
        {"tool_calls": [say.run("cat b.txt")]},
        say.end(),
    ]


def length_cut(say: Speech) -> list[Json]:
    first, *rest = multi_call(say)
    return [first, {"text": "It is half", "finish_reason": "length"}, *rest]


def empty(say: Speech) -> list[Json]:
    first, *rest = multi_call(say)
    return [first, {"text": ""}, *rest]


CORE = ("multi-call", "parallel", "malformed", "cut")
ROWS: Mapping[str, Row] = MappingProxyType(
    {
        row.name: row
        for row in (
            Row("multi-call", "three calls, one after another", multi_call),
            Row("parallel", "three tool calls in one answer", parallel),
            Row("malformed", "a tool call whose arguments are no JSON", malformed),
            Row("cut", "a model that fails in the middle of an answer", cut),
            Row("drop", "a connection that closes in the middle of an answer", cut, drops=True),
            Row(
                "image",
                "a picture that the agent looks at",
                image,
                pictures=True,
                only=tuple(name for name, say in SPEECH.items() if say.look),
            ),
            Row("unknown-tool", "a call of a tool that there is not", unknown_tool),
            Row("429", "429 with Retry-After, then an answer", overloaded),
            Row("500", "500, then an answer", engine_error),
            Row("overflow", "the conversation outgrows the model's context", overflow, room=9_000),
            Row("silent-minute", "the first answer begins after 65 s", silent),
            Row(
                "sub-agent",
                "a sub-agent does the work",
                subagent,
                only=tuple(name for name, say in SPEECH.items() if say.delegate),
            ),
            Row(
                "compaction",
                "the harness summarises its own history",
                compaction,
                told=COMPACTING,
                only=tuple(COMPACTING),
            ),
            Row("length", "an answer cut at its length", length_cut),
            Row("empty", "an answer without a word or a call", empty),
        )
    }
)
