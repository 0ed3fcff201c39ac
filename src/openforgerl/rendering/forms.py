"""Which form a model's answers have: read off its chat template, or named by the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from openforgerl.errors import InputError
from openforgerl.rendering.answers import END_THINK, THINK, AnswerForm, Reading, Style
from openforgerl.rendering.deepseek import DeepseekForm
from openforgerl.rendering.dsml import DsmlForm
from openforgerl.rendering.glm import GlmForm
from openforgerl.rendering.harmony import HarmonyForm
from openforgerl.rendering.hermes import HermesForm
from openforgerl.rendering.kimi import KimiForm
from openforgerl.rendering.llama import LlamaForm
from openforgerl.rendering.minimax import MinimaxForm
from openforgerl.rendering.mistral import THOUGHT, MistralForm
from openforgerl.rendering.qwen_xml import QwenXmlForm
from openforgerl.rendering.schemas import ParameterTypes


class PlainForm:
    """Text, maybe after a thought; no calls."""

    name = "plain"
    marks = frozenset({THINK, END_THINK, *THOUGHT})
    typed = False
    goes_on = ""
    forced = ""

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """Nothing: no call can be opened."""
        return "", "", ""

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> Reading:
        """See `AnswerForm.grammar`."""
        return Reading(style, opens=(), thought_open=thought_open, seed=seed)


FORMS: Mapping[str, Callable[[], AnswerForm]] = {
    "hermes": HermesForm,
    "qwen-xml": QwenXmlForm,
    "glm": GlmForm,
    "kimi": KimiForm,
    "minimax": MinimaxForm,
    "deepseek-v3": lambda: DeepseekForm(fenced=True),
    "deepseek-v3.1": lambda: DeepseekForm(fenced=False),
    "dsml": DsmlForm,
    "harmony": HarmonyForm,
    "llama": LlamaForm,
    "mistral": lambda: MistralForm(listed=False),
    "mistral-list": lambda: MistralForm(listed=True),
    "plain": PlainForm,
}
"""Every form by the name that configuration takes."""

_EVIDENCE: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>"), ()),
    ("minimax", ("<minimax:tool_call>", "<invoke name="), ()),
    ("dsml", ("｜DSML｜", "function_calls>"), ()),
    ("deepseek-v3", ("<｜tool▁calls▁begin｜>", "```json"), ()),
    ("deepseek-v3.1", ("<｜tool▁calls▁begin｜>",), ()),
    ("kimi", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), ()),
    ("glm", ("<tool_call>", "<arg_key>", "<arg_value>"), ()),
    ("qwen-xml", ("<tool_call>", "<function=", "<parameter="), ()),
    ("hermes", ("<tool_call>", "name"), ("<function=",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral-list", ("[TOOL_CALLS]",), ()),
    ("llama", ('"parameters": ', "<|start_header_id|>", "tool_calls"), ()),
)
"""Form, what its templates hold, what they don't; the first that fits counts."""


class Choice(msgspec.Struct, frozen=True):
    """The form of a model's answers, and why."""

    form: AnswerForm
    thinking: bool
    thought: tuple[str, str]
    evidence: str

    @property
    def style(self) -> Style:
        """What answers may hold while tools are on offer."""
        return Style(thinking=self.thinking, calls=not isinstance(self.form, PlainForm), thought=self.thought)

    def __str__(self) -> str:
        thought = f", thoughts in {self.thought[0]}" if self.thinking else ""
        return f"{self.form.name}{thought} ({self.evidence})"


def choose_form(template: str, named: str = "auto") -> Choice:
    """The form that answers to this template have. `named`: a form of `FORMS`, or `auto` to read it off.

    InputError for a name that is none.
    """
    thought = THOUGHT if THOUGHT[1] in template and END_THINK not in template else (THINK, END_THINK)
    thinking = thought[1] in template
    if named != "auto":
        if named not in FORMS:
            raise InputError(f"answer form {named!r} is unknown; known are auto, {', '.join(FORMS)}")
        return Choice(FORMS[named](), thinking, thought, "named by the configuration")
    for name, needed, barred in _EVIDENCE:
        if all(text in template for text in needed) and not any(text in template for text in barred):
            return Choice(FORMS[name](), thinking, thought, f"the template writes {needed[0]}")
    return Choice(PlainForm(), thinking, thought, "the template writes no calls that are known")
