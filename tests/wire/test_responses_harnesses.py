"""Responses requests as real harnesses send them: every field is known, and this is what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openforgerl.types import Image
from openforgerl.wire import Request

from .responses_client import DIALECT, PIXEL_BYTES, Remembered, remembering

REQUESTS = Path(__file__).parent / "golden" / "responses" / "requests"


def golden(name: str, memory: Remembered | None = None) -> Request:
    """A request as a real harness sends it; every field must be known."""
    body = (REQUESTS / f"{name}.json").read_bytes()
    request = DIALECT.parse(body, strict=True, memory=memory or Remembered())
    assert request.unlisted == ()
    return request


def roles(request: Request) -> str:
    return " ".join(message.role.value for message in request.conversation.messages)


def test_every_transcribed_request_is_read_below() -> None:
    named = Path(__file__).read_text("utf-8")
    assert [path.stem for path in REQUESTS.glob("*.json") if f'"{path.stem}"' not in named] == []


def test_codex_first_request() -> None:
    request = golden("codex-first")
    assert roles(request) == "system user user"
    system = request.conversation.messages[0]
    assert system.text == ("You are a coding agent.\n\n<skills_instructions>\n## Skills<permissions instructions>full")
    assert system.original_role == "developer"
    assert [tool.name for tool in request.conversation.tools] == ["exec_command", "write_stdin", "view_image"]
    assert (request.stream, request.max_tokens, request.forced, request.warnings) == (True, None, None, ())


def test_codex_after_a_sub_agent() -> None:
    request = golden("codex-after-a-sub-agent")
    assert roles(request) == "system user user assistant tool assistant tool user"
    (spawn,) = request.conversation.messages[3].tool_calls
    assert (spawn.name, spawn.namespace) == ("multi_agent_v1__spawn_agent", "multi_agent_v1")
    assert [tool.name for tool in request.conversation.tools][3:] == [
        "multi_agent_v1__spawn_agent",
        "multi_agent_v1__wait_agent",
    ]
    assert request.warnings == ("tools[4]: server-side tool 'web_search' was left out of the prompt",)


def test_codex_after_an_image() -> None:
    request = golden("codex-after-an-image")
    assert roles(request) == "system user user assistant tool"
    (picture,) = request.conversation.messages[-1].parts
    assert isinstance(picture, Image) and len(request.images[picture.sha256]) == PIXEL_BYTES


def test_codex_after_bad_arguments() -> None:
    """One turn, though its items have the ids of a server that we know nothing of."""
    request = golden("codex-after-bad-arguments")
    assert roles(request) == "system user user assistant tool"
    turn = request.conversation.messages[3]
    assert (turn.text, turn.tool_calls[0].arguments) == ("I will create the file.", '{"command": "echo oops')


def test_codex_with_real_tools() -> None:
    request = golden("codex-with-real-tools")
    assert roles(request) == "system user user assistant tool assistant tool assistant tool"
    patch, search, add = (message.tool_calls[0] for message in request.conversation.messages[3::2])
    assert json.loads(patch.arguments) == {"input": "*** Begin Patch\n*** Add File: hello.txt\n+hi\n*** End Patch"}
    assert (search.name, add.name) == ("tool_search", "calendar__add")
    assert '"name":"calendar__add"' in request.conversation.messages[6].text
    assert request.warnings == ()


def test_codex_compaction() -> None:
    request = golden("codex-compaction")
    assert (roles(request), request.conversation.tools) == ("system user user user", ())


@pytest.mark.parametrize("name", ["pi-after-one-call", "opencode-after-one-call", "openclaw-after-one-call"])
def test_harnesses_that_keep_thoughts(name: str) -> None:
    for memory, thoughts, warnings in ((remembering(), "my thought", 0), (None, "", 1)):
        request = golden(name, memory)
        assert roles(request) == "system user assistant tool"
        turn = request.conversation.messages[2]
        assert (turn.reasoning, turn.text, turn.tool_calls[0].name) == (thoughts, "I will create the file.", "bash")
        assert (request.max_tokens, len(request.warnings)) == (8192, warnings)


def test_mini_swe_agent() -> None:
    request = golden("mini-after-one-call")
    assert (roles(request), request.stream) == ("system user assistant tool", False)
    assert request.conversation.messages[2].text == "I will create the file."
