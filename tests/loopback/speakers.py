"""Clients of all four dialects, as small as tests need them: what they send, what they take, what they echo."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from openforgerl.types import OpenedSession
from openforgerl.wire import SseReader

from .house import TOOLS, House, Reply

Json = dict[str, Any]
SCHEMA = TOOLS[0]["function"]["parameters"]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@dataclass
class Said:
    """An answer as its client has it."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Id, name and arguments (text; an object where the dialect has one is encoded)."""
    finish: str | None = None
    prompt_tokens: int = -1
    completion_tokens: int = -1
    turn: list[Any] = field(default_factory=list[Any])
    """What the client puts into its history."""
    done: bool = False
    error: Json | None = None
    cut: bool = False


class Speaker(Protocol):
    """One dialect's client. History is in the dialect's own items."""

    name = ""
    key_header = "Authorization"
    key_prefix = "Bearer "
    count_path = ""
    finishes = ("stop", "tool_calls", "length")
    """How it spells an end, an end with calls, and a cut."""

    def path(self, *, stream: bool) -> str: ...

    def body(self, history: list[Any], *, stream: bool, tools: bool, **fields: Any) -> Json: ...

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def picture(self) -> list[Any]: ...

    def result(self, call: tuple[str, str, str], text: str) -> list[Any]: ...

    def whole(self, body: Json) -> Said: ...

    def streamed(self, raw: bytes) -> Said: ...

    def forced(self, name: str | None) -> Json:
        """The fields that force a call."""
        ...

    def most(self, tokens: int) -> Json:
        """The fields that bound the answer."""
        return {"max_tokens": tokens}

    def code(self, body: Json) -> str:
        """Our code in an error body."""
        return body["error"]["code"]

    def counted(self, body: Json) -> int:
        return body["input_tokens"]


def events_of(raw: bytes) -> list[Json]:
    return [json.loads(event.data) for event in SseReader().feed(raw) if event.data != "[DONE]"]


class Chat(Speaker):
    name = "chat"

    def path(self, *, stream: bool) -> str:
        return "/chat/completions"

    def body(self, history: list[Any], *, stream: bool, tools: bool, **fields: Any) -> Json:
        offered = {"tools": TOOLS} if tools else {}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return {"model": "policy", "messages": history, "stream": stream, **usage, **offered, **fields}

    def picture(self) -> list[Any]:
        return [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}]}
        ]

    def result(self, call: tuple[str, str, str], text: str) -> list[Any]:
        return [{"role": "tool", "tool_call_id": call[0], "content": text}]

    def whole(self, body: Json) -> Said:
        choice = body["choices"][0]
        message = choice["message"]
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        return Said(
            text=message["content"] or "",
            reasoning=message.get("reasoning_content", ""),
            calls=calls,
            finish=choice["finish_reason"],
            prompt_tokens=body["usage"]["prompt_tokens"],
            completion_tokens=body["usage"]["completion_tokens"],
            turn=[message],
            done=True,
        )

    def streamed(self, raw: bytes) -> Said:
        message: Json = {"role": "assistant", "content": ""}
        said = Said(done=raw.endswith(b"data: [DONE]\n\n"))
        usage: Json = {"prompt_tokens": -1, "completion_tokens": -1}
        for event in events_of(raw):
            if "error" in event:
                said.error = event
                continue
            usage = event["usage"] or usage
            for choice in event["choices"]:
                said.finish = choice["finish_reason"] or said.finish
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                if "reasoning_content" in delta:
                    message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
                for piece in delta.get("tool_calls", ()):
                    calls = message.setdefault("tool_calls", [])
                    if "id" in piece:
                        calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
                    else:
                        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        whole = self.whole({"choices": [{"message": message, "finish_reason": said.finish}], "usage": usage})
        whole.done, whole.error = said.done, said.error
        return whole

    def forced(self, name: str | None) -> Json:
        return {"tool_choice": "required" if name is None else {"type": "function", "function": {"name": name}}}


class Responses(Speaker):
    name = "responses"
    count_path = "/responses/input_tokens"
    finishes = ("completed", "completed", "incomplete")

    def path(self, *, stream: bool) -> str:
        return "/responses"

    def body(self, history: list[Any], *, stream: bool, tools: bool, **fields: Any) -> Json:
        tool = {"type": "function", "name": "bash", "description": "Run a command.", "parameters": SCHEMA}
        return {"model": "policy", "input": history, "stream": stream, **({"tools": [tool]} if tools else {}), **fields}

    def picture(self) -> list[Any]:
        part = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
        return [{"role": "user", "content": [part]}]

    def result(self, call: tuple[str, str, str], text: str) -> list[Any]:
        return [{"type": "function_call_output", "call_id": call[0], "output": text}]

    def whole(self, body: Json) -> Said:
        said = Said(finish=body["status"], turn=body["output"], done=True)
        said.prompt_tokens, said.completion_tokens = body["usage"]["input_tokens"], body["usage"]["output_tokens"]
        for item in body["output"]:
            if item["type"] == "reasoning":
                said.reasoning += "".join(part["text"] for part in item["summary"])
            elif item["type"] == "message":
                said.text += "".join(part["text"] for part in item["content"])
            else:
                said.calls.append((item["call_id"], item["name"], item["arguments"]))
        return said

    def streamed(self, raw: bytes) -> Said:
        events = events_of(raw)
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events))), numbers
        last = events[-1] if events else {"type": ""}
        if last["type"] in ("response.completed", "response.incomplete"):
            said = self.whole(last["response"])
            said.turn = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            return said
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        return Said(text=text, error=last if last["type"] in ("response.failed", "error") else None)

    def forced(self, name: str | None) -> Json:
        return {"tool_choice": "required" if name is None else {"type": "function", "name": name}}

    def most(self, tokens: int) -> Json:
        return {"max_output_tokens": tokens}


class Messages(Speaker):
    name = "messages"
    key_header = "x-api-key"
    key_prefix = ""
    count_path = "/v1/messages/count_tokens?beta=true"
    finishes = ("end_turn", "tool_use", "max_tokens")

    def path(self, *, stream: bool) -> str:
        return "/v1/messages?beta=true"

    def body(self, history: list[Any], *, stream: bool, tools: bool, **fields: Any) -> Json:
        tool = {"name": "bash", "description": "Run a command.", "input_schema": SCHEMA}
        body = {"model": "policy", "max_tokens": 400, "messages": history, "stream": stream}
        return {**body, **({"tools": [tool]} if tools else {}), **fields}

    def picture(self) -> list[Any]:
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        return [{"role": "user", "content": [{"type": "image", "source": source}]}]

    def result(self, call: tuple[str, str, str], text: str) -> list[Any]:
        block = {"type": "tool_result", "tool_use_id": call[0], "content": text}
        return [{"role": "user", "content": [block]}]

    def whole(self, body: Json) -> Said:
        said = Said(finish=body["stop_reason"], turn=[{"role": "assistant", "content": body["content"]}], done=True)
        said.prompt_tokens, said.completion_tokens = body["usage"]["input_tokens"], body["usage"]["output_tokens"]
        for block in body["content"]:
            if block["type"] == "thinking":
                said.reasoning += block["thinking"]
            elif block["type"] == "text":
                said.text += block["text"]
            else:
                said.calls.append((block["id"], block["name"], json.dumps(block["input"], separators=(",", ":"))))
        return said

    def streamed(self, raw: bytes) -> Said:
        body: Json = {"content": [], "stop_reason": None, "usage": {"input_tokens": -1, "output_tokens": -1}}
        inputs: dict[int, str] = {}
        error, done = None, False
        for event in events_of(raw):
            kind = event["type"]
            if kind == "message_start":
                body["usage"] = event["message"]["usage"]
            elif kind == "content_block_start":
                body["content"].append(event["content_block"])
            elif kind == "content_block_delta":
                block, delta = body["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] = block.get(name, "") + delta[name]
            elif kind == "message_delta":
                body["stop_reason"] = event["delta"]["stop_reason"]
                body["usage"] |= event["usage"]
            error = event if kind == "error" else error
            done = done or kind == "message_stop"
        for at, text in inputs.items():
            body["content"][at]["input"] = json.loads(text) if done else {}
        said = self.whole(body)
        said.done, said.error = done, error
        return said

    def forced(self, name: str | None) -> Json:
        return {"tool_choice": {"type": "any"} if name is None else {"type": "tool", "name": name}}


class Gemini(Speaker):
    name = "gemini"
    key_header = "x-goog-api-key"
    key_prefix = ""
    count_path = "/v1beta/models/policy:countTokens"
    finishes = ("STOP", "STOP", "MAX_TOKENS")

    def path(self, *, stream: bool) -> str:
        return f"/v1beta/models/policy:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}"

    def body(self, history: list[Any], *, stream: bool, tools: bool, **fields: Any) -> Json:
        declared = {"name": "bash", "description": "Run a command.", "parametersJsonSchema": SCHEMA}
        offered = {"tools": [{"functionDeclarations": [declared]}]} if tools else {}
        return {"contents": history, **offered, **fields}

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "parts": [{"text": text}]}]

    def picture(self) -> list[Any]:
        return [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": PIXEL}}]}]

    def result(self, call: tuple[str, str, str], text: str) -> list[Any]:
        answer = {"id": call[0], "name": call[1], "response": {"output": text}}
        return [{"role": "user", "parts": [{"functionResponse": answer}]}]

    def whole(self, body: Json) -> Said:
        candidate, usage = body["candidates"][0], body["usageMetadata"]
        said = Said(finish=candidate.get("finishReason"), turn=[candidate["content"]], done=True)
        said.prompt_tokens, said.completion_tokens = usage["promptTokenCount"], usage["candidatesTokenCount"]
        for part in candidate["content"]["parts"]:
            if part.get("thought"):
                said.reasoning += part["text"]
            elif "text" in part:
                said.text += part["text"]
            else:
                call = part["functionCall"]
                said.calls.append((call["id"], call["name"], json.dumps(call["args"], separators=(",", ":"))))
        return said

    def streamed(self, raw: bytes) -> Said:
        parts: list[Json] = []
        finish, usage = None, {"promptTokenCount": -1, "candidatesTokenCount": -1}
        for event in events_of(raw):
            candidate = event["candidates"][0]
            parts += candidate["content"]["parts"]
            finish = candidate.get("finishReason", finish)
            usage = event.get("usageMetadata", usage)
        content = {"role": "model", "parts": parts}
        said = self.whole({"candidates": [{"content": content, "finishReason": finish}], "usageMetadata": usage})
        said.done = finish is not None
        errors = [json.loads(line) for line in raw.splitlines() if line.startswith(b'{"error"')]
        said.error = errors[-1] if errors else None
        return said

    def forced(self, name: str | None) -> Json:
        names = {} if name is None else {"allowedFunctionNames": [name]}
        return {"toolConfig": {"functionCallingConfig": {"mode": "ANY", **names}}}

    def most(self, tokens: int) -> Json:
        return {"generationConfig": {"maxOutputTokens": tokens}}

    def code(self, body: Json) -> str:
        return body["error"]["details"][0]["reason"].lower()

    def counted(self, body: Json) -> int:
        return body["totalTokens"]


SPEAKERS = (Chat(), Responses(), Messages(), Gemini())


class Talker:
    """A speaker with a session's credentials."""

    def __init__(self, http: aiohttp.ClientSession, session: OpenedSession, speaker: Speaker) -> None:
        self.http = http
        self.speaker = speaker
        self.base = session.base_urls[speaker.name]
        self.headers = {speaker.key_header: speaker.key_prefix + session.key}

    @classmethod
    async def open(cls, home: House, speaker: Speaker, session_id: str = "s1", **fields: Any) -> Talker:
        client = await home.client(session_id, **fields)
        return cls(home.http, client.session, speaker)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.base + path, data=data, headers={**self.headers, **headers}) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, headers, await response.json())

    async def ask(self, history: list[Any], *, tools: bool = False, stream: bool = False, **fields: Any) -> Reply:
        """A request whose answer is not a stream: a whole one, or a refusal."""
        body = self.speaker.body(history, stream=stream, tools=tools, **fields)
        return await self.post(self.speaker.path(stream=stream), body)

    async def say(self, history: list[Any], *, stream: bool = False, tools: bool = False, **fields: Any) -> Said:
        """A request that is answered, whole or in a stream."""
        if not stream:
            reply = await self.ask(history, tools=tools, **fields)
            assert reply.status == 200, reply.body
            return self.speaker.whole(reply.body)
        raw, cut = b"", False
        try:
            async for piece in self.pieces(history, tools=tools, **fields):
                raw += piece
        except aiohttp.ClientPayloadError:
            cut = True
        said = self.speaker.streamed(raw)
        said.cut = cut
        return said

    async def pieces(self, history: list[Any], *, tools: bool = False, **fields: Any) -> AsyncIterator[bytes]:
        """Bytes of a stream as they arrive."""
        body = self.speaker.body(history, stream=True, tools=tools, **fields)
        url = self.base + self.speaker.path(stream=True)
        async with self.http.post(url, json=body, headers=self.headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for piece in response.content.iter_any():
                yield piece
