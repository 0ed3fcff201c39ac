"""Qwen3-Coder and Qwen 3.5 (also Nemotron 3): `<function=NAME>` with `<parameter=KEY>` inside `<tool_call>`.

Source: the chat templates, and the tool parser that Qwen3-Coder ships: one newline at each end of a value is the
template's, types come from the schema, a parameter that no schema describes is text.
"""

from __future__ import annotations

import re

from openforgerl.rendering.answers import END_THINK, THINK, Style
from openforgerl.rendering.schemas import ParameterTypes
from openforgerl.rendering.tags import TagGrammar, Tags

_TAGS = Tags(
    open="<tool_call>",
    close="</tool_call>",
    head=re.compile(r"<function=(?P<name>[^<>\n]+)>"),
    parameter=re.compile(r"<parameter=(?P<key>[^<>\n]+)>"),
    end_value="</parameter>",
    end_call="</function>",
    newlines=True,
)


class QwenXmlForm:
    """Calls as `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    name = "qwen-xml"
    marks = frozenset({THINK, END_THINK, _TAGS.open, _TAGS.close})
    typed = True
    goes_on = ""
    forced = "<tool_call>\n<function="

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`."""
        return (self.forced, "", "") if name is None else (self.forced, name, ">\n")

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> TagGrammar:
        """See `AnswerForm.grammar`."""
        return TagGrammar(style, tags=_TAGS, thought_open=thought_open, seed=seed, types=types)
