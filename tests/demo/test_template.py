"""The chat template's text, written out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from openforgerl.demo import tiny
from openforgerl.errors import TemplateError

TOOL = {"type": "function", "function": {"name": "bash", "description": 'Run "é".', "parameters": {}}}


def _call(command: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}


def test_system_and_tools_share_one_turn() -> None:
    text = tiny.render([{"role": "system", "content": "Be brief."}], [TOOL, TOOL])
    line = '{"type": "function", "function": {"name": "bash", "description": "Run \\"é\\".", "parameters": {}}}\n'
    assert text == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nOne tool on each line:\n"
        + line
        + line
        + '\nCall a tool with:\n<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call><|im_end|>\n'
    )


def test_tools_without_system_and_neither() -> None:
    assert tiny.render([{"role": "user", "content": "Hi"}], [TOOL]).startswith("<|im_start|>system\n# Tools\n\n")
    assert tiny.render([{"role": "user", "content": "Hi"}]) == "<|im_start|>user\nHi<|im_end|>\n"


def test_parts_of_text_read_like_one_string() -> None:
    parts = [{"type": "text", "text": "Copy "}, {"type": "text", "text": "a."}]
    assert tiny.render([{"role": "user", "content": parts}]) == "<|im_start|>user\nCopy a.<|im_end|>\n"
    with pytest.raises(TemplateError, match="image_url"):
        tiny.render([{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(TemplateError, match="unknown role oracle"):
        tiny.render([{"role": "oracle", "content": "x"}])


def test_calls_and_grouped_results() -> None:
    text = tiny.render(
        [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": None, "tool_calls": [_call("ls"), _call("pwd")]},
            {"role": "tool", "content": "a\n"},
            {"role": "tool", "content": "/"},
            {"role": "assistant", "content": "Now.", "tool_calls": [_call("id")]},
            {"role": "tool", "content": ""},
        ],
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>user\nGo<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "pwd"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na\n\n</tool_response>\n<tool_response>\n/\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\nNow.\n<tool_call>\n{"name": "bash", "arguments": {"command": "id"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_that_are_text_stay_as_they_are() -> None:
    call = {"function": {"name": "bash", "arguments": '{"command":"ls"}'}}
    text = tiny.render([{"role": "user", "content": "Go"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert '<tool_call>\n{"name": "bash", "arguments": {"command":"ls"}}\n</tool_call>' in text


def test_reasoning_lives_until_the_next_user_query() -> None:
    thought = {"role": "assistant", "content": "A", "reasoning_content": "why"}
    result = {"role": "tool", "content": "r"}
    question = {"role": "user", "content": "Q"}
    kept = "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nA<|im_end|>\n"
    assert kept in tiny.render([question, thought, result])
    dropped = tiny.render([question, thought, question])
    assert "<think>" not in dropped and "<|im_start|>assistant\nA<|im_end|>\n" in dropped


def test_thinking_can_be_closed_before_it_starts() -> None:
    question = [{"role": "user", "content": "Q"}]
    assert tiny.render(question, add_generation_prompt=True).endswith("<|im_start|>assistant\n")
    assert tiny.render(question, add_generation_prompt=True, enable_thinking=True).endswith("<|im_start|>assistant\n")
    closed = tiny.render(question, add_generation_prompt=True, enable_thinking=False)
    assert closed.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_longer_conversation_only_appends() -> None:
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": None, "tool_calls": [_call("ls")]},
        {"role": "tool", "content": "a"},
        {"role": "assistant", "content": "Done."},
    ]
    texts = [tiny.render(turns[:count], [TOOL]) for count in range(1, len(turns) + 1)]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter)
