"""A second renderer: prompts written by the package `renderers` instead of the model's chat template.

Source: https://pypi.org/project/renderers/ (0.1.12). It has the prompt formats of some families as code, and writes
what their templates cannot: DeepSeek V3's second tool call, Kimi's tool results. Everything else is that of
`ChatRenderer`: answers are read in the same forms, and a turn is restored by the same rule.

The package takes text and ids of structural tokens from a tokenizer. Ours keeps data from being structure: text of
added tokens in messages, tools and template arguments is marked before the package sees it, and the mark is taken out
again where text becomes ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import renderers
from renderers import configs

from openforgerl.conversation import digest_json, same_message
from openforgerl.errors import ConfigError, TemplateError
from openforgerl.rendering.parsing import IdParser, opens_thought
from openforgerl.rendering.renderer import ChatRenderer
from openforgerl.rendering.restoring import PromptIds, may_restore
from openforgerl.rendering.schemas import types_of
from openforgerl.rendering.shapes import Shape, message_forms, tool_form
from openforgerl.rendering.template import strings_in
from openforgerl.rendering.tokenizer import Encoded, TokenCodec
from openforgerl.rendering.traced import TEMPLATE
from openforgerl.types import Conversation, Image, JsonValue, Message, ModelCall, Prompt

VERSION = "0.1.12"
_MARK = "\U0010fffd"
"""A private-use character, the last of Unicode: stands inside whatever data could be taken for structure."""


class _Tokens(msgspec.Struct, frozen=True):
    """Ids as the package wrote them: whose message each is, and whether the model would have sampled it."""

    ids: list[int]
    messages: list[int]
    sampled: list[bool]


class PackagedRenderer(ChatRenderer):
    """Implements `protocols.Renderer`; `package` names a format of the package `renderers` (`kimi-k2`)."""

    def __init__(self, codec: TokenCodec, templates: Mapping[str, str], *, package: str, **given: Any) -> None:
        """See `ChatRenderer`. ConfigError for a format that the package does not have."""
        super().__init__(codec, templates, **given)
        known = {_name_of(found): found for found in vars(configs).values() if _name_of(found)}
        if package not in known:
            raise ConfigError(f"renderers {VERSION} has no format {package!r}; it has {', '.join(sorted(known))}")
        self._package = package
        self._config: Any = known[package]
        self._tokenizer = _Tokenizer(codec, self._stop_ids[0])
        self._added = [token.content for token in codec.added.values() if token.content.strip()]
        self._digest = digest_json([self._digest, package, VERSION])
        self._make({})  # what is missing in the tokenizer is said now

    @property
    def answer_form(self) -> str:
        """The form of answers, and who writes prompts; for people."""
        return f"{super().answer_form}; prompts by renderers {VERSION}, {self._package}"

    def render(
        self,
        conversation: Conversation,
        *,
        restored: Mapping[int, ModelCall],
        clock: float,
        kwargs: Mapping[str, JsonValue],
        images: Mapping[str, bytes] | None = None,
    ) -> Prompt:
        """The prompt for the next turn; see `ChatRenderer.render`. No format here has a clock or takes images."""
        written = self._write(conversation, kwargs, generate=True)
        built = PromptIds()
        at = 0
        for message in sorted(restored):
            start = next((i for i in range(at, len(written.ids)) if _is_answer(written, i, message)), None)
            if start is None:
                continue
            stop = next(i for i in range(start, len(written.ids) + 1) if not _is_answer(written, i, message))
            # What the package writes of an answer before the first id that a model samples may be the model's too.
            while at < start and written.messages[at] != message:
                self._append(built, written, at, at + 1)
                at += 1
            while at <= start:
                if self._may_stand(built, restored[message], written.ids[at:stop]):
                    at = self._stand(built, restored[message], written.ids, stop)
                    break
                self._append(built, written, at, at + 1)
                at += 1
        self._append(built, written, at, len(written.ids))
        digest = digest_json([self._digest, dict(kwargs)])
        return Prompt(ids=tuple(built.ids), origins=built.spans(), images=(), template_digest=digest)

    def encode_answer(
        self,
        message: Message,
        conversation: Conversation,
        *,
        clock: float = 0.0,
        kwargs: Mapping[str, JsonValue] | None = None,
    ) -> tuple[int, ...]:
        """Ids of `message` as the package says that the model samples it; see `ChatRenderer.encode_answer`."""
        last = len(conversation.messages)
        whole = Conversation(messages=(*conversation.messages, message), tools=conversation.tools)
        written = self._write(whole, kwargs or {}, generate=False)
        ids = [written.ids[i] for i in range(len(written.ids)) if _is_answer(written, i, last)]
        if not ids:
            raise TemplateError(f"the format {self._package} writes nothing that a model samples for this answer")
        return tuple(ids) if ids[-1] in self._stop_ids else (*ids, self._stop_ids[0])

    def _make(self, kwargs: Mapping[str, JsonValue]) -> Any:
        try:
            return renderers.create_renderer(self._tokenizer, self._config(**kwargs))
        except Exception as error:  # the package raises whatever its parts raise
            raise TemplateError(f"renderers {VERSION}, {self._package}: {type(error).__name__}: {error}") from error

    def _write(self, conversation: Conversation, kwargs: Mapping[str, JsonValue], *, generate: bool) -> _Tokens:
        if any(isinstance(part, Image) for message in conversation.messages for part in message.parts):
            raise TemplateError(f"the format {self._package} takes no images here; use the chat template")
        given = [msgspec.to_builtins(conversation), dict(kwargs)]
        if any(_MARK in text for text in strings_in(given)):
            raise TemplateError(
                "the conversation holds U+10FFFD, which this renderer cannot write; use the chat template"
            )
        forms: list[Any] = [
            self._plain(form) for form in message_forms(conversation.messages, Shape(no_content="empty"))
        ]
        tools = [self._plain(tool_form(tool)) for tool in conversation.tools]
        if self._choices[self._name(conversation)].form.name == "kimi":
            _number_calls(forms)
        made = self._make({**kwargs})
        try:
            found = made.render(forms, tools=tools or None, add_generation_prompt=generate)
        except Exception as error:  # the package raises whatever its parts raise
            raise TemplateError(f"renderers {VERSION}, {self._package}: {type(error).__name__}: {error}") from error
        return _Tokens(list(found.token_ids), list(found.message_indices), list(found.sampled_mask))

    def _plain(self, value: Any) -> Any:
        """JSON without origins, in which no text spells an added token, whole or at an end."""
        if isinstance(value, str):
            return self._marked(str.__str__(value))
        if isinstance(value, Mapping):
            return {self._plain(key): self._plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        return value

    def _marked(self, text: str) -> str:
        for token in self._added:
            if token in text:
                text = text.replace(token, token[0] + _MARK + token[1:])
            if any(text.endswith(token[:size]) for size in range(1, len(token))):
                text += _MARK
            if any(text.startswith(token[-size:]) for size in range(1, len(token))):
                text = _MARK + text
        return text

    def _append(self, built: PromptIds, written: _Tokens, start: int, stop: int) -> None:
        for i in range(start, stop):
            message = written.messages[i]
            # What the package does not tell apart from a message's text counts as the message's.
            origin = TEMPLATE if message < 0 or written.ids[i] in self._codec.added else message
            built.encoded(Encoded((written.ids[i],), ((0, 1),)), [origin])

    def _may_stand(self, built: PromptIds, call: ModelCall, rendered: Sequence[int]) -> bool:
        """Condition 2 of the restoring rule, and that the ids so far, with what opened the answer, are C's prompt."""
        sampled, asked = call.sampled_ids, call.prompt.ids
        if not may_restore(call) or not set(self._stop_ids).isdisjoint(sampled[:-1]):
            return False
        if list(asked[: len(built.ids)]) != built.ids:
            return False
        opening = self.decode(asked[len(built.ids) :])
        think, end_think = self._style(call.conversation).thought
        if opening.replace(think, "", 1).replace(end_think, "", 1).strip():
            return False
        before = self.decode(built.ids[-16:])
        return same_message(self._read(call, rendered, before), self._read(call, sampled, before + opening))

    def _read(self, call: ModelCall, ids: Sequence[int], before: str) -> Message:
        style, form = self._style(call.conversation), self._choices[self._name(call.conversation)].form
        types = types_of(call.conversation.tools) if form.typed else ()
        opened = style.thinking and opens_thought(before, style.thought)
        parser = IdParser(self._codec, self._stop_ids, form.grammar(style, thought_open=opened, seed="", types=types))
        parser.feed(ids)
        return parser.finish()[1]

    def _stand(self, built: PromptIds, call: ModelCall, ids: Sequence[int], stop: int) -> int:
        """Append what C saw and sampled; the place in `ids` that follows."""
        rest = call.prompt.ids[len(built.ids) :]
        built.encoded(Encoded(rest, ((0, 1),) * len(rest)), [TEMPLATE])
        sampled = call.sampled_ids
        closing = stop - 1 if ids[stop - 1] in self._stop_ids else stop
        if sampled and sampled[-1] in self._stop_ids:
            if closing < len(ids) and sampled[-1] == ids[closing]:
                built.sampled(call.call_id, sampled)
                return closing + 1
            sampled = sampled[:-1]
        built.sampled(call.call_id, sampled)
        return closing


class _Tokenizer:
    """What the package asks of a tokenizer."""

    unk_token_id = None
    name_or_path = "openforgerl"

    def __init__(self, codec: TokenCodec, eos_token_id: int) -> None:
        self._codec = codec
        self.eos_token_id = eos_token_id

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Ids of the package's own text and of marked data between; only the former can be structure."""
        ids: list[int] = []
        for piece in self._codec.split(text, [(0, len(text))]):
            part = text[piece.start : piece.stop]
            if piece.token is not None:
                ids.append(piece.token.id)
            else:
                ids.extend(self._codec.encode(part.replace(_MARK, ""), (), first=False).ids)
        return ids

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """Text of an id or of several."""
        return self._codec.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Ids of tokens by their exact content, None for those that are none."""
        if isinstance(tokens, str):
            return self._codec.id_of(tokens)
        return [self._codec.id_of(token) for token in tokens]


def _number_calls(forms: Sequence[Any]) -> None:
    """Give calls the ids that Kimi writes: its format has no other place for their names."""
    names: dict[str, str] = {}
    for form in forms:
        for call in form.get("tool_calls", ()):
            given, call["id"] = call["id"], f"functions.{call['function']['name']}:{len(names)}"
            names[given] = call["id"]
        if form.get("tool_call_id") in names:
            form["tool_call_id"] = names[form["tool_call_id"]]


def _is_answer(written: _Tokens, i: int, message: int) -> bool:
    return i < len(written.ids) and written.messages[i] == message and written.sampled[i]


def _name_of(found: object) -> str:
    fields: Any = getattr(found, "model_fields", {})
    name = fields["name"].default if "name" in fields else None
    return name if isinstance(name, str) and name not in ("auto", "default", "custom") else ""
