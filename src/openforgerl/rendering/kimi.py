"""Kimi K2: calls in a section of tokens, named `functions.NAME:NUMBER`. Source: the chat templates."""

from __future__ import annotations

from openforgerl.rendering.answers import END_THINK, THINK, Style
from openforgerl.rendering.fenced import Fence, FenceGrammar
from openforgerl.rendering.schemas import ParameterTypes

_FENCE = Fence(
    open="<|tool_calls_section_begin|>",
    begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    close="<|tool_calls_section_end|>",
    prefix="functions.",
)


class KimiForm:
    """Calls as `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>`."""

    name = "kimi"
    marks = frozenset({THINK, END_THINK, _FENCE.open, _FENCE.begin, _FENCE.separator, _FENCE.end, _FENCE.close})
    typed = False
    goes_on = ""
    forced = _FENCE.open + _FENCE.begin + _FENCE.prefix

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`. Kimi numbers the calls of a conversation."""
        if name is None:
            return self.forced, "", ""
        return self.forced, name, f":{earlier}{_FENCE.separator}"

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> FenceGrammar:
        """See `AnswerForm.grammar`."""
        return FenceGrammar(style, fence=_FENCE, thought_open=thought_open, seed=seed)
