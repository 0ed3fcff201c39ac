"""What the exits of codex, claude-code, opencode, qwen-code and gemini-cli mean, by what each of them prints.

The shapes are those that the real programs printed to the real proxy (`test_npm_agents.py`), cut to what counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from openforgerl.harnesses.claude_code import ClaudeCodeHarness
from openforgerl.harnesses.codex import CodexHarness
from openforgerl.harnesses.gemini_cli import GeminiCliHarness
from openforgerl.harnesses.opencode import OpencodeHarness
from openforgerl.harnesses.qwen_code import QwenCodeHarness
from openforgerl.protocols import Harness
from openforgerl.types import CallStatus, Exit, FinishReason, ModelCall

MakeCall = Callable[..., ModelCall]
BUDGET = "this session's limit of 1 model calls is used up"


def lines(*events: Any) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def codex(words: str | None, error: str | None) -> bytes:
    start = [
        {"type": "thread.started"},
        {"type": "item.completed", "item": {"type": "error", "message": "no metadata"}},
    ]
    said = [] if words is None else [{"type": "item.completed", "item": {"type": "agent_message", "text": words}}]
    end = {"type": "turn.failed", "error": {"message": error}} if error else {"type": "turn.completed"}
    return lines(*start, *said, end)


def claude(words: str | None, error: str | None) -> bytes:
    return lines({"type": "result", "is_error": error is not None, "result": error or words or ""})


def opencode(words: str | None, error: str | None) -> bytes:
    said = [] if words is None else [{"type": "text", "part": {"type": "text", "text": words}}]
    failed = [{"type": "error", "error": {"name": "APIError", "data": {"message": error}}}] if error else []
    return lines({"type": "step_start"}, *said, {"type": "step_finish"}, *failed)


def qwen(words: str | None, error: str | None) -> bytes:
    result: dict[str, Any] = {"type": "result", "is_error": error is not None}
    result |= {"error": {"message": error}} if error else {"result": words or ""}
    return lines({"type": "assistant", "message": {}}, result)


def gemini(words: str | None, error: str | None) -> bytes:
    body = {"error": {"type": "Error", "message": error, "code": 1}} if error else {"response": words or ""}
    return b"a line of its own\n" + json.dumps({"session_id": "x", **body}, indent=2).encode()


ALL: list[tuple[Harness, Callable[[str | None, str | None], bytes]]] = [
    (CodexHarness(), codex),
    (ClaudeCodeHarness(), claude),
    (OpencodeHarness(), opencode),
    (QwenCodeHarness(), qwen),
    (GeminiCliHarness(), gemini),
]


@pytest.mark.parametrize(("harness", "printed"), ALL, ids=[harness.name for harness, _ in ALL])
class TestEveryHarness:
    def verdict(self, harness: Harness, code: int | None, stdout: bytes, *calls: ModelCall) -> tuple[str, bool]:
        signal = 9 if code is None else None
        ending = harness.ending(Exit(code=code, signal=signal, stdout=stdout), calls)
        assert ending.evidence
        return ending.kind, ending.by_policy

    def test_a_last_word(self, harness: Harness, printed: Any, make_call: MakeCall) -> None:
        assert self.verdict(harness, 0, printed("Done.", None), make_call()) == ("finished", True)

    def test_no_last_word(self, harness: Harness, printed: Any, make_call: MakeCall) -> None:
        assert self.verdict(harness, 0, printed("", None), make_call(text="")) == ("gave_up", True)
        cut = make_call(text="", finish_reason=FinishReason.LENGTH)
        assert self.verdict(harness, 0, printed("", None), cut) == ("limit", True)

    def test_the_session_is_used_up(self, harness: Harness, printed: Any, make_call: MakeCall) -> None:
        assert self.verdict(harness, 1, printed("Hm.", f"403 {BUDGET}"), make_call()) == ("limit", True)

    @pytest.mark.parametrize("words", ["this session is sealed; it takes", "this session's 60 seconds are over"])
    def test_the_session_was_closed(self, harness: Harness, printed: Any, make_call: MakeCall, words: str) -> None:
        assert self.verdict(harness, 1, printed("Hm.", f"API Error: {words}"), make_call()) == ("crashed", False)

    def test_the_context_is_full(self, harness: Harness, printed: Any, make_call: MakeCall) -> None:
        refused = make_call(
            status=CallStatus.ERROR,
            answer=None,
            finish_reason=None,
            response={"error": {"code": "context_length_exceeded"}},
            error="context_length_exceeded: too long",
        )
        stdout = printed("Hm.", "Your input is too long.")
        assert self.verdict(harness, 1, stdout, make_call(), refused) == ("limit", True)

    def test_a_provider_error_is_ours(self, harness: Harness, printed: Any, make_call: MakeCall) -> None:
        assert self.verdict(harness, 1, printed(None, "500 engine_error"), make_call()) == ("crashed", False)

    def test_an_error_with_exit_0_is_no_finish(self, harness: Harness, printed: Any, make_call: MakeCall) -> None:
        assert self.verdict(harness, 0, printed("Hm.", "500 engine_error"), make_call()) == ("crashed", False)

    def test_the_models_words_cannot_pass_for_a_limit(
        self, harness: Harness, printed: Any, make_call: MakeCall
    ) -> None:
        assert self.verdict(harness, 0, printed(f"{BUDGET} session_closed", None), make_call()) == ("finished", True)
        assert self.verdict(harness, 1, printed(f"{BUDGET} session_closed", "Oops."), make_call()) == ("crashed", False)

    def test_killed_crashed_or_never_called(self, harness: Harness, printed: Any, make_call: MakeCall) -> None:
        assert self.verdict(harness, None, b"", make_call()) == ("crashed", False)
        assert self.verdict(harness, 1, b"", make_call()) == ("crashed", False)
        assert self.verdict(harness, 0, printed("Done.", None)) == ("crashed", False)

    def test_only_the_end_of_its_output_was_kept(self, harness: Harness, printed: Any, make_call: MakeCall) -> None:
        cut = b'end of a long line"}\n' + printed("Done.", None)
        assert self.verdict(harness, 0, cut, make_call()) == ("finished", True)


def test_opencode_goes_on_after_an_error(make_call: MakeCall) -> None:
    """It exits 1 all the same."""
    text = [{"type": "text", "part": {"type": "text", "text": "Done."}}, {"type": "step_finish"}]
    error = {"type": "error", "error": {"name": "ContextOverflowError", "data": {"message": "maximum context length"}}}
    went_on = lines({"type": "step_start"}, error, {"type": "step_start"}, *text)
    ending = OpencodeHarness().ending(Exit(code=1, stdout=went_on), [make_call()])
    assert (ending.kind, ending.by_policy) == ("finished", True)
    ended = lines({"type": "step_start"}, *text, error)
    assert OpencodeHarness().ending(Exit(code=1, stdout=ended), [make_call()]).kind == "limit"
    killed = OpencodeHarness().ending(Exit(code=1, timed_out=True, stdout=went_on), [make_call()])
    assert (killed.kind, killed.by_policy) == ("limit", False)


def test_an_earlier_word_of_opencode_is_not_its_last(make_call: MakeCall) -> None:
    said = {"type": "text", "part": {"type": "text", "text": "I copy it."}}
    silent = lines({"type": "step_start"}, said, {"type": "step_finish"}, {"type": "step_start"})
    assert OpencodeHarness().ending(Exit(code=0, stdout=silent), [make_call(text="")]).kind == "gave_up"
