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
        fact=fact,
    )


LOST = Expected(dropped=frozenset({"error"}))
"""The engine broke off: its tokens were never delivered whole, and no later prompt holds them."""
DEFAULTS: Mapping[str, Expected] = MappingProxyType(
    {
        "cut": LOST,
        "sub-agent": Expected(threads={"main": 1, "subagent": 1}),
        "compaction": Expected(threads={"compaction": 1, "main": 1}),
        "overflow": Expected(
            ended="limit", fact="Ends with an error; the attempt is graded as left, and counted as a limit."
        ),
    }
)

SILENT = Expected(ended="gave_up", fact="Takes an answer without a word as the end of the run.")
FACTS: Mapping[tuple[str, str], Expected] = MappingProxyType(
    {
        **{(harness, "empty"): SILENT for harness in ("pi", "codex", "opencode", "openclaw")},
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
        ("qwen-code", "cut"): Expected(
            masked=frozenset({"error"}),
            fact="Keeps the broken answer, asks for the rest, then merges both into one turn: a branch starts there.",
        ),
        ("openclaw", "malformed"): Expected(
            ended="crashed_by_policy",
            passed=False,
            fact="Ends the run with exit 1; the attempt is graded as left, since the policy caused it.",
        ),
    }
)


def expected(harness: str, row: str) -> Expected:
    """The harness's own entry, else the row's, else a finished task in one thread with every token trained."""
    return FACTS.get((harness, row)) or DEFAULTS.get(row) or Expected()
