"""What a chat template takes and writes, found out by rendering small conversations with it.

Everything here is evidence: the answer of the template to a question, not a model's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from openforgerl.errors import TemplateError
from openforgerl.rendering.answers import AnswerForm
from openforgerl.rendering.layout import stretches_of
from openforgerl.rendering.shapes import Shape, message_forms, tool_form
from openforgerl.rendering.template import ChatTemplate
from openforgerl.rendering.tokenizer import Piece, TokenCodec
from openforgerl.rendering.traced import TEMPLATE, UNKNOWN, Traced, expand, runs_of
from openforgerl.types import Image, JsonValue, Message, Reasoning, Role, Text, ToolCall, ToolSpec

_ID = "call0123456789abcdef01234567"
_TOOL = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {"at": {}}})
_SHOWN = ("look", "here", "Seen.")
_NO_CONTENT: tuple[Literal["absent", "null", "empty"], ...] = ("absent", "null", "empty")
_ASKED = Message(role=Role.USER, parts=(Text("Question."),))
_SEEN = Message(role=Role.TOOL, parts=(Text("Seen."),), tool_call_id=_ID)


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out."""

    shape: Shape
    between: frozenset[int]
    """Added tokens that the template writes between turns."""
    after_text: int | None
    """The token that closes an assistant's text, where another turn follows."""
    after_calls: int | None
    """The token that closes an assistant's calls, where their results follow."""


def probe(
    template: ChatTemplate,
    special: Mapping[str, JsonValue],
    codec: TokenCodec,
    form: AnswerForm,
    placeholder: int | None,
) -> Probed:
    """Ask a template. `special`: its variables for special tokens. `placeholder`: the id that stands for an image."""
    asking = _Asking(template, special, codec, frozenset() if form.goes_on else form.marks)
    shape = asking.shape()
    if placeholder is not None and not asking.shows_result(placeholder, shape):
        shape = msgspec.structs.replace(shape, move_images=True)
    said = Message(role=Role.ASSISTANT, parts=(Text("Answer."),))
    between, after_text = asking.turns((_ASKED, said, _ASKED), shape, "Answer.")
    _, after_calls = asking.turns((_ASKED, _calling('{"at": "here"}'), _SEEN), shape, "here")
    return Probed(shape=shape, between=between, after_text=after_text, after_calls=after_calls)


def turn_tokens(
    probed: Probed, source: str, special: Collection[str], codec: TokenCodec, form: AnswerForm
) -> frozenset[int]:
    """Ids that end a turn when the policy samples them: they are structure, and no answer holds them.

    They are the tokens that the template writes between turns, the tokenizer's named special tokens, and, for
    forms whose calls are known, every other special token that the template's source spells; never a form's marks.
    """
    found = set(probed.between)
    for token in codec.added.values():
        spelled = token.special and form.forced and token.content in source
        if spelled or token.content in special:
            found.add(token.id)
    return frozenset(i for i in found if codec.added[i].content.strip() not in form.marks)


class _Asking:
    def __init__(
        self, template: ChatTemplate, special: Mapping[str, JsonValue], codec: TokenCodec, marks: frozenset[str]
    ) -> None:
        self._template = template
        self._special = special
        self._codec = codec
        self._marks = marks

    def render(self, messages: Sequence[Message], shape: Shape, *, generate: bool = False) -> Traced | None:
        """The text, None if the template refuses the conversation."""
        given: dict[str, JsonValue] = {
            **self._special,
            "messages": list(message_forms(messages, shape)),
            "tools": [tool_form(_TOOL)],
            "documents": None,
            "add_generation_prompt": generate,
        }
        try:
            return self._template.render(given, 0.0)
        except TemplateError:
            return None

    def shape(self) -> Shape:
        """The first shape, from the usual on, in which the template writes a call and its result."""
        found = Shape()
        loop = (_ASKED, _calling('{"at": "here"}'), _SEEN)
        for text_arguments in (False, True):
            for no_content in _NO_CONTENT:
                for short_ids in (False, True):
                    shape = Shape(no_content=no_content, text_arguments=text_arguments, short_ids=short_ids)
                    text = self.render(loop, shape)
                    if text is not None and "None" not in text and all(word in text for word in _SHOWN):
                        return self._other(shape, found)
        return found

    def _other(self, shape: Shape, usual: Shape) -> Shape:
        """`shape` with the rest found out, where even the usual shape holds a call."""
        broken = (_ASKED, _calling('{"at": "he'), _SEEN)
        if self.render(broken, shape) is None:
            wrapped = msgspec.structs.replace(shape, only_objects=True)
            shape = wrapped if self.render(broken, wrapped) is not None else shape
        parts = (Reasoning("Thought."), Text("Said."))
        both = (_ASKED, msgspec.structs.replace(_calling('{"at": "here"}'), parts=parts), _SEEN)
        if self.render(both, shape) is None:
            joined = msgspec.structs.replace(shape, one_thought=True)
            shape = joined if self.render(both, joined) is not None else shape
        return shape if shape != usual else usual

    def shows_result(self, placeholder: int, shape: Shape) -> bool:
        """Whether the template writes the image in a tool's result; some only know images in user messages."""
        seen = msgspec.structs.replace(_SEEN, parts=(Text("Seen:"), Image(sha256="", media_type="")))
        shown = self.render((_ASKED, _calling("{}"), seen), shape, generate=True)
        if shown is None:
            return False
        return sum(piece.token is not None and piece.token.id == placeholder for piece in self.pieces(shown)) == 1

    def pieces(self, text: Traced) -> list[Piece]:
        """The text, split at what may be structure."""
        return self._codec.split(str.__str__(text), stretches_of(runs_of(text), (TEMPLATE, UNKNOWN)))

    def turns(self, messages: Sequence[Message], shape: Shape, last: str) -> tuple[frozenset[int], int | None]:
        """Added tokens between the three messages' own texts, and what closes the second, which ends in `last`."""
        text = self.render(messages, shape)
        if text is None:
            return frozenset(), None
        origins = expand(text)
        if any(index not in origins for index in range(3)):
            return frozenset(), None
        start = len(origins) - origins[::-1].index(0)
        stop = len(origins) - origins[::-1].index(2)
        tokens = [(piece.start, piece.token.id) for piece in self.pieces(text) if piece.token is not None]
        found = frozenset(i for at, i in tokens if start <= at < stop)
        said = str.__str__(text).find(last, start)
        closing = next((i for at, i in tokens if at >= said and self._closes(i)), None)
        return found, closing

    def _closes(self, token_id: int) -> bool:
        content = self._codec.added[token_id].content.strip()
        return bool(content) and content not in self._marks


def _calling(arguments: str) -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id=_ID, name="look", arguments=arguments),))
