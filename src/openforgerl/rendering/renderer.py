"""`ChatRenderer`: a model directory's chat template and tokenizer as ids, both ways."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from openforgerl.conversation import digest_json, parse_arguments
from openforgerl.errors import TemplateError
from openforgerl.rendering.hermes import END_THINK, THINK, AnswerGrammar, Style, forced_opening
from openforgerl.rendering.images import NoImages, Placeholders
from openforgerl.rendering.layout import Layout, stretches_of
from openforgerl.rendering.parsing import IdParser, opens_thought, style_of
from openforgerl.rendering.restoring import PromptIds, Restorer
from openforgerl.rendering.template import ChatTemplate, strings_in, traced_json
from openforgerl.rendering.tokenizer import TokenCodec
from openforgerl.rendering.traced import OUTSIDE, TEMPLATE, UNKNOWN, Traced, uniform
from openforgerl.types import (
    Conversation,
    ForcedCall,
    Image,
    JsonValue,
    Message,
    ModelCall,
    Prompt,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolSpec,
)

RULES = "1"
"""Version of the rules in this room; a change that can change ids must change it."""


class ChatRenderer:
    """Implements `protocols.Renderer` for any Hugging Face chat template with a tokenizer.json."""

    def __init__(
        self,
        codec: TokenCodec,
        templates: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        stop_ids: Sequence[int],
        tokenizer_digest: str,
        images: Placeholders | NoImages | None = None,
    ) -> None:
        """`templates` by name (`default`, and `tool_use` where the model has another one for tools).

        `special_tokens` are the template's variables (`bos_token`, ...). `tokenizer_digest` names the codec.
        `images`: what this model's prompts hold for images, or who refuses them.
        """
        self._codec = codec
        self._templates = {name: ChatTemplate(source) for name, source in templates.items()}
        self._styles = {name: style_of(source) for name, source in templates.items()}
        self._special = {name: uniform(text, TEMPLATE) for name, text in special_tokens.items()}
        self._stop_ids = tuple(stop_ids)
        self._images = images = images or NoImages("a text model")
        placeholder = images.token_id if isinstance(images, Placeholders) else None
        self._restorers = {
            name: Restorer(codec, style, self._stop_ids, placeholder=placeholder)
            for name, style in self._styles.items()
        }
        parts: list[JsonValue] = [RULES, tokenizer_digest, dict(templates), dict(special_tokens), list(stop_ids)]
        if isinstance(images, Placeholders):
            parts.append([msgspec.to_builtins(images.rules), images.token_id])
        self._moving = {
            name: isinstance(images, Placeholders) and not self._shows_result(template, images.token_id)
            for name, template in self._templates.items()
        }
        self._digest = digest_json(parts)

    @property
    def digest(self) -> str:
        """sha256 over template, tokenizer and rules."""
        return self._digest

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""
        return self._stop_ids

    def render(
        self,
        conversation: Conversation,
        *,
        restored: Mapping[int, ModelCall],
        clock: float,
        kwargs: Mapping[str, JsonValue],
        images: Mapping[str, bytes] | None = None,
    ) -> Prompt:
        """The prompt for the next assistant turn (see `restoring` for what `restored` becomes).

        `clock` in Unix seconds feeds `strftime_now`. `images`: the bytes of the conversation's images by sha256;
        of one that was seen before only its size is needed. Raises `TemplateError` with the template's own words.
        """
        name = self._name(conversation)
        traced = self._templates[name].render(self._variables(conversation, kwargs, generate=True), clock)
        _refuse_surrogates(traced)
        layout = Layout(self._codec, traced, lambda: _data_strings(conversation, kwargs))
        if isinstance(self._images, Placeholders):
            layout.place(self._images.token_id, self._images.measured(conversation, images or {}))
        header = self._header(conversation, clock, kwargs, traced) if restored else ""
        built = self._restorers[name].build(layout, restored, _without_thought(header))
        return Prompt(
            ids=tuple(built.ids),
            origins=built.spans(),
            images=tuple(built.images),
            template_digest=digest_json([self._digest, dict(kwargs)]),
        )

    def force(self, prompt: Prompt, conversation: Conversation, call: ForcedCall) -> Prompt:
        """`prompt` with the opening of a tool call at its end, after what closes or skips a thought.

        Raises `TemplateError` when answers to this template hold no calls.
        """
        style = self._style(conversation)
        if not style.calls:
            raise TemplateError("this model's answers have no form for tool calls here, so none can be forced")
        tail = self._template_tail(prompt)
        skip = ""
        if style.thinking and not tail.rstrip().endswith(END_THINK):
            skip = ("" if opens_thought(tail) else THINK + "\n") + "\n" + END_THINK + "\n\n"
        before, name, after = forced_opening(call.name)
        start, stop = len(skip) + len(before), len(skip) + len(before) + len(name)
        text = skip + before + name + after
        added = PromptIds()
        encoded = self._codec.encode(text, [(0, start), (stop, len(text))], first=False)
        added.encoded(encoded, [TEMPLATE] * start + [OUTSIDE] * len(name) + [TEMPLATE] * len(after))
        at = len(prompt.ids)
        spans = [msgspec.structs.replace(span, start=at + span.start, stop=at + span.stop) for span in added.spans()]
        origins = (*prompt.origins, *spans) if prompt.origins or not prompt.ids else ()
        return msgspec.structs.replace(prompt, ids=(*prompt.ids, *added.ids), origins=origins)

    def parser(
        self, conversation: Conversation, prompt: Prompt, *, seed: str = "", forced: ForcedCall | None = None
    ) -> IdParser:
        """A parser for an answer to `prompt` (which may already have opened a thought, or, `forced`, a call).

        `seed` (the call's id) makes the ids of tool calls; without one they come from the prompt's ids, and
        two answers to the same prompt share theirs.
        """
        style = self._style(conversation)
        seed = seed or hashlib.sha256(repr(prompt.ids).encode()).hexdigest()
        opened = style.thinking and forced is None and opens_thought(self._template_tail(prompt))
        grammar = AnswerGrammar(style, thought_open=opened, seed=seed)
        if forced is not None:
            grammar.write("".join(forced_opening(forced.name)))  # a call is told only once more is known of it
        return IdParser(self._codec, self._stop_ids, grammar)

    def encode_answer(
        self,
        message: Message,
        conversation: Conversation,
        *,
        clock: float = 0.0,
        kwargs: Mapping[str, JsonValue] | None = None,
    ) -> tuple[int, ...]:
        """Ids of `message` as the template writes it after `conversation`, with the turn's stop token.

        What the generation prompt already wrote (an opened or skipped thought) is left out; a message without
        a thought first closes one that the prompt opened. Raises `TemplateError` if the template writes no
        assistant turn that can be found again.
        """
        kwargs = kwargs or {}
        whole = Conversation(messages=(*conversation.messages, message), tools=conversation.tools)
        template = self._templates[self._name(conversation)]
        prompt = template.render(self._variables(conversation, kwargs, generate=True), clock)
        header = self._header(conversation, clock, kwargs, prompt)
        traced = template.render(self._variables(whole, kwargs, generate=False), clock)
        _refuse_surrogates(traced)
        layout = Layout(self._codec, traced, lambda: _data_strings(whole, kwargs))
        bare = _without_thought(header)
        turn = layout.last_turn(bare, self._stop_ids)
        if turn is None:
            raise TemplateError("this chat template writes no assistant turn that can be told from the rest")
        text = traced[turn.start : turn.stop]
        opening = header[len(bare) :]
        if opening and text.startswith(opening):
            text = text[len(opening) :]
        elif opens_thought(opening):
            text = uniform("\n</think>\n\n", TEMPLATE) + text
        answer = Layout(self._codec, _as_traced(text), lambda: _data_strings(whole, kwargs))
        ids = [i for piece in answer.pieces for i in self._codec.encode_piece(answer.text, piece, first=False).ids]
        token = layout.pieces[turn.stop_piece].token if turn.stop_piece < len(layout.pieces) else None
        return (*ids, token.id if token is not None else self._stop_ids[0])

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text in which added tokens count, as a model would sample them (scripted raw answers)."""
        return self._codec.encode(text, first=False).ids

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes that an id stands for, maybe part of a character."""
        return self._codec.bytes_of(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, added tokens included; for people and for matching."""
        return self._codec.decode(ids)

    def _name(self, conversation: Conversation) -> str:
        return "tool_use" if conversation.tools and "tool_use" in self._templates else "default"

    def _style(self, conversation: Conversation) -> Style:
        style = self._styles[self._name(conversation)]
        return Style(thinking=style.thinking, calls=style.calls and bool(conversation.tools))

    def _header(self, conversation: Conversation, clock: float, kwargs: Mapping[str, JsonValue], prompt: str) -> str:
        """What the generation prompt adds; "" for templates that add nothing or rewrite what is before."""
        template = self._templates[self._name(conversation)]
        without = template.text(self._variables(conversation, kwargs, generate=False), clock)
        text = str.__str__(prompt)
        return text[len(without) :] if text.startswith(without) else ""

    def _variables(
        self, conversation: Conversation, kwargs: Mapping[str, JsonValue], *, generate: bool
    ) -> dict[str, JsonValue]:
        if isinstance(self._images, NoImages):
            self._images.refuse(conversation)
        tools = [traced_json(tool_form(tool), OUTSIDE) for tool in conversation.tools]
        moving = self._moving[self._name(conversation)]
        return {
            **self._special,
            **{name: traced_json(value, OUTSIDE) for name, value in kwargs.items()},
            "messages": list(_message_forms(conversation.messages, moving=moving)),
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": generate,
        }

    def _shows_result(self, template: ChatTemplate, placeholder: int) -> bool:
        """Whether a template writes the image in a tool's result; some only know images in user messages."""
        image = Image(sha256="", media_type="")
        call = ToolCall(id="c", name="look", arguments="{}")
        messages = (
            Message(role=Role.USER, parts=(Text("Look."),)),
            Message(role=Role.ASSISTANT, tool_calls=(call,)),
            Message(role=Role.TOOL, parts=(Text("Seen:"), image), tool_call_id="c"),
        )
        forms = list(_message_forms(messages, moving=False))
        given = {**self._special, "messages": forms, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            shown = template.render(given, 0.0)
        except TemplateError:
            return False
        pieces = self._codec.split(str.__str__(shown), stretches_of(shown, (TEMPLATE, UNKNOWN)))
        return sum(piece.token is not None and piece.token.id == placeholder for piece in pieces) == 1

    def _template_tail(self, prompt: Prompt) -> str:
        """The template's own text at the end of a prompt; of one without origins, its last ids' text."""
        if not prompt.origins:
            return self.decode(prompt.ids[-64:])
        last = prompt.origins[-1]
        return self.decode(prompt.ids[last.start : last.stop]) if last.kind == "template" else ""


def tool_form(tool: ToolSpec) -> dict[str, JsonValue]:
    """A tool as chat templates expect it: as the harness wrote it, or built from the spec's fields."""
    if tool.raw is not None:
        return tool.raw
    function: dict[str, JsonValue] = {"name": tool.name, "description": tool.description}
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _message_forms(messages: Sequence[Message], *, moving: bool) -> Iterator[dict[str, JsonValue]]:
    """Messages as chat templates expect them. `moving`: images of a run of tool results follow it as a user message."""
    moved: list[JsonValue] = []
    for index, message in enumerate(messages):
        if moved and message.role is not Role.TOOL:
            yield {"role": uniform("user", TEMPLATE), "content": moved}
            moved = []
        if moving and message.role is Role.TOOL:
            moved = [*moved, *(_part_form(part, index) for part in message.parts if isinstance(part, Image))]
            kept = tuple(part for part in message.parts if not isinstance(part, Image))
            message = msgspec.structs.replace(message, parts=kept)
        yield _message_form(message, index)
    if moved:
        yield {"role": uniform("user", TEMPLATE), "content": moved}


def _message_form(message: Message, index: int) -> dict[str, JsonValue]:
    """A message as chat templates expect it, with what came from it traced to its index.

    As with transformers' `apply_chat_template`: a key without a value is left out, and reasoning stands under
    `reasoning_content` and `thinking`. Content is one string, all text parts joined, or, where there are images,
    the list of texts and images; it is left out only where the message has tool calls and no text
    (`content: null`), else an absent text is "". Arguments are an object where they are one, else their text.
    """
    form: dict[str, JsonValue] = {"role": uniform(message.role.value, TEMPLATE)}
    if any(isinstance(part, Image) for part in message.parts):
        form["content"] = [_part_form(part, index) for part in message.parts if not isinstance(part, Reasoning)]
    elif message.text or not message.tool_calls:
        form["content"] = uniform(message.text, index)
    if message.reasoning:
        form["reasoning_content"] = form["thinking"] = uniform(message.reasoning, index)
    if message.tool_calls:
        form["tool_calls"] = [
            {
                "type": uniform("function", TEMPLATE),
                "id": uniform(call.id, index),
                "function": {
                    "name": uniform(call.name, index),
                    "arguments": traced_json(_arguments_form(call.arguments, freeform=call.freeform), index),
                },
            }
            for call in message.tool_calls
        ]
    if message.role is Role.TOOL and message.tool_call_id:
        form["tool_call_id"] = uniform(message.tool_call_id, index)
    if message.name:
        form["name"] = uniform(message.name, index)
    return form


def _part_form(part: Text | Image, index: int) -> JsonValue:
    if isinstance(part, Image):
        return {"type": uniform("image", TEMPLATE)}  # which one it is templates need not know
    return {"type": uniform("text", TEMPLATE), "text": uniform(part.text, index)}


def _arguments_form(arguments: str, *, freeform: bool) -> JsonValue:
    parsed = None if freeform else parse_arguments(arguments)
    return parsed if isinstance(parsed, dict) else arguments


def _data_strings(conversation: Conversation, kwargs: Mapping[str, JsonValue]) -> Iterable[str]:
    yield from strings_in(msgspec.to_builtins(conversation))
    yield from strings_in(dict(kwargs))
    for message in conversation.messages:
        for call in message.tool_calls:
            yield from strings_in(parse_arguments(call.arguments))


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = ascii(str.__str__(text)[max(error.start - 20, 0) : error.start + 1])
        raise TemplateError(f"the conversation holds a lone surrogate, which is no text, after {near}") from error


def _without_thought(header: str) -> str:
    return header.partition(THINK)[0]


def _as_traced(text: Any) -> Traced:
    return text if isinstance(text, Traced) else uniform(str(text), OUTSIDE)
