"""What is expected of each harness in each row; where a harness itself can't go on, the fact in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .attempts import Ran


@dataclass(frozen=True)
class Expected:
    """The end of an attempt and where its tokens went."""

    ended: str = "finished"
    passed: bool | None = True
    threads: Mapping[str, int] = field(default_factory=lambda: {"main": 1})
    """Role → number of threads."""
    masked: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    """Reasons for which sampled tokens do not train."""
    pictures: int = 0
    """How many pictures the longest prompt holds."""
    fact: str = ""
    """What the harness does, where it is not what the row hopes for; part of the published matrix."""


def seen(ran: Ran, fact: str) -> Expected:
    """What an attempt came to, to be compared."""
    return Expected(
        ended=ran.ended,
        passed=ran.passed,
        threads=ran.threads,
        masked=frozenset(ran.totals.masked),
        dropped=frozenset(ran.totals.dropped),
        pictures=ran.pictures,
        fact=fact,
    )


LOST = Expected(dropped=frozenset({"error"}))
"""The engine broke off: its tokens were never delivered whole, and no later prompt holds them."""
LEFT = Expected(dropped=frozenset({"aborted"}))
"""The client was gone: the same."""
DEFAULTS: Mapping[str, Expected] = MappingProxyType(
    {
        "cut": LOST,
        "drop": LEFT,
        "image": Expected(pictures=1),
        "sub-agent": Expected(threads={"main": 1, "subagent": 1}),
        "compaction": Expected(threads={"compaction": 1, "main": 1}),
        "overflow": Expected(
            ended="limit", fact="Ends with an error; the attempt is graded as left, and counted as a limit."
        ),
    }
)

SILENT = Expected(ended="gave_up", fact="Takes an answer without a word as the end of the run.")
MERGED = "Keeps the broken answer, asks for the rest, then merges both into one turn: a branch starts there."
GROWS = "Makes no summary while it works on one instruction: the conversation grows until it is full."
FACTS: Mapping[tuple[str, str], Expected] = MappingProxyType(
    {
        **{(harness, "empty"): SILENT for harness in ("pi", "codex", "opencode", "gemini-cli")},
        # First the question that began the turn, then, since the long output stayed, the turn itself.
        ("pi", "compaction"): Expected(threads={"compaction": 2, "main": 1}),
        ("pi", "length"): Expected(ended="limit", fact="Takes the cut answer as its last word; counted as a limit."),
        ("codex", "length"): Expected(
            ended="limit", fact="Ends the run after a cut answer, without another request; counted as a limit."
        ),
        # It asks twice.
        ("claude-code", "compaction"): Expected(threads={"compaction": 2, "main": 1}),
        # It asks with and without the reminders of its own that it puts behind the question.
        ("claude-code", "overflow"): Expected(
            ended="limit",
            threads={"compaction": 2, "main": 1},
            fact="Asks for a summary, which one long output leaves no room for either; then ends, counted as a limit.",
        ),
        # It asks for a summary, goes on with that, and exits 1 all the same.
        ("opencode", "overflow"): Expected(threads={"compaction": 1, "main": 1}),
        # It asks behind the conversation, which does not fit either, then with a prompt of its own.
        ("qwen-code", "overflow"): Expected(threads={"compaction": 2, "main": 1}),
        # It asks the same again.
        ("qwen-code", "empty"): Expected(dropped=frozenset({"retry"})),
        ("qwen-code", "cut"): Expected(masked=frozenset({"error"}), fact=MERGED),
        ("gemini-cli", "compaction"): Expected(fact=GROWS),
        ("openclaw", "compaction"): Expected(fact=GROWS),
        # The client went away of its own accord: what it keeps of the answer is the policy's, and trains.
        ("qwen-code", "drop"): Expected(fact=MERGED),
        ("gemini-cli", "drop"): Expected(
            ended="harness failure: crash",
            passed=None,
            dropped=frozenset({"aborted"}),
            fact="Ends at once with exit 1; the attempt is discarded and made again.",
        ),
        # The script's next answer, a call, is mere text to it there: so it asks twice.
        ("openclaw", "empty"): Expected(
            threads={"main": 1, "side": 2},
            masked=frozenset({"role:side"}),
            fact="Asks for a last word without its system prompt and tools: not the task's conversation.",
        ),
        ("openclaw", "malformed"): Expected(
            dropped=frozenset({"retry"}),
            fact="Throws the answer away and asks the same again, without a word of what was wrong.",
        ),
    }
)


def expected(harness: str, row: str) -> Expected:
    """The harness's own entry, else the row's, else a finished task in one thread with every token trained."""
    return FACTS.get((harness, row)) or DEFAULTS.get(row) or Expected()
