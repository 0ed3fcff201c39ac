"""MiniMax M2: `<invoke name="NAME">` with `<parameter name="KEY">` inside `<minimax:tool_call>`.

Source: the chat template and MiniMax' own parsing example: types come from the schema, a parameter that no schema
describes is text. Values are verbatim, as the template writes them.
"""

from __future__ import annotations

import re

from openforgerl.rendering.answers import END_THINK, THINK, Style
from openforgerl.rendering.schemas import ParameterTypes
from openforgerl.rendering.tags import TagGrammar, Tags

_TAGS = Tags(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    head=re.compile(r'<invoke name="(?P<name>[^<>"\n]+)">'),
    parameter=re.compile(r'<parameter name="(?P<key>[^<>"\n]+)">'),
    end_value="</parameter>",
    end_call="</invoke>",
)


class MinimaxForm:
    """Calls as `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>...`."""

    name = "minimax"
    marks = frozenset({THINK, END_THINK, _TAGS.open, _TAGS.close})
    typed = True
    goes_on = ""
    forced = '<minimax:tool_call>\n<invoke name="'

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`."""
        return (self.forced, "", "") if name is None else (self.forced, name, '">')

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> TagGrammar:
        """See `AnswerForm.grammar`."""
        return TagGrammar(style, tags=_TAGS, thought_open=thought_open, seed=seed, types=types)
