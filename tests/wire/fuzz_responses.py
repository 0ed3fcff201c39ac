"""Responses bodies of any kind, and a client that reads what comes of them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from openforgerl.errors import WireError
from openforgerl.types import FinishReason
from openforgerl.wire import Request

from .fuzzing import Target, anything, leaves, mostly, objects, texts
from .responses_client import DIALECT, HEAD, TOOLS, Remembered, answer_of, ask, call, events_of, say, think

small = st.sampled_from(["", "x", "call_1", "msg_1", "rs_0123456789abcdef", "resp_0123456789abcdef", "é😀", "\ud800"])
odd = anything | st.dictionaries(small, leaves, max_size=2)


def usually(good: st.SearchStrategy[Any], strange: st.SearchStrategy[Any] = odd) -> st.SearchStrategy[Any]:
    """`good`, but for one time in sixty."""
    return mostly(good, strange, one_in=60)


either = usually(small)
part = usually(
    st.fixed_dictionaries(
        {"type": usually(st.sampled_from(["input_text", "output_text", "refusal", "input_image", "input_file", "x"]))},
        optional={
            "text": either,
            "refusal": either,
            "image_url": usually(
                st.sampled_from(["data:image/png;base64,AAAA", "data:image/png;base64,A", "http://x"])
            ),
            "extra": odd,
        },
    )
)
content = either | st.lists(part, max_size=3)
function = usually(
    st.fixed_dictionaries(
        {
            "type": usually(
                st.sampled_from(["function", "custom", "namespace", "local_shell", "tool_search", "web_search"])
            ),
            "name": usually(st.sampled_from(["f", "g"])),
        },
        optional={
            "description": either,
            "parameters": usually(st.just({"type": "object"})),
            "format": usually(
                st.sampled_from([{"type": "text"}, {"type": "grammar", "syntax": "lark", "definition": "x"}])
            ),
            "execution": usually(st.sampled_from(["client", "server"])),
            "tools": usually(st.lists(st.fixed_dictionaries({"type": st.just("function"), "name": small}), max_size=2)),
        },
    )
)
functions = usually(st.lists(function, max_size=2))
kinds = [
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "additional_tools",
    "item_reference",
    "agent_message",
    "web_search_call",
]
item = st.fixed_dictionaries(
    {
        "type": usually(st.sampled_from(kinds), st.sampled_from(["compaction", "never_heard_of"]) | odd),
        "call_id": either,
        "name": either,
        "content": content,
    },
    optional={
        "id": either,
        "role": usually(st.sampled_from(["user", "assistant", "developer", "system", "tool"])),
        "namespace": either,
        "arguments": either | objects,
        "input": either,
        "output": content,
        "action": usually(st.just({"type": "exec", "command": ["ls"]})),
        "summary": odd,
        "encrypted_content": usually(st.just(HEAD.handle)),
        "tools": functions,
        "status": either,
    },
)
plausible = st.builds(
    lambda role, said: {"role": role, "content": said}, st.sampled_from(["user", "assistant", "system"]), texts
)
bodies = st.fixed_dictionaries(
    {"input": usually(st.lists(plausible | item, min_size=1, max_size=4) | texts)},
    optional={
        "model": either,
        "instructions": either,
        "previous_response_id": usually(st.just("resp_0123456789abcdef"), either),
        "tools": functions,
        "tool_choice": usually(
            st.sampled_from(["auto", "auto", "none", "required"]),
            st.fixed_dictionaries(
                {"type": st.sampled_from(["function", "custom", "allowed_tools", "local_shell", "x"])},
                optional={"name": small, "mode": st.just("auto"), "tools": functions},
            )
            | odd,
        ),
        "stream": usually(st.booleans()),
        "max_output_tokens": usually(st.integers(1, 9)),
        "temperature": usually(st.floats(0, 2)),
        "text": usually(st.just({"format": {"type": "text"}})),
        "include": odd,
        "background": usually(st.just(False)),
        "whatever": odd,
    },
)


def remembering() -> Remembered:
    """A session that has given one answer."""
    memory = Remembered()
    request = ask(tools=TOOLS)
    deltas = [think("t"), say("s"), *call(0, "apply_patch", "p")]
    memory.keep(HEAD, request, answer_of(deltas, request, FinishReason.STOP).message)
    return memory


def answered(request: Request) -> None:
    """The same response in the last event and whole."""
    deltas = [say("a"), *call(0, "f", "{}"), *call(1, "local_shell", '{"command": []}'), *call(2, "g", "{not json")]
    answer = answer_of(deltas, request, FinishReason.STOP)
    writer = DIALECT.writer(HEAD, request)
    events = events_of(writer.open(1) + writer.write(deltas) + writer.close(answer))
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"] == json.loads(json.dumps(DIALECT.whole(HEAD, request, answer)))


def refused(body: dict[str, Any], error: WireError) -> None:
    """OpenAI's error object."""
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]


TARGET = Target(dialect=DIALECT, whole=bodies, answered=answered, refused=refused, memory=remembering)
