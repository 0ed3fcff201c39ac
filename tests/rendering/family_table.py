"""What `docs/model-families.md` says of every family, measured: `python -m tests.rendering.family_table` writes it."""

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
