"""`ChatRenderer`: a model directory's chat template and tokenizer as ids, both ways."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from openforgerl.conversation import digest_json, parse_arguments
from openforgerl.errors import TemplateError
from openforgerl.rendering.answers import Style
from openforgerl.rendering.forms import choose_form
from openforgerl.rendering.images import NoImages, Placeholders
from openforgerl.rendering.layout import Layout
from openforgerl.rendering.parsing import IdParser, opens_thought
from openforgerl.rendering.probing import Probed, probe, turn_tokens
from openforgerl.rendering.remembered import Remembered
from openforgerl.rendering.restoring import PromptIds, Restorer, Turns
from openforgerl.rendering.schemas import types_of
from openforgerl.rendering.shapes import Form, Shape, message_forms, milder, tool_form
from openforgerl.rendering.template import ChatTemplate, strings_in, traced_json, untraced
from openforgerl.rendering.tokenizer import TokenCodec
from openforgerl.rendering.traced import OUTSIDE, TEMPLATE, Traced, uniform
from openforgerl.types import Conversation, ForcedCall, JsonValue, Message, ModelCall, Prompt

_FORMS_HELD = 64 * 2**20
"""Bytes of messages in the form of the template that are remembered."""
_HEADERS_HELD = 2**20
"""Bytes of what templates write before an answer that are remembered."""

RULES = "2"
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
        answer_form: str = "auto",
    ) -> None:
        """`templates` by name (`default`, and `tool_use` where the model has another one for tools).

        `special_tokens` are the template's variables (`bos_token`, ...). `tokenizer_digest` names the codec.
        `images`: what this model's prompts hold for images, or who refuses them. `answer_form`: a form of
        `forms.FORMS`, or `auto`.
        """
        self._codec = codec
        self._templates = {name: ChatTemplate(source) for name, source in templates.items()}
        self._choices = {name: choose_form(source, answer_form) for name, source in templates.items()}
        self._special = {name: uniform(text, TEMPLATE) for name, text in special_tokens.items()}
        self._images = images = images or NoImages("a text model")
        placeholder = images.token_id if isinstance(images, Placeholders) else None
        self._probed = {
            name: probe(template, self._special, codec, self._choices[name].form, placeholder)
            for name, template in self._templates.items()
        }
        named = {text for name, text in special_tokens.items() if name != "unk_token"}
        structure = {
            token_id
            for name, source in templates.items()
            for token_id in turn_tokens(self._probed[name], source, named, codec, self._choices[name].form)
        }
        self._stop_ids = (*stop_ids, *sorted(structure.difference(stop_ids)))
        self._restorers = {
            name: Restorer(codec, choice, self._turns(name), placeholder=placeholder)
            for name, choice in self._choices.items()
        }
        parts: list[JsonValue] = [RULES, tokenizer_digest, dict(templates), dict(special_tokens), list(stop_ids)]
        if isinstance(images, Placeholders):
            parts.append([msgspec.to_builtins(images.rules), images.token_id])
        if answer_form != "auto":
            parts.append(answer_form)
        self._digest = digest_json(parts)
        self._forms: Remembered[tuple[Shape, int, Message], tuple[Form, JsonValue]] = Remembered(_FORMS_HELD)
        self._headers: Remembered[tuple[str, str, str], str] = Remembered(_HEADERS_HELD)

    @property
    def probed(self) -> Probed:
        """What was found out about the template that is used while tools are on offer."""
        return self._probed["tool_use" if "tool_use" in self._probed else "default"]

    @property
    def answer_form(self) -> str:
        """The form of this model's answers while tools are on offer, and what it was told from; for people."""
        return str(self._choices["tool_use" if "tool_use" in self._choices else "default"])

    @property
    def digest(self) -> str:
        """sha256 over template, tokenizer and rules."""
        return self._digest

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn: those that the model declares, then every other token between turns."""
        return self._stop_ids

    @property
    def placeholders(self) -> Placeholders | None:
        """How prompts hold images; None where the model sees none."""
        return self._images if isinstance(self._images, Placeholders) else None

    @property
    def characters_encoded(self) -> int:
        """Characters of text that were turned into ids since the start; what was remembered is not counted."""
        return self._codec.characters_encoded

    def forget(self) -> None:
        """Drop what is remembered of earlier prompts. Only time depends on it: the same prompts come out."""
        self._codec.forget()
        for restorer in self._restorers.values():
            restorer.forget()

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
        traced, given = self._written(conversation, kwargs, clock)
        _refuse_surrogates(traced)
        earlier = self._restorers[name].earlier(restored)
        layout = Layout(self._codec, traced, lambda: _data_strings(conversation, kwargs), earlier)
        if isinstance(self._images, Placeholders):
            layout.place(self._images.token_id, self._images.measured(conversation, images or {}))
        digest = digest_json([self._digest, dict(kwargs)])
        header = self._known_header((name, digest), given, clock, traced) if restored else ""
        built = self._restorers[name].build(layout, restored, self._bare(name, header))
        prompt = Prompt(
            ids=tuple(built.ids),
            origins=built.spans(),
            images=tuple(built.images),
            template_digest=digest,
        )
        self._restorers[name].remember(prompt, layout)
        return prompt

    def force(self, prompt: Prompt, conversation: Conversation, call: ForcedCall) -> Prompt:
        """`prompt` with the opening of a tool call at its end, after what closes or skips a thought.

        Raises `TemplateError` when answers to this template hold no calls.
        """
        style, form = self._style(conversation), self._choices[self._name(conversation)].form
        if not style.calls:
            raise TemplateError("this model's answers have no form for tool calls here, so none can be forced")
        tail = self._template_tail(prompt)
        think, end_think = style.thought
        skip = ""
        if style.thinking and not tail.rstrip().endswith(end_think):
            skip = ("" if opens_thought(tail, style.thought) else think + "\n") + "\n" + end_think + "\n\n"
        before, name, after = form.opening(call.name, _calls_in(conversation))
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
        style, form = self._style(conversation), self._choices[self._name(conversation)].form
        seed = seed or hashlib.sha256(repr(prompt.ids).encode()).hexdigest()
        opened = style.thinking and forced is None and opens_thought(self._template_tail(prompt), style.thought)
        types = types_of(conversation.tools) if form.typed else ()
        grammar = form.grammar(style, thought_open=opened, seed=seed, types=types)
        if forced is not None:
            # A call is told only once more is known of it.
            grammar.write("".join(form.opening(forced.name, _calls_in(conversation))))
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
        name, style = self._name(conversation), self._style(conversation)
        whole = Conversation(messages=(*conversation.messages, message), tools=conversation.tools)
        prompt, given = self._written(conversation, kwargs, clock)
        header = self._header(name, given, clock, prompt)
        traced, _ = self._written(whole, kwargs, clock, generate=False)
        _refuse_surrogates(traced)
        layout = Layout(self._codec, traced, lambda: _data_strings(whole, kwargs))
        bare = self._bare(name, header)
        before = prompt[: len(prompt) - (len(header) - len(bare))]
        start = len(before) if traced.startswith(before) else layout.after_header(bare, len(conversation.messages))
        if start is None:
            raise TemplateError("this chat template writes no assistant turn that can be told from the rest")
        turn = layout.turn_from(start, self._turns(name))
        text = _after_opening(traced[turn.start : turn.stop], header[len(bare) :], style)
        answer = Layout(self._codec, _as_traced(text), lambda: _data_strings(whole, kwargs))
        ids = [i for piece in answer.pieces for i in self._codec.encode_piece(answer.text, piece, first=False).ids]
        token = layout.pieces[turn.stop_piece].token if turn.stop_piece < len(layout.pieces) else None
        probed = self._probed[name]
        closing = probed.after_calls if message.tool_calls else probed.after_text
        end = token.id if token is not None else self._stop_ids[0] if closing is None else closing
        return (*ids, end)

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
        style = self._choices[self._name(conversation)].style
        return msgspec.structs.replace(style, calls=style.calls and bool(conversation.tools))

    def _turns(self, name: str) -> Turns:
        probed, form = self._probed[name], self._choices[name].form
        closers = frozenset(i for i in (probed.after_text, probed.after_calls) if i is not None)
        return Turns(
            stop_ids=frozenset(self._stop_ids),
            ends=closers.union(self._stop_ids),
            goes_on=form.goes_on,
            marks=self._choices[name].thought,
        )

    def _bare(self, name: str, header: str) -> str:
        """A header without what opens or skips a thought."""
        found = [at for mark in self._choices[name].thought if (at := header.find(mark)) >= 0]
        return header[: min(found)] if found else header

    def _known_header(self, kind: tuple[str, str], given: Mapping[str, JsonValue], clock: float, prompt: str) -> str:
        """As `_header`, which is another rendering, but once for each `kind` (template and digest) and last role
        where the prompt ends in it.

        Should the template ever write another one here, turns may not be found; ids are never wrong: a turn is restored
        only behind the very ids of its call's prompt.
        """
        last = given["messages"][-1]["role"] if given["messages"] else ""
        key = (*kind, str.__str__(last))
        header = self._headers.get(key)
        if header is None or not prompt.endswith(header):
            header = self._header(kind[0], given, clock, prompt)
            self._headers.put(key, header, 200 + len(header))
        return header

    def _header(self, name: str, given: Mapping[str, JsonValue], clock: float, prompt: str) -> str:
        """What the generation prompt adds; "" for templates that add nothing or rewrite what is before."""
        without = self._templates[name].text({**given, "add_generation_prompt": False}, clock)
        text = str.__str__(prompt)
        return text[len(without) :] if text.startswith(without) else ""

    def _written(
        self, conversation: Conversation, kwargs: Mapping[str, JsonValue], clock: float, *, generate: bool = True
    ) -> tuple[Traced, Mapping[str, JsonValue]]:
        """The template's text of a conversation, and the variables that it was given.

        A conversation that the template refuses is tried again in the orders of roles of `shapes.milder`; if all
        are refused, the first refusal is raised.
        """
        template, shape = self._templates[self._name(conversation)], self._probed[self._name(conversation)].shape
        forms, plain_forms = self._forms_of(conversation.messages, shape)
        given = self._variables(conversation, kwargs, forms, generate=generate)
        plain = {name: untraced(value) for name, value in given.items() if name != "messages"}
        plain["messages"] = plain_forms
        try:
            return template.render(given, clock, plain=plain), given
        except TemplateError as error:
            refusal = error
        for order in milder(forms):
            other: dict[str, JsonValue] = {**given, "messages": list(order)}
            try:
                return template.render(other, clock), other
            except TemplateError:
                continue
        raise refusal

    def _forms_of(self, messages: Sequence[Message], shape: Shape) -> tuple[list[Form], list[JsonValue]]:
        """`message_forms`, and the same untraced; of a message in its place they are always the same."""
        if shape.move_images:
            forms = list(message_forms(messages, shape))
            return forms, [untraced(form) for form in forms]
        pairs: list[tuple[Form, JsonValue]] = []
        for index, message in enumerate(messages):
            key = (shape, index, message)
            pair = self._forms.get(key)
            if pair is None:
                (form,) = message_forms((message,), shape, start=index)
                pair = form, untraced(form)
                # Both hold the text, and a few objects for each of their keys.
                self._forms.put(key, pair, 2 * _characters(message) + 2000)
            pairs.append(pair)
        return [form for form, _ in pairs], [plain for _, plain in pairs]

    def _variables(
        self,
        conversation: Conversation,
        kwargs: Mapping[str, JsonValue],
        forms: Sequence[Form],
        *,
        generate: bool,
    ) -> dict[str, JsonValue]:
        if isinstance(self._images, NoImages):
            self._images.refuse(conversation)
        tools = [traced_json(tool_form(tool), OUTSIDE) for tool in conversation.tools]
        return {
            **self._special,
            **{name: traced_json(value, OUTSIDE) for name, value in kwargs.items()},
            "messages": list(forms),
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": generate,
        }

    def _template_tail(self, prompt: Prompt) -> str:
        """The template's own text at the end of a prompt; of one without origins, its last ids' text."""
        if not prompt.origins:
            return self.decode(prompt.ids[-64:])
        last = prompt.origins[-1]
        return self.decode(prompt.ids[last.start : last.stop]) if last.kind == "template" else ""


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


def _calls_in(conversation: Conversation) -> int:
    return sum(len(message.tool_calls) for message in conversation.messages)


def _after_opening(text: str, opening: str, style: Style) -> str:
    """A turn's text without what the prompt already wrote of it: an opened or skipped thought."""
    think, end_think = style.thought
    if not opening or text.startswith(opening):
        return text[len(opening) :]
    if opens_thought(opening, style.thought):
        if text.startswith(end_think):
            return text
        return text[len(think) :] if text.startswith(think) else uniform(f"\n{end_think}\n\n", TEMPLATE) + text
    before, mark, after = text.partition(end_think)
    skipped = bool(mark) and opening.rstrip().endswith(end_think) and not before.replace(think, "").strip()
    return after if skipped else text


def _characters(message: Message) -> int:
    return len(message.text) + len(message.reasoning) + sum(len(call.arguments) + 500 for call in message.tool_calls)


def _as_traced(text: Any) -> Traced:
    return text if isinstance(text, Traced) else uniform(str(text), OUTSIDE)
