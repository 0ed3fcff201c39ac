"""From deltas to what a client has in hand: stop strings cut the visible text, pieces become one message."""

from __future__ import annotations

from collections.abc import Sequence

from openforgerl.errors import ExactnessError
from openforgerl.types import Message, MessageDelta, Part, Reasoning, Role, Text, ToolCall


class StopStrings:
    """Ends the visible text before the first stop string, wherever deltas cut it.

    Matched in text only: a stop string inside a thought or a tool call's arguments is the model's own business.
    Text that may turn out to begin a stop string is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text, or None."""

    def feed(self, deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
        """What may be shown now; nothing more once a stop string was hit."""
        if not self._stops:
            return list(deltas)
        shown: list[MessageDelta] = []
        for delta in deltas:
            if self.hit is not None:
                break
            if delta.kind == "text":
                shown += _text(self._take(delta.text))
            else:
                shown += self.flush()
                shown.append(delta)
        return shown

    def flush(self) -> list[MessageDelta]:
        """What was held back and is now known not to be a stop string."""
        held, self._held = self._held, ""
        return _text(held)

    def _take(self, text: str) -> str:
        seen = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if found:
            # The one that is complete first, so that the cuts do not matter; of those, the longest.
            _, at, self.hit = min(found)
            self._held = ""
            return seen[:at]
        keep = self._undecided(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def _undecided(self, seen: str) -> int:
        """Length of the longest end of `seen` that begins a stop string."""
        longest = min(len(seen), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(seen[-length:]) for stop in self._stops):
                return length
        return 0


class MessageBuilder:
    """Puts deltas together: all reasoning in one part, all text in one part, calls in order.

    That is all a chat-like dialect can say, and so the form in which the client will echo it.
    """

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def add(self, deltas: Sequence[MessageDelta]) -> None:
        """More pieces, in order."""
        for delta in deltas:
            if delta.kind == "text":
                self._text.append(delta.text)
            elif delta.kind == "reasoning":
                self._reasoning.append(delta.text)
            elif delta.kind == "call":
                if delta.call_index != len(self._calls):
                    raise ExactnessError(f"tool call {delta.call_index} opened after {len(self._calls)} calls")
                self._calls.append((delta.call_id, delta.text, []))
            else:
                self._calls[delta.call_index][2].append(delta.text)

    @property
    def empty(self) -> bool:
        """Whether nothing was added yet."""
        return not (self._reasoning or self._text or self._calls)

    def message(self) -> Message:
        """The assistant message so far."""
        parts: list[Part] = []
        if reasoning := "".join(self._reasoning):
            parts.append(Reasoning(reasoning))
        if text := "".join(self._text):
            parts.append(Text(text))
        calls = (ToolCall(id=call_id, name=name, arguments="".join(pieces)) for call_id, name, pieces in self._calls)
        return Message(role=Role.ASSISTANT, parts=tuple(parts), tool_calls=tuple(calls))

    def expect(self, whole: Message) -> None:
        """Check that the pieces sent are the message parsed as a whole; ExactnessError otherwise."""
        sent = self.message()
        if (sent.text, sent.reasoning, sent.tool_calls) != (whole.text, whole.reasoning, whole.tool_calls):
            raise ExactnessError("the pieces streamed to the client differ from the whole parse of the sampled ids")


def _text(text: str) -> list[MessageDelta]:
    return [MessageDelta(kind="text", text=text)] if text else []
