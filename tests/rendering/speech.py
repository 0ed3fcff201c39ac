"""Answers in each form, written as the models write them, in the templates' own spacing or in others they allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def said(form: str, text: str = "", calls: Calls = (), *, thought: str = "", opened: bool = False, odd: int = 0) -> str:
    """One answer. `opened`: the prompt has opened a thought. `odd`: 0 is the template's spacing, others differ."""
    if form == "harmony":
        return _harmony(text, calls, thought, odd)
    mark, end = ("[THINK]", "[/THINK]") if form.startswith("mistral") else ("<think>", "</think>")
    gap = ("\n", "", "\n\n")[odd % 3]
    before = ""
    if thought:
        before = ("" if opened else mark) + gap + thought + gap + end + gap
    elif opened:
        before = end + gap
    return before + text + (_BLOCKS[form](calls, odd) if calls else "")


def _json(value: Any, odd: int) -> str:
    spaces = ((", ", ": "), (",", ":"), (" , ", " :  "))[odd % 3]
    return json.dumps(value, separators=spaces, ensure_ascii=bool(odd % 2))


def _bare(value: Any, odd: int) -> str:
    return value if isinstance(value, str) else _json(value, odd)


def _hermes(calls: Calls, odd: int) -> str:
    gap = ("\n", "", "\n\n")[odd % 3]
    blocks = [
        f'{gap}<tool_call>{gap}{{"name": "{n}", "arguments": {_json(a, odd)}}}{gap}</tool_call>' for n, a in calls
    ]
    return "".join(blocks)


def _qwen_xml(calls: Calls, odd: int) -> str:
    gap = "\n" if odd % 2 == 0 else ""
    out = ""
    for name, arguments in calls:
        fields = "".join(
            f"<parameter={key}>\n{_bare(value, odd)}\n</parameter>{gap}" for key, value in arguments.items()
        )
        out += f"{gap}<tool_call>{gap}<function={name}>{gap}{fields}</function>{gap}</tool_call>"
    return out


def _glm(calls: Calls, odd: int) -> str:
    gap = "\n" if odd % 2 == 0 else ""
    out = ""
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{gap}<arg_value>{_bare(value, odd)}</arg_value>{gap}"
            for key, value in arguments.items()
        )
        out += f"{gap}<tool_call>{name}{gap}{pairs}</tool_call>"
    return out


def _minimax(calls: Calls, odd: int) -> str:
    gap = "\n" if odd % 2 == 0 else ""
    out = ""
    for name, arguments in calls:
        fields = "".join(
            f'<parameter name="{key}">{_bare(value, odd)}</parameter>{gap}' for key, value in arguments.items()
        )
        out += f'<invoke name="{name}">{gap}{fields}</invoke>{gap}'
    return f"{gap}<minimax:tool_call>{gap}{out}</minimax:tool_call>"


def _dsml(calls: Calls, odd: int) -> str:
    gap = "\n" if odd % 2 == 0 else ""
    out = ""
    for name, arguments in calls:
        fields = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_bare(value, odd)}'
            f"</｜DSML｜parameter>{gap}"
            for key, value in arguments.items()
        )
        out += f'<｜DSML｜invoke name="{name}">{gap}{fields}</｜DSML｜invoke>{gap}'
    return f"\n\n<｜DSML｜function_calls>{gap}{out}</｜DSML｜function_calls>"


def _deepseek_v3(calls: Calls, odd: int) -> str:
    gap = "\n" if odd % 2 == 0 else " \n"
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}{}```<｜tool▁call▁end｜>"
    return _section([one.format(name, _json(arguments, odd), gap) for name, arguments in calls])


def _deepseek_v31(calls: Calls, odd: int) -> str:
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    return _section([one.format(name, _json(arguments, odd)) for name, arguments in calls])


def _section(calls: Sequence[str]) -> str:
    return "<｜tool▁calls▁begin｜>" + "".join(calls) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Calls, odd: int) -> str:
    one = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    made = [one.format(name, number, _json(arguments, odd)) for number, (name, arguments) in enumerate(calls)]
    return "<|tool_calls_section_begin|>" + "".join(made) + "<|tool_calls_section_end|>"


def _llama(calls: Calls, odd: int) -> str:
    key = "parameters" if odd % 2 == 0 else "arguments"
    made = [f'{{"name": "{name}", "{key}": {_json(arguments, odd)}}}' for name, arguments in calls]
    return ("", "<|python_tag|>", " ")[odd % 3] + "; ".join(made)


def _mistral(calls: Calls, odd: int) -> str:
    middle = "[ARGS]" if odd % 2 == 0 else "[CALL_ID]Ab3dE6gH9[ARGS]"
    return "".join(f"[TOOL_CALLS]{name}{middle}{_json(arguments, odd)}" for name, arguments in calls)


def _mistral_list(calls: Calls, odd: int) -> str:
    made = [{"name": name, "arguments": arguments, "id": "Ab3dE6gH9"} for name, arguments in calls]
    return "[TOOL_CALLS]" + (" " if odd % 2 else "") + _json(made, odd)


def _harmony(text: str, calls: Calls, thought: str, odd: int) -> str:
    parts: list[str] = []
    if thought:
        parts.append(f"<|channel|>analysis<|message|>{thought}<|end|>")
    if text:
        channel = "commentary" if calls else "final"
        parts.append(f"<|channel|>{channel}<|message|>{text}" + ("<|end|>" if calls else ""))
    for name, arguments in calls:
        head = (
            f" to=functions.{name}<|channel|>commentary json",
            f"<|channel|>commentary to=functions.{name} <|constrain|>json",
            f" to=functions.{name}<|channel|>analysis code",
        )[odd % 3]
        parts.append(f"{head}<|message|>{_json(arguments, odd)}")
    return "<|start|>assistant".join(parts)


_BLOCKS = {
    "hermes": _hermes,
    "qwen-xml": _qwen_xml,
    "glm": _glm,
    "minimax": _minimax,
    "dsml": _dsml,
    "deepseek-v3": _deepseek_v3,
    "deepseek-v3.1": _deepseek_v31,
    "kimi": _kimi,
    "llama": _llama,
    "mistral": _mistral,
    "mistral-list": _mistral_list,
}
