"""A small chat-completions server that plays a script and keeps what it was asked."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from openforgerl.harnesses import install
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    HarnessContext,
    Message,
    ModelCall,
    Prompt,
    Role,
    Rollout,
    Task,
    Text,
    ThreadRole,
    ToolCall,
    ToolSpec,
)

Json = dict[str, Any]


class ChatServer:
    """Answers request number n with `script[n]`: a message, or (status, headers, body), or raw stream bytes."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.requests: list[tuple[str, dict[str, str], Json]] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                body = json.loads(self.rfile.read(length))
                with outer._lock:
                    number = len(outer.requests)
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    outer.requests.append((self.path, headers, body))
                answer = outer.script[number] if number < len(outer.script) else (500, {}, b"script is over")
                outer._send(self, body, answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def bodies(self) -> list[Json]:
        return [body for _, _, body in self.requests]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _send(self, handler: BaseHTTPRequestHandler, request: Json, answer: Any) -> None:
        if isinstance(answer, tuple):
            status, headers, data = answer
        elif isinstance(answer, bytes):
            status, headers, data = 200, {"content-type": "text/event-stream"}, answer
        elif request.get("stream"):
            status, headers, data = 200, {"content-type": "text/event-stream"}, stream_of(answer)
        else:
            finish = "tool_calls" if answer.get("tool_calls") else "stop"
            choice = {"index": 0, "message": {"role": "assistant", **answer}, "finish_reason": finish}
            status, headers, data = (
                200,
                {"content-type": "application/json"},
                json.dumps({"choices": [choice]}).encode(),
            )
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def stream_of(message: Json, *, end: bool = True, size: int = 3) -> bytes:
    """A message as server-sent events, every text in pieces of `size` characters."""
    deltas: list[Json] = [{"role": "assistant"}]
    for field in ("reasoning_content", "content"):
        deltas += [{field: piece} for piece in pieces(message.get(field) or "", size)]
    for index, call in enumerate(message.get("tool_calls") or []):
        head = {"index": index, "id": call["id"], "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": {"name": call["function"]["name"], "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in pieces(call["function"]["arguments"], size)
        ]
    chunks: list[Json] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if end:
        finish = message.get("finish") or ("tool_calls" if message.get("tool_calls") else "stop")
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        chunks.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}})
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
    data = b": keep-alive\n\n" + b"".join(
        b"data: " + json.dumps({**frame, **chunk}).encode() + b"\n\n" for chunk in chunks
    )
    return data + (b"data: [DONE]\n\n" if end else b"")


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def call(name: str, arguments: str, call_id: str = "call0") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def bash(command: str, call_id: str = "call0") -> Json:
    return {"tool_calls": [call("bash", json.dumps({"command": command}), call_id)]}


@pytest.fixture(scope="session")
def pi_cache() -> Path:
    """$OPENFORGERL_CACHE or the repository's own cache: filled once, then without network."""
    named = os.environ.get("OPENFORGERL_CACHE")
    cache = Path(named) if named else Path(__file__).parents[2] / ".cache" / "openforgerl"
    install("pi", cache, lambda line: print(line))
    return cache


@pytest.fixture
def chat() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    server.close()


@pytest.fixture
def make_context(chat: ChatServer) -> Callable[..., HarnessContext]:
    def make(**changes: Any) -> HarnessContext:
        instruction = changes.pop("instruction", "Copy a.txt to b.txt.")
        task = Task(name="t", digest="d", path="/nowhere", instruction=instruction)
        rollout = Rollout(
            rollout_id="r",
            run_id="run",
            task="t",
            task_digest="d",
            harness="x",
            group_id="g",
            index=0,
            seed=1,
            purpose="try",
        )
        values: dict[str, Any] = {
            "task": task,
            "rollout": rollout,
            "base_urls": {"chat": chat.url},
            "key": "the-key",
            "model": "policy",
            "context_length": 4096,
            "max_output_tokens": 512,
            "home": "/home/agent",
            "workdir": "/workspace",
            **changes,
        }
        return HarnessContext(**values)

    return make


@pytest.fixture
def make() -> Any:
    """The message builders, since test modules do not import each other."""

    class Builders:
        bash = staticmethod(bash)
        call = staticmethod(call)
        stream_of = staticmethod(stream_of)

    return Builders


@pytest.fixture
def make_call() -> Callable[..., ModelCall]:
    """A recorded call: complete, answering "Done." unless told otherwise."""

    def build(*calls: tuple[str, str], text: str = "Done.", **changes: Any) -> ModelCall:
        answer = Message(
            role=Role.ASSISTANT,
            parts=(Text(text),),
            tool_calls=tuple(
                ToolCall(id=f"c{index}", name=name, arguments=arguments)
                for index, (name, arguments) in enumerate(calls)
            ),
        )
        values: dict[str, Any] = {
            "call_id": "call-1",
            "session_id": "s",
            "index": 0,
            "dialect": "chat",
            "thread": "main",
            "role": ThreadRole.MAIN,
            "role_evidence": "first",
            "parent_call_id": None,
            "status": CallStatus.COMPLETE,
            "conversation": Conversation(messages=(), tools=(ToolSpec(name="bash", parameters={}),)),
            "prompt": Prompt(ids=(1,)),
            "weights_version": 0,
            "finish_reason": FinishReason.STOP,
            "answer": answer,
            "timing": CallTiming(received=0.0),
            "request_headers": {"User-Agent": "pi/1.6.0 (linux; node/v24.19.0; x64)"},
            **changes,
        }
        return ModelCall(**values)

    return build


@pytest.fixture(scope="session")
def harness_cache() -> Path:
    """The same cache, for harnesses that are installed when a test needs them."""
    named = os.environ.get("OPENFORGERL_CACHE")
    return Path(named) if named else Path(__file__).parents[2] / ".cache"
