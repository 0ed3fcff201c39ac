"""GLM 4.5 to 4.7: `<tool_call>NAME` with `<arg_key>` and `<arg_value>` pairs.

Source: the chat templates, and the GLM tool parsers of inference servers: a value is text where the schema says
`string`, else JSON or a Python literal where it is one. Values are verbatim, as the templates write them.
"""

from __future__ import annotations

import re

from openforgerl.rendering.answers import END_THINK, THINK, Style
from openforgerl.rendering.schemas import ParameterTypes
from openforgerl.rendering.tags import TagGrammar, Tags

_TAGS = Tags(
    open="<tool_call>",
    close="</tool_call>",
    head=re.compile(r"\A\s*(?P<name>[^<\s][^<\n]*?)[ \t\r]*(?=[<\n])"),
    parameter=re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    end_value="</arg_value>",
    untyped_json=True,
)
_PAIR = frozenset({"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"})


class GlmForm:
    """Calls as `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    name = "glm"
    marks = frozenset({THINK, END_THINK, _TAGS.open, _TAGS.close, "/nothink"}) | _PAIR
    typed = True
    goes_on = ""
    forced = "<tool_call>"

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`. What follows a name differs between versions, so the model writes it."""
        return self.forced, name or "", ""

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> TagGrammar:
        """See `AnswerForm.grammar`."""
        return TagGrammar(style, tags=_TAGS, thought_open=thought_open, seed=seed, types=types)
