"""What `docs/model-families.md` says of every family, measured.

`OPENFORGERL_WRITE_DOCS=1 pytest tests/rendering/test_families.py -k document` writes it; without, the test compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openforgerl.conversation import same_message
from openforgerl.rendering import ChatRenderer
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    ForcedCall,
    Message,
    ModelCall,
    Prompt,
    Role,
    Text,
    ThreadRole,
    ToolSpec,
)

from .families import Family
from .speech import said


class Loop:
    """A harness, a proxy and an engine: asks, records, echoes."""

    def __init__(self, renderer: ChatRenderer, tools: tuple[ToolSpec, ...], question: str) -> None:
        self.renderer = renderer
        self.tools = tools
        self.messages = [Message(role=Role.USER, parts=(Text(question),))]
        self.restored: dict[int, ModelCall] = {}
        self.calls: list[ModelCall] = []

    def conversation(self) -> Conversation:
        return Conversation(messages=tuple(self.messages), tools=self.tools)

    def prompt(self, *, restored: Mapping[int, ModelCall] | None = None) -> Prompt:
        known = self.restored if restored is None else restored
        return self.renderer.render(self.conversation(), restored=known, clock=0.0, kwargs={})

    def answer(
        self, ids: Sequence[int], family: Family, *, prompt: Prompt | None = None, forced: ForcedCall | None = None
    ) -> ModelCall:
        """The engine answers with `ids` and the token that ends such a turn; the harness takes the answer in."""
        conversation, prompt = self.conversation(), prompt or self.prompt()
        call_id = f"c{len(self.calls)}"
        parser = self.renderer.parser(conversation, prompt, seed=call_id, forced=forced)
        parser.feed(ids)
        answer = parser.finish()[1]
        closing = family.after_calls if answer.tool_calls and family.after_calls else family.eos
        call = ModelCall(
            call_id=call_id,
            session_id="s",
            index=len(self.calls),
            dialect="chat",
            thread="main",
            role=ThreadRole.MAIN,
            role_evidence="first",
            parent_call_id=None,
            status=CallStatus.COMPLETE,
            conversation=conversation,
            prompt=prompt,
            sampled_ids=(*ids, *self.renderer.encode(closing)),
            weights_version=0,
            finish_reason=FinishReason.STOP,
            answer=answer,
            timing=CallTiming(received=0.0),
        )
        self.calls.append(call)
        self.restored[len(self.messages)] = call
        assert same_message(answer, answer)
        self.messages.append(answer)
        return call

    def results(self, text: str) -> None:
        """Every call of the last answer gets this result."""
        for made in self.messages[-1].tool_calls:
            self.messages.append(Message(role=Role.TOOL, tool_call_id=made.id, parts=(Text(text),)))

    def ask(self, text: str) -> None:
        self.messages.append(Message(role=Role.USER, parts=(Text(text),)))


def said_by(family: Family, loop: Loop, *, thought: str = "", text: str = "", calls: Any = (), odd: int = 0) -> str:
    """An answer of this family to the loop's prompt, which may have opened a thought."""
    tail = loop.renderer.decode(loop.prompt().ids[-8:]).rstrip()
    return said(family.form, text, calls, thought=thought, opened=tail.endswith(("<think>", "[THINK]")), odd=odd)


COLUMNS = (
    "model",
    "template",
    "tokenizer",
    "form of answers",
    "tool loop",
    "thought in it",
    "text beside a call",
    "answer, after a new question",
    "thought, after a new question",
    "messages",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"
THOUGHT, SAID = "Pondering.", "Speaking."
TOOLS = (ToolSpec(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}}),)
CALL = [("bash", {"command": "ls"})]


def row(family: Family, renderer: ChatRenderer) -> str:
    """The line of one family."""
    shape = renderer.probed.shape
    notes = [
        *(['content "" beside calls'] if shape.no_content == "empty" else []),
        *(["content null beside calls"] if shape.no_content == "null" else []),
        *(["arguments as text"] if shape.text_arguments else []),
        *(["ids of nine characters"] if shape.short_ids else []),
        *(["text joins the thought of a call"] if shape.one_thought else []),
        *([] if "bash" in renderer.decode(Loop(renderer, TOOLS, "Go.").prompt().ids) else ["tools are not shown"]),
    ]
    thinks = "thoughts in" in renderer.answer_form or family.form == "harmony"
    alone = family.form == "llama"
    cells = (
        family.name,
        f"{family.package}: `{family.file}`",
        f"{family.tokenizer.words}: {family.tokenizer.package}" if family.tokenizer else "stand-in",
        f"{family.form}{', thinks' if thinks else ''}",
        _loop(family, renderer),
        _turn(family, renderer, thought=THOUGHT, calls=CALL) if thinks else "-",
        "no form for it" if alone else _turn(family, renderer, text=SAID, calls=CALL),
        _turn(family, renderer, text=SAID),
        _turn(family, renderer, thought=THOUGHT, text=SAID) if thinks else "-",
        "; ".join(notes) or "as they come",
    )
    return "| " + " | ".join(cells) + " |\n"


def _loop(family: Family, renderer: ChatRenderer) -> str:
    loop = Loop(renderer, TOOLS, "Go.")
    for turn in range(3):
        loop.answer(renderer.encode(said_by(family, loop, calls=CALL, odd=1)), family)
        loop.results("a.txt")
        found = _kept(loop)
        if found != "kept":
            return f"{turn} kept, then {found}" if turn else found
    return "kept"


def _turn(family: Family, renderer: ChatRenderer, **answer: Any) -> str:
    loop = Loop(renderer, TOOLS, "Go.")
    loop.answer(renderer.encode(said_by(family, loop, **answer)), family)
    loop.results("a.txt")
    if not answer.get("calls"):
        loop.ask("And now?")
    return _kept(loop)


def _kept(loop: Loop) -> str:
    """Whether the last answer is restored, or why a branch starts."""
    call, prompt = loop.calls[-1], loop.prompt()
    ids = call.prompt.ids + call.sampled_ids[:-1]
    if prompt.ids[: len(ids)] == ids:
        return "kept"
    shown = loop.renderer.decode(loop.prompt(restored={}).ids)
    answer = call.answer
    assert answer is not None
    missing = [name for name, text in (("thought", answer.reasoning), ("text", answer.text)) if text not in shown]
    if missing:
        return f"branch: {' and '.join(missing)} left out"
    before = loop.renderer.decode(call.prompt.ids).partition("Go.")[0]
    if shown.partition("Go.")[0] != before:
        return "branch: tools move to the newest question"
    return "branch: written otherwise"
