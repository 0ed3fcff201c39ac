"""From a conversation to prompt ids, without holding up other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from openforgerl.errors import ContextOverflow, TemplateError, WireError
from openforgerl.protocols import Engine, Renderer
from openforgerl.proxy.sessions import CallLog
from openforgerl.types import Conversation, ForcedCall, Image, ModelCall, Prompt, Session, Text
from openforgerl.wire import Request

MOST_CHARACTERS = 16
"""Characters a token may stand for on average. What is longer than a context of such tokens is refused unread: to
count its tokens would take minutes, and agents choose what they send."""

MOST_IMAGES = 256
"""Images in one request, repeated ones too."""

MOST_IMAGE_BYTES = 20 * 2**20
"""Bytes of one encoded image. How many pixels it may have is the renderer's to say."""

LONG = 20_000
"""Characters from which on a prompt is rendered in a thread: it takes as long as a network answer."""


def checked_length(conversation: Conversation, engine: Engine) -> int:
    """`characters`. ContextOverflow for a conversation that cannot fit, without counting its tokens."""
    length = characters(conversation)
    if length // MOST_CHARACTERS > engine.context_length:
        raise ContextOverflow(length // MOST_CHARACTERS, engine.context_length)
    return length


def characters(conversation: Conversation) -> int:
    """Characters that the prompt will hold at least; a message or call without any still costs a token."""
    count = sum(len(msgspec.json.encode(tool.raw or tool)) for tool in conversation.tools)
    for message in conversation.messages:
        count += MOST_CHARACTERS + sum(len(part.text) for part in message.parts if type(part) is Text)
        count += sum(MOST_CHARACTERS + len(call.arguments) for call in message.tool_calls)
    return count


async def images_of(request: Request, store: CallLog) -> Mapping[str, bytes]:
    """The bytes of every image that the request's conversation names, by sha256.

    They come with the request, but for those of an earlier call that it only points back at: the store has them.
    WireError 400 for too many or too large ones.
    """
    named = [
        part.sha256 for message in request.conversation.messages for part in message.parts if isinstance(part, Image)
    ]
    if len(named) > MOST_IMAGES:
        raise WireError(
            400,
            "invalid_request",
            f"messages hold {len(named)} images; at most {MOST_IMAGES} are taken",
            param="messages",
        )
    largest = max((len(request.images[name]) for name in named if name in request.images), default=0)
    if largest > MOST_IMAGE_BYTES:
        raise WireError(
            400,
            "invalid_request",
            f"messages hold an image of {largest} bytes; at most {MOST_IMAGE_BYTES} are taken",
            param="messages",
        )
    earlier = set(named) - request.images.keys()
    return {**request.images, **await store.images(earlier)} if earlier else request.images


async def render_prompt(
    renderer: Renderer,
    session: Session,
    conversation: Conversation,
    *,
    length: int,
    restored: Mapping[int, ModelCall],
    images: Mapping[str, bytes],
    forced: ForcedCall | None = None,
) -> Prompt:
    """The prompt of the next turn, with the opening of a forced call at its end. `length`: its `characters`.

    A long one, or one with images, is rendered in a thread; whoever needs an order keeps it. TemplateError when the
    template refuses the conversation, WireError 400 naming `tool_choice` when the model's calls cannot be forced.
    """

    def work() -> Prompt:
        prompt = renderer.render(
            conversation,
            restored=restored,
            clock=session.opened_at,
            kwargs=session.template_kwargs,
            images=images,
        )
        if forced is None:
            return prompt
        try:
            return renderer.force(prompt, conversation, forced)
        except TemplateError as error:
            raise WireError(400, "unsupported_field", f"tool_choice: {error}", param="tool_choice") from error

    short = length < LONG and not images
    return work() if short else await asyncio.to_thread(work)
