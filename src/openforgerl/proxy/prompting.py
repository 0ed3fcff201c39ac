"""From a conversation to prompt ids, without holding up other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from openforgerl.errors import ContextOverflow, TemplateError, WireError
from openforgerl.protocols import Engine, Renderer
from openforgerl.types import Conversation, ForcedCall, ModelCall, Prompt, Session

MOST_CHARACTERS = 16
"""Characters a token may stand for on average. What is longer than a context of such tokens is refused unread: to
count its tokens would take minutes, and agents choose what they send."""

LONG = 20_000
"""Characters from which on a prompt is rendered in a thread: it takes as long as a network answer."""


def check_length(conversation: Conversation, engine: Engine) -> None:
    """ContextOverflow for a conversation that cannot fit, without counting its tokens."""
    least_tokens = characters(conversation) // MOST_CHARACTERS
    if least_tokens > engine.context_length:
        raise ContextOverflow(least_tokens, engine.context_length)


def characters(conversation: Conversation) -> int:
    """Characters that the prompt will hold at least; a message or call without any still costs a token."""
    count = sum(len(msgspec.json.encode(tool.raw or tool)) for tool in conversation.tools)
    for message in conversation.messages:
        count += MOST_CHARACTERS + len(message.text)
        count += sum(MOST_CHARACTERS + len(call.arguments) for call in message.tool_calls)
    return count


async def render_prompt(
    renderer: Renderer,
    session: Session,
    conversation: Conversation,
    *,
    restored: Mapping[int, ModelCall],
    forced: ForcedCall | None = None,
) -> Prompt:
    """The prompt of the next turn, with the opening of a forced call at its end.

    A long one is rendered in a thread; whoever needs an order keeps it. TemplateError when the template refuses
    the conversation, WireError 400 naming `tool_choice` when the model's calls cannot be forced.
    """

    def work() -> Prompt:
        prompt = renderer.render(
            conversation, restored=restored, clock=session.opened_at, kwargs=session.template_kwargs
        )
        if forced is None:
            return prompt
        try:
            return renderer.force(prompt, conversation, forced)
        except TemplateError as error:
            raise WireError(400, "unsupported_field", f"tool_choice: {error}", param="tool_choice") from error

    return work() if characters(conversation) < LONG else await asyncio.to_thread(work)
