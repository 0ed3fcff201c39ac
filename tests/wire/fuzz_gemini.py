"""Gemini bodies of any kind, and a client that reads what comes of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import strategies as st

from openforgerl.errors import WireError
from openforgerl.types import Conversation, FinishReason, Message, Reasoning, Role, Text, ToolCall
from openforgerl.wire import Address, Answer, Head, Request

from .fuzzing import Target, mostly, words
from .gemini_clients import GEMINI, Json, OneSession, javascript, parts_of, streamed

HEAD = Head(call_id="c0", model="policy", created=1, handle="h-0_x")
SAID = Answer(
    message=Message(
        role=Role.ASSISTANT,
        parts=(Reasoning("Löschen?"), Text("안녕 😀\u2028\u0085\n\r\n")),
        tool_calls=(
            ToolCall(id="call0", name="bash", arguments='{"command": "ls \u2029"}'),
            ToolCall(id="call1", name="bash", arguments="oops"),
        ),
    ),
    finish=FinishReason.STOP,
    prompt_tokens=3,
    completion_tokens=5,
)
SIGNED = streamed(HEAD, Request(dialect="gemini", model="policy", conversation=Conversation(messages=())), SAID)

FIELDS = (
    "contents role parts text thought thoughtSignature thought_signature inlineData mimeType data functionCall id "
    "name args functionResponse response output error fileData executableCode codeExecutionResult code "
    "systemInstruction system_instruction tools functionDeclarations parameters parametersJsonSchema type properties "
    "toolConfig functionCallingConfig mode allowedFunctionNames generationConfig temperature maxOutputTokens "
    "stopSequences thinkingConfig includeThoughts generateContentRequest model"
)
KEYS = st.sampled_from(FIELDS.split())
WORDS = st.sampled_from(["user", "model", "function", "AUTO", "ANY", "bash", "OBJECT", "image/png", "aGk=", "", "x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
WILD = st.recursive(
    LEAVES | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def usually(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return mostly(good, WILD, one_in=100)


def record(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """An object with any of these fields."""
    return st.fixed_dictionaries({}, optional={name: usually(value) for name, value in fields.items()})


OBJECT = st.dictionaries(KEYS, WILD, max_size=2)
BLOB = st.fixed_dictionaries(
    {"mimeType": usually(st.just("image/png")), "data": usually(st.sampled_from(["aGk=", "_-8"]))}
)
SIGNATURES = st.sampled_from(
    [
        "",
        "U0lHTkFUVVJF",
        *(part["thoughtSignature"] for part in parts_of(javascript(SIGNED)) if "thoughtSignature" in part),
    ]
)
MODES = st.sampled_from(["AUTO", "ANY", "NONE", "VALIDATED", "auto", "MODE_UNSPECIFIED"])
CALL = st.fixed_dictionaries({"name": usually(WORDS)}, optional={"id": usually(WORDS), "args": usually(OBJECT)})
RESPONSE = st.fixed_dictionaries(
    {"name": usually(WORDS)},
    optional={"id": usually(WORDS), "response": usually(OBJECT), "parts": usually(st.just([]))},
)
TEXT = st.fixed_dictionaries({"text": usually(st.text(max_size=5) | words)})
CODE = record(executableCode=OBJECT) | record(codeExecutionResult=OBJECT)
MODEL_PART = st.one_of(
    st.fixed_dictionaries({"text": usually(st.text(max_size=5) | words)}, optional={"thought": st.booleans()}),
    st.fixed_dictionaries({"functionCall": usually(CALL)}, optional={"thoughtSignature": usually(SIGNATURES)}),
    CODE,
)
USER_PART = st.one_of(
    TEXT,
    st.fixed_dictionaries({"functionResponse": usually(RESPONSE)}),
    st.fixed_dictionaries({"inlineData": usually(BLOB)}),
    CODE,
)
CONTENT = st.one_of(
    st.fixed_dictionaries(
        {"parts": usually(st.lists(mostly(USER_PART, MODEL_PART, one_in=60), max_size=4))},
        optional={"role": usually(st.sampled_from(["user", "function"]))},
    ),
    st.fixed_dictionaries(
        {
            "parts": usually(st.lists(mostly(MODEL_PART, USER_PART, one_in=60), max_size=4)),
            "role": usually(st.just("model")),
        }
    ),
)
DECLARATION = st.fixed_dictionaries(
    {"name": usually(WORDS)}, optional={"description": usually(WORDS), "parameters": usually(OBJECT)}
)
BODY = st.fixed_dictionaries(
    {"contents": usually(st.lists(usually(CONTENT), min_size=1, max_size=4))},
    optional={
        "systemInstruction": usually(
            record(parts=st.lists(mostly(TEXT, USER_PART, one_in=60), max_size=2), role=WORDS)
        ),
        "tools": usually(st.lists(record(functionDeclarations=st.lists(usually(DECLARATION), max_size=3)), max_size=2)),
        "toolConfig": usually(record(functionCallingConfig=record(mode=MODES, allowedFunctionNames=st.lists(WORDS)))),
        "generationConfig": usually(
            record(
                temperature=st.floats(0, 2),
                maxOutputTokens=st.integers(1, 9),
                stopSequences=st.lists(WORDS, max_size=2),
                thinkingConfig=record(includeThoughts=st.booleans()),
                candidateCount=st.just(1),
            )
        ),
    },
)


def answered(request: Request) -> None:
    """Every event and the whole answer can be read; the calls are those that were made."""
    chunks = javascript(streamed(HEAD, request, SAID))
    whole = json.loads(msgspec.json.encode(GEMINI.whole(HEAD, request, SAID)))
    for parts in (parts_of(chunks), whole["candidates"][0]["content"]["parts"]):
        assert [part["functionCall"]["name"] for part in parts if "functionCall" in part] == ["bash", "bash"]


def refused(body: dict[str, Any], error: WireError) -> None:
    """A google.rpc.Status under `error`."""
    assert (body["error"]["code"], body["error"]["status"]) == (error.status, "INVALID_ARGUMENT")
    assert body["error"]["message"]


def remembering() -> OneSession:
    """A session that has given one answer."""
    session = OneSession()
    session.keep(HEAD, SAID.message)
    return session


TARGET = Target(
    dialect=GEMINI,
    whole=BODY,
    answered=answered,
    refused=refused,
    memory=remembering,
    address=Address(model="m", stream=True),
)
