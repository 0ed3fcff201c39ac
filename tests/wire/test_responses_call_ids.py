"""The ids of calls on the Responses wire: OpenAI's shape, and still the same call's when they come back."""

from __future__ import annotations

import json

import pytest

from openforgerl.conversation import plain_call_id
from openforgerl.types import ToolCall
from openforgerl.wire.dialect import Head
from openforgerl.wire.responses_calls import Kind, WireTool, call_item

OURS = "call3d9c4fa24c2c3b5d8dd2fc45"


@pytest.mark.parametrize(
    ("given", "sent"),
    [(OURS, "call_3d9c4fa24c2c3b5d8dd2fc45"), ("call_x", "call_x"), ("call0", "call0"), ("toolu_1", "toolu_1")],
)
def test_an_id_of_ours_gets_openais_shape(given: str, sent: str) -> None:
    call = ToolCall(id=given, name="exec", arguments=json.dumps({}))
    tool = WireTool(kind=Kind.FUNCTION, name="exec")
    head = Head(call_id="0" * 32, model="policy", created=0)
    item = call_item(call, tool, head, 0, "completed")
    assert item["call_id"] == sent
    assert plain_call_id(sent) == plain_call_id(given)
