"""What recorded calls and an exit say about how a harness ended; shared by all harnesses."""

from __future__ import annotations

from collections.abc import Sequence

from openforgerl.conversation import parse_arguments
from openforgerl.types import CallStatus, Ending, Exit, FinishReason, ModelCall

LIMIT_WORDS: tuple[tuple[str, str], ...] = (
    ("context_length_exceeded", "context"),
    ("maximum context length", "context"),
    ("session_limit", "session budget"),
    ("session_closed", "session closed"),
    ("this session's limit of", "session budget"),
    ("this session is sealed", "session closed"),
    ("seconds are over", "session closed"),
)
"""Stable words of our own error answers (code, else message: several dialects carry no code, and Codex and Claude Code
report the message alone) → which limit they mean. The only place where a harness's output is searched: harnesses print
the provider's error, and a refused call need not be recorded. `tests/harnesses/test_evidence.py` holds the words to
the proxy's own."""


def observed_user_agents(calls: Sequence[ModelCall]) -> tuple[str, ...]:
    """Every distinct User-Agent among the calls, sorted; `""` stands for a call that sent none."""
    return tuple(sorted({_header(call, "user-agent") for call in calls}))


def complete_calls(calls: Sequence[ModelCall]) -> tuple[ModelCall, ...]:
    """The calls whose answer was fully delivered, in order."""
    return tuple(call for call in calls if call.status is CallStatus.COMPLETE)


def error_code(call: ModelCall) -> str | None:
    """The stable word of the error that a call was answered with, or None."""
    body = call.response
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str):
        return code
    return call.error.partition(":")[0].strip() if call.error else None


def limit_reached(exit: Exit, calls: Sequence[ModelCall], said: str | None = None) -> str | None:
    """Which limit of ours the harness ran into, by its last call or by the error it reported; None for none.

    `said` is the error as the harness reports it, where it does so in a field of its own; None: in standard error,
    of which only a failed exit's is searched. What a model says reaches standard output, and saying a limit's name
    must not end an attempt as limited.
    """
    if calls and calls[-1].status is not CallStatus.COMPLETE:
        code = error_code(calls[-1])
        for word, limit in LIMIT_WORDS:
            if code == word:
                return limit
    if exit.code == 0 and said is None:
        return None
    printed = exit.stderr[-4000:].decode(errors="replace") if said is None else said
    for word, limit in LIMIT_WORDS:
        if word in printed:
            return limit
    return None


def malformed_answer(call: ModelCall) -> str | None:
    """What is wrong with the tool calls of an answer (unparseable arguments, unknown tool), or None."""
    if call.answer is None:
        return None
    known = {(tool.namespace, tool.name) for tool in call.conversation.tools}
    for tool_call in call.answer.tool_calls:
        if (tool_call.namespace, tool_call.name) not in known:
            return f"call {call.call_id} asks for unknown tool {tool_call.name!r}"
        if not tool_call.freeform and not isinstance(parse_arguments(tool_call.arguments), dict):
            return f"call {call.call_id} has arguments that are no JSON object for tool {tool_call.name!r}"
    return None


def empty_answer(call: ModelCall) -> bool:
    """Whether an answer was delivered that has neither a word nor a call."""
    if call.status is not CallStatus.COMPLETE or call.answer is None:
        return False
    return not call.answer.tool_calls and not call.answer.text.strip()


def ending_before_exit_code(exit: Exit, calls: Sequence[ModelCall], said: str | None = None) -> Ending | None:
    """What is the same for every harness: time limit, killed from outside, never a call. None: ask the code.

    The time limit is nobody's crash: `by_policy` is False and the caller's `on_timeout` decides.
    """
    if exit.timed_out:
        return Ending(kind="limit", by_policy=False, evidence=f"time limit after {exit.seconds:.1f} s")
    if exit.signal is not None or exit.code is None:
        why = "by the memory limit" if exit.oom else "from outside"
        return Ending(kind="crashed", by_policy=False, evidence=f"killed {why} with signal {exit.signal}")
    limit = limit_reached(exit, calls, said)
    if limit == "session closed":
        # The session outlives the harness's own time limit, so somebody closed it: never a reward.
        return Ending(kind="crashed", by_policy=False, evidence="the session was closed while the harness ran")
    if not calls and limit is None:
        return Ending(
            kind="crashed", by_policy=False, evidence=f"exit {exit.code} without a model call: {said or tail(exit)}"
        )
    return None


def crashed_or_caused(exit: Exit, calls: Sequence[ModelCall], said: str | None = None) -> Ending:
    """A failed run: caused by the model if its last delivered answer shows why, else the harness's crash."""
    limit = limit_reached(exit, calls, said)
    if limit is not None:
        return Ending(kind="limit", by_policy=True, evidence=f"{limit}: {said or tail(exit)}")
    last = calls[-1] if calls else None
    if last is not None and last.status is CallStatus.COMPLETE:
        if last.finish_reason is FinishReason.LENGTH:
            return Ending(kind="limit", by_policy=True, evidence=f"exit {exit.code} after an answer cut at its length")
        malformed = malformed_answer(last)
        if malformed is not None:
            return Ending(kind="crashed", by_policy=True, evidence=f"exit {exit.code} after {malformed}")
    seen = f"last call {last.status}, error {last.error!r}; " if last is not None else ""
    return Ending(kind="crashed", by_policy=False, evidence=f"exit {exit.code}; {seen}{said or tail(exit)}")


def ending_of(
    exit: Exit, calls: Sequence[ModelCall], *, words: str, error: str | None = None, failed: bool = False
) -> Ending:
    """The ending of a harness that says on standard output what the model's last word was and what went wrong.

    `words` is the last word, empty for none; `error` the harness's own report of an error, None where it makes none
    but on standard error; `failed` says that the run failed whatever its exit code.
    """
    early = ending_before_exit_code(exit, calls, error)
    if early is not None:
        return early
    if exit.code != 0 or failed:
        return crashed_or_caused(exit, calls, error)
    if not complete_calls(calls):
        return Ending(kind="crashed", by_policy=False, evidence=f"exit 0 without a complete call: {tail(exit)}")
    if words.strip():
        return Ending(kind="finished", by_policy=True, evidence="exit 0")
    limit = limit_reached(exit, calls, error)
    if limit is not None:
        return Ending(kind="limit", by_policy=True, evidence=f"{limit}: exit 0, nothing said")
    if calls[-1].finish_reason is FinishReason.LENGTH:
        return Ending(kind="limit", by_policy=True, evidence="answer length: exit 0, nothing said")
    return Ending(kind="gave_up", by_policy=True, evidence="exit 0, nothing said: no last word")


def tail(exit: Exit, limit: int = 500) -> str:
    """The end of what the program printed, for evidence."""
    text = exit.stderr if exit.stderr.strip() else exit.stdout
    return text[-limit:].decode(errors="replace").strip() or "(no output)"


def _header(call: ModelCall, name: str) -> str:
    for key, value in call.request_headers.items():
        if key.lower() == name:
            return value
    return ""
