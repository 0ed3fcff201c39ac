"""DeepSeek V3, R1 and V3.1: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

Source: the chat templates. V3 and R1 write `function<｜tool▁sep｜>NAME` and the arguments in a ```json fence; V3.1
writes `NAME<｜tool▁sep｜>ARGUMENTS`.
"""

from __future__ import annotations

from openforgerl.rendering.answers import END_THINK, THINK, Style
from openforgerl.rendering.fenced import Fence, FenceGrammar
from openforgerl.rendering.schemas import ParameterTypes

_OPEN, _BEGIN, _SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_END, _CLOSE = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_MARKS = frozenset({THINK, END_THINK, _OPEN, _BEGIN, _SEPARATOR, _END, _CLOSE})


class DeepseekForm:
    """`fenced`: V3 and R1; otherwise V3.1."""

    marks = _MARKS
    typed = False
    goes_on = ""

    def __init__(self, *, fenced: bool) -> None:
        self.name = "deepseek-v3" if fenced else "deepseek-v3.1"
        self._fence = Fence(open=_OPEN, begin=_BEGIN, separator=_SEPARATOR, end=_END, close=_CLOSE, fenced=fenced)
        self.forced = _OPEN + _BEGIN + (f"function{_SEPARATOR}" if fenced else "")

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`."""
        if name is None:
            return self.forced, "", ""
        return self.forced, name, "\n```json\n" if self._fence.fenced else _SEPARATOR

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> FenceGrammar:
        """See `AnswerForm.grammar`."""
        return FenceGrammar(style, fence=self._fence, thought_open=thought_open, seed=seed)
