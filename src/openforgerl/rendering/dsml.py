"""DeepSeek V3.2: `<｜DSML｜invoke name="NAME">` with parameters that say themselves whether they are text.

Source: the chat template: `string="true"` is text as it stands, `string="false"` is JSON.
"""

from __future__ import annotations

import re

from openforgerl.rendering.answers import END_THINK, THINK, Style
from openforgerl.rendering.schemas import ParameterTypes
from openforgerl.rendering.tags import TagGrammar, Tags

_MARK = "｜DSML｜"
_TAGS = Tags(
    open=f"<{_MARK}function_calls>",
    close=f"</{_MARK}function_calls>",
    head=re.compile(rf'<{_MARK}invoke name="(?P<name>[^<>"\n]+)">'),
    parameter=re.compile(rf'<{_MARK}parameter name="(?P<key>[^<>"\n]+)" string="(?P<text>true|false)">'),
    end_value=f"</{_MARK}parameter>",
    end_call=f"</{_MARK}invoke>",
)


class DsmlForm:
    """Calls in DSML tags."""

    name = "dsml"
    marks = frozenset({THINK, END_THINK, _MARK})
    typed = False
    goes_on = ""
    forced = f'<{_MARK}function_calls>\n<{_MARK}invoke name="'

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`."""
        return (self.forced, "", "") if name is None else (self.forced, name, '">\n')

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> TagGrammar:
        """See `AnswerForm.grammar`."""
        return TagGrammar(style, tags=_TAGS, thought_open=thought_open, seed=seed, types=())
