"""The restoring rule (DESIGN §5): an echoed assistant turn becomes the ids that were sampled, or plain data.

The caller has checked condition 1 (the echo equals what we sent for call C). Here a turn is restored iff

* C was delivered and ended by itself or by length (a stop string or an abort is never restored);
* the turn can be located in the template's own rendering of this conversation;
* condition 2: that rendering, parsed, equals C's sampled ids, parsed;
* the ids so far, with the turn's header, are exactly C's prompt, and the images in it are C's;
* C sampled no image placeholder: no image stands behind one that was sampled, and no engine could take it again; and
* C sampled nothing beyond a token that ends a turn. That token is its last, and gives way to the template's own.

The one about C's prompt makes every restored prompt an extension of C's own exchange, id by id. Where it fails, because
the template now writes something earlier differently or an earlier turn was not restored, the true rendering
stands from the first differing id on, and a branch starts there; later turns that were sampled on that
branch are restored on it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

import msgspec

from openforgerl.conversation import same_message
from openforgerl.rendering.answers import Style
from openforgerl.rendering.forms import Choice
from openforgerl.rendering.images import MeasuredImage
from openforgerl.rendering.layout import Layout, Turn, Turns
from openforgerl.rendering.parsing import IdParser, opens_thought
from openforgerl.rendering.remembered import Remembered
from openforgerl.rendering.schemas import ParameterTypes, types_of
from openforgerl.rendering.tokenizer import Encoded, TokenCodec
from openforgerl.rendering.traced import TEMPLATE, UNKNOWN
from openforgerl.types import CallStatus, FinishReason, ModelCall, OriginSpan, PlacedImage, Prompt

_PROMPTS_HELD = 128 * 2**20
"""Bytes of earlier prompts with their text that are remembered."""
_ANSWERS_HELD = 32 * 2**20
"""Bytes of turns that were compared with what was sampled."""
_LOOK_BACK = 4
"""How many of a history's last answers are tried for a remembered prompt."""
_TAIL_IDS = 96
"""A generation header and what opens or skips a thought, or forces a call, are shorter than this."""


class PromptIds:
    """Ids with their origins, growing from left to right."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.images: list[PlacedImage] = []
        self._before: tuple[OriginSpan, ...] = ()
        self._written: list[tuple[int, int]] = []  # (stop, origin) of text, merged
        self._calls: dict[int, str] = {}  # stop of sampled ids → call

    @classmethod
    def after(cls, prompt: Prompt) -> PromptIds:
        """The ids of an earlier prompt, to go on from."""
        built = cls()
        built.ids += prompt.ids
        built.images += prompt.images
        built._before = prompt.origins
        return built

    def encoded(self, encoded: Encoded, origins: Sequence[int]) -> None:
        """Append ids of text; `origins` has one entry per character that the offsets count."""
        if not encoded.ids:
            return
        if origins and origins.count(origins[0]) == len(origins):
            self.ids += encoded.ids
            self._wrote(origins[0])
            return
        for token_id, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            self.ids.append(token_id)
            # One foreign character makes the id data: a template's id holds nothing but the template's text.
            wrote = next((o for o in origins[start:stop] if o != TEMPLATE), TEMPLATE)
            self._wrote(wrote)

    def image(self, token_id: int, image: MeasuredImage) -> None:
        """Append an image's placeholders. They stand for what the message holds, so they are its data."""
        placed = PlacedImage(sha256=image.sha256, start=len(self.ids), count=image.count, grid=image.grid)
        self.images.append(placed)
        self.ids.extend([token_id] * image.count)
        self._wrote(image.message)

    def _wrote(self, origin: int) -> None:
        if self._written and self._written[-1][1] == origin and self._written[-1][0] not in self._calls:
            self._written.pop()
        self._written.append((len(self.ids), origin))

    def sampled(self, call_id: str, ids: Sequence[int]) -> None:
        """Append ids of a call's answer, from its beginning."""
        if ids:
            self.ids.extend(ids)
            self._written.append((len(self.ids), UNKNOWN))
            self._calls[len(self.ids)] = call_id

    def spans(self) -> tuple[OriginSpan, ...]:
        """Origins so far: ordered, disjoint, complete."""
        found = list(self._before)
        start = found[-1].stop if found else 0
        for stop, wrote in self._written:
            call_id = self._calls.get(stop)
            if call_id is not None:
                found.append(OriginSpan(start=start, stop=stop, kind="call", call_id=call_id, offset=0))
            elif wrote == TEMPLATE:
                found.append(OriginSpan(start=start, stop=stop, kind="template"))
            else:
                message = wrote if wrote >= 0 else None
                found.append(OriginSpan(start=start, stop=stop, kind="data", message=message))
            start = stop
        return tuple(found)


class _Seen:
    """What a prompt was made of."""

    def __init__(self, prompt: Prompt, layout: Layout) -> None:
        self.prompt = prompt
        self.layout = layout
        self._images = [(image.sha256, image.count, image.grid) for image in prompt.images]

    def stands_before(self, turn: Turn, layout: Layout, opening: str) -> bool:
        """Whether the same text of the same writers, with the same images, stands before a turn with that opening."""
        return (
            self.layout.text == layout.text[: turn.start] + opening
            and layout.begins_as(self.layout, turn.start)
            and layout.images_before(turn.start) == self._images
        )


def _name_of(ids: tuple[int, ...]) -> Hashable:
    """A short name for many ids; those that share one are told apart by comparing them."""
    middle = len(ids) // 2
    return len(ids), ids[middle : middle + 16], ids[-16:]


class Restorer:
    """Builds the ids of one rendering, restoring what may be restored."""

    def __init__(self, codec: TokenCodec, choice: Choice, turns: Turns, *, placeholder: int | None = None) -> None:
        """`placeholder`: the id that stands for images, in models that take any."""
        self._codec = codec
        self._placeholder = placeholder
        self._form = choice.form
        self._style = choice.style
        self._turns = turns
        think, end = map(re.escape, choice.thought)
        forced = rf"(?P<call>{re.escape(choice.form.forced)}.*)?" if choice.form.forced else "(?P<call>)"
        self._openings = re.compile(rf"\s*(?:{think}\s*)?(?:{end}\s*)?{forced}", re.DOTALL)
        # Every request asks again about every earlier turn; a pure question, so its answer may be kept.
        self._answers: Remembered[Hashable, bool] = Remembered(_ANSWERS_HELD)
        self._seen: Remembered[Hashable, _Seen] = Remembered(_PROMPTS_HELD)

    def build(self, layout: Layout, restored: Mapping[int, ModelCall], header: str) -> PromptIds:
        """The prompt's ids. `restored`: assistant message → the call whose answer it canonically equals.

        `header`: what the template writes before an assistant turn, without what opens a thought.
        """
        order = sorted(restored)
        built, at, done = self._resumed(layout, restored, header, order)
        for message in order[done:]:
            call = restored[message]
            if not may_restore(call) or not self._is_answer(call.sampled_ids):
                continue
            tail = self._codec.decode(call.prompt.ids[-_TAIL_IDS:])
            # The earliest first: to try a turn is to write what stands before it.
            for turn in sorted(layout.turns(message, header, self._turns), key=lambda turn: turn.start):
                if turn.start < _start(layout, at):
                    continue
                at, adopted = self._restore(built, layout, at, turn, call, tail)
                if adopted:
                    break
        self._advance(built, layout, at, len(layout.text) + 1)
        return built

    def remember(self, prompt: Prompt, layout: Layout) -> None:
        """What `prompt` was made of, so that a prompt that continues it need not be made from its beginning."""
        if prompt.ids and prompt.origins:
            # A character is a byte or more; ids are counted by their pointers, pieces and runs as the objects they are.
            size = len(layout.text) + 8 * len(prompt.ids) + 100 * len(layout.pieces) + 80 * len(layout.runs)
            self._seen.put(_name_of(prompt.ids), _Seen(prompt, layout), size)

    def earlier(self, restored: Mapping[int, ModelCall]) -> Layout | None:
        """The layout of the last remembered prompt that was answered with one of these turns."""
        for message in sorted(restored, reverse=True)[:_LOOK_BACK]:
            seen = self._seen.get(_name_of(restored[message].prompt.ids))
            if seen is not None:
                return seen.layout
        return None

    def forget(self) -> None:
        """Drop every remembered prompt: the next ones are made from their beginnings."""
        self._seen.clear()

    def _resumed(
        self, layout: Layout, restored: Mapping[int, ModelCall], header: str, order: Sequence[int]
    ) -> tuple[PromptIds, int, int]:
        """The ids up to and with the last turn that a remembered prompt was answered with; the next piece, and how
        many of the turns in `order` lie before it.

        The prompt of that call was made by `build` of the very text, by the very writers, that stands here before the
        turn, and of the same answers: `restored` says that all before is what the call was asked with. So `build` would
        come to its ids again.
        """
        for done in range(len(order), max(0, len(order) - _LOOK_BACK), -1):
            message = order[done - 1]
            call = restored[message]
            seen = self._seen.get(_name_of(call.prompt.ids))
            if seen is None or seen.prompt != call.prompt or not call.sampled_ids:
                continue
            if not may_restore(call) or not self._is_answer(call.sampled_ids):
                continue
            tail = self._codec.decode(call.prompt.ids[-_TAIL_IDS:])
            for turn in layout.turns(message, header, self._turns):
                opening = self._opening(tail, turn.lead)
                if seen.stands_before(turn, layout, opening) and self._agrees(layout, turn, call, opening):
                    built = PromptIds.after(call.prompt)
                    return built, self._adopt(built, layout, turn, call), done
        return PromptIds(), 0, 0

    def _agrees(self, layout: Layout, turn: Turn, call: ModelCall, opening: str) -> bool:
        """Condition 2 for this turn and this call's answer; asked again with every request, so it is remembered."""
        tools = call.conversation.tools
        style = msgspec.structs.replace(self._style, calls=self._style.calls and bool(tools))
        types = types_of(tools) if self._form.typed else ()
        rendered = layout.text[turn.start : turn.stop]
        key = (rendered, call.sampled_ids, style, opening, types)
        found = self._answers.get(key)
        if found is None:
            found = self._compare(rendered, call.sampled_ids, style, opening, types)
            self._answers.put(key, found, len(rendered) + 8 * len(call.sampled_ids) + 500)
        return found

    def _is_answer(self, sampled: Sequence[int]) -> bool:
        """Whether ids are one turn: no image stands behind a placeholder, and what ends a turn stands only last."""
        return self._placeholder not in sampled and self._turns.stop_ids.isdisjoint(sampled[:-1])

    def _restore(
        self, built: PromptIds, layout: Layout, at: int, turn: Turn, call: ModelCall, tail: str
    ) -> tuple[int, bool]:
        """Append the answer of `call` as this turn if it may stand there; the next piece, and whether it did.

        `tail`: how the text of the call's prompt ends.
        """
        opening = self._opening(tail, turn.lead)
        if not self._agrees(layout, turn, call, opening):
            return at, False
        at = self._advance(built, layout, at, turn.start)
        before, origins = self._until(layout, at, turn, opening)
        if self._forces(opening):
            before, origins = self._asked(built, call, layout.text[_start(layout, at) : turn.start] + opening)
        if not self._stands_at(built, before, call):
            return at, False
        built.encoded(before, origins)
        return self._adopt(built, layout, turn, call), True

    def _stands_at(self, built: PromptIds, before: Encoded, call: ModelCall) -> bool:
        """Whether the ids so far and those before the turn are the call's own prompt."""
        asked = call.prompt.ids
        return (
            len(asked) == len(built.ids) + len(before.ids)
            and asked[len(built.ids) :] == before.ids
            and list(asked[: len(built.ids)]) == built.ids
            and call.prompt.images == tuple(built.images)
        )

    def _advance(self, built: PromptIds, layout: Layout, at: int, start: int) -> int:
        """Append the pieces from `at` that end before the turn's text; the header's own piece stays."""
        while at < len(layout.pieces):
            piece = layout.pieces[at]
            # A turn's last ordinary piece before its text is encoded again together with what opened a thought.
            if piece.stop > start or (piece.stop == start and piece.token is None):
                break
            image = layout.images.get(at)
            if image is not None and piece.token is not None:
                built.image(piece.token.id, image)
            else:
                text = layout.text[piece.start : piece.stop]
                encoded = self._codec.encode_part(text, piece.token, first=not built.ids and piece.start == 0)
                built.encoded(encoded, layout.origins(piece.start, piece.stop))
            at += 1
        return at

    def _until(self, layout: Layout, at: int, turn: Turn, opening: str) -> tuple[Encoded, list[int]]:
        """Ids and origins of the text from piece `at` to the turn, with what opened the thought of its answer."""
        begin = min(_start(layout, at), turn.start)
        before = layout.text[begin : turn.start]
        text = before + opening
        encoded = self._codec.encode(text, [(len(before), len(text))], first=begin == 0)
        return encoded, layout.origins(begin, turn.start) + [TEMPLATE] * len(opening)

    def _asked(self, built: PromptIds, call: ModelCall, text: str) -> tuple[Encoded, list[int]]:
        """The rest of the call's own prompt, if it spells `text`: a forced opening was encoded by itself."""
        rest = call.prompt.ids[len(built.ids) :]
        if self._codec.decode(rest) != text:
            return Encoded((), ()), []
        return Encoded(rest, ((0, 1),) * len(rest)), [TEMPLATE]

    def _opening(self, tail: str, lead: str) -> str:
        """What stands after `lead` at the end of a prompt: nothing, an open or skipped thought, a forced call."""
        _, found, after = tail.rpartition(lead) if lead else ("", "", "")
        return after if found and self._openings.fullmatch(after) else ""

    def _adopt(self, built: PromptIds, layout: Layout, turn: Turn, call: ModelCall) -> int:
        """Append what was sampled; the index of the piece that follows."""
        token = layout.pieces[turn.stop_piece].token
        sampled = call.sampled_ids
        if sampled and sampled[-1] in self._turns.stop_ids:
            if token is not None and sampled[-1] == token.id:
                built.sampled(call.call_id, sampled)
                return turn.stop_piece + 1
            sampled = sampled[:-1]
        built.sampled(call.call_id, sampled)
        return turn.stop_piece

    def _compare(
        self, rendered: str, sampled: tuple[int, ...], style: Style, opening: str, types: ParameterTypes
    ) -> bool:
        """Condition 2: whether the template's text of a turn and the sampled ids are the same message.

        What the prompt had opened for the answer, a thought or a forced call, is part of the message.
        """
        grammar = self._form.grammar(style, thought_open=False, seed="", types=types)
        grammar.write(rendered)
        _, shown = grammar.end()
        opened = style.thinking and opens_thought(opening, style.thought)
        answered = self._form.grammar(style, thought_open=opened, seed="", types=types)
        answered.write(self._forces(opening))
        parser = IdParser(self._codec, self._turns.stop_ids, answered)
        parser.feed(sampled)
        return same_message(shown, parser.finish()[1])

    def _forces(self, opening: str) -> str:
        """The part of what a prompt opened that belongs to a forced call, or ""."""
        found = self._openings.fullmatch(opening)
        return (found and found["call"]) or ""


def may_restore(call: ModelCall) -> bool:
    """Whether the answer was delivered whole: ended by itself or by length."""
    return call.status is CallStatus.COMPLETE and call.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def _start(layout: Layout, at: int) -> int:
    return layout.pieces[at].start if at < len(layout.pieces) else len(layout.text)
