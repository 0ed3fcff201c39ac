"""A small ReAct agent: a model, one bash tool, a loop. One file, standard library only (Python 3.9+).

The instruction comes on standard input; settings come from REACT_* environment variables. The model's last
words go to standard output, everything else to standard error.

Exit codes: 0 the model answered without a tool call; 2 wrong settings; 3 turn limit; 4 the model server
failed or refused; 5 too many turns in a row without one well-formed call; 6 the context is full.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

USER_AGENT = "openforgerl-react/1"
ATTEMPTS = 6
LONGEST_WAIT = 30.0
Json = dict[str, Any]

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


class ServerError(Exception):
    """The model server failed for good; `exit_code` says how the agent ends."""

    def __init__(self, message: str, exit_code: int = 4) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Broken(Exception):
    """An answer that stopped halfway: ask again."""


class Settings:
    """REACT_* variables."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.url = env["REACT_BASE_URL"].rstrip("/") + "/chat/completions"
        self.key = env["REACT_KEY"]
        self.model = env["REACT_MODEL"]
        self.system_prompt = env["REACT_SYSTEM_PROMPT"]
        self.max_tokens = int(env["REACT_MAX_TOKENS"])
        self.max_turns = int(env["REACT_MAX_TURNS"])
        self.max_bad_turns = int(env["REACT_MAX_BAD_TURNS"])
        self.command_timeout = float(env["REACT_COMMAND_TIMEOUT"])
        self.output_limit = int(env["REACT_OUTPUT_LIMIT"])
        self.stream = env["REACT_STREAM"] == "1"


def main() -> int:
    try:
        settings = Settings(os.environ)
    except (KeyError, ValueError) as error:
        print(f"react: wrong settings: {error!r}", file=sys.stderr)
        return 2
    # The commands that the model runs need neither the key nor the settings.
    for name in [name for name in os.environ if name.startswith("REACT_")]:
        del os.environ[name]
    messages: list[Json] = [
        {"role": "system", "content": settings.system_prompt},
        {"role": "user", "content": sys.stdin.read()},
    ]
    try:
        return converse(settings, messages)
    except ServerError as error:
        print(f"react: {error}", file=sys.stderr)
        return error.exit_code


def converse(settings: Settings, messages: list[Json]) -> int:
    bad_turns = 0
    for _ in range(settings.max_turns):
        answer = ask(settings, messages)
        messages.append(answer)
        calls = answer.get("tool_calls")
        if not calls:
            print(answer.get("content") or "")
            return 0
        good = False
        for call in calls:
            well_formed, result = run_call(settings, call["function"])
            good = good or well_formed
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        bad_turns = 0 if good else bad_turns + 1
        if bad_turns >= settings.max_bad_turns:
            print(f"react: {bad_turns} turns in a row without a well-formed call", file=sys.stderr)
            return 5
    print(f"react: no final answer within {settings.max_turns} turns", file=sys.stderr)
    return 3


def run_call(settings: Settings, function: Json) -> tuple[bool, str]:
    """Whether the call was well-formed, and the text that the model gets back."""
    name, text = function["name"], function["arguments"]
    if name != "bash":
        return False, f"Tool {name} not found"
    try:
        arguments: Any = json.loads(text)
    except ValueError as error:
        return False, f'Invalid arguments for tool "bash": {error}\n\nReceived arguments:\n{text}'
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str):
        received = json.dumps(arguments, indent=2, ensure_ascii=False)
        problem = "missing" if command is None else "must be string"
        return False, f'Validation failed for tool "bash":\n  - command: {problem}\n\nReceived arguments:\n{received}'
    return True, run_bash(settings, command)


def run_bash(settings: Settings, command: str) -> str:
    if "\0" in command:
        return "/bin/bash: a command cannot hold a null byte\n\nCommand exited with code 1"
    # A file, not a pipe: a background process that keeps its output open must not keep us waiting.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                ["/bin/bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"/bin/bash: {error}\n\nCommand exited with code 1"
        try:
            code = process.wait(settings.command_timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        size = output.seek(0, os.SEEK_END)
        start = max(0, size - settings.output_limit)
        output.seek(start)
        text = output.read(settings.output_limit).decode("utf-8", "replace")
    if start:
        text = f"[Output truncated: the last {size - start} of {size} bytes]\n{text}"
    if code is None:
        return f"{text}\n\nCommand timed out after {settings.command_timeout:g} seconds"
    if code != 0:
        return f"{text}\n\nCommand exited with code {code}"
    return text or "(no output)"


def ask(settings: Settings, messages: list[Json]) -> Json:
    """The next assistant message. Retries what may pass; raises ServerError otherwise."""
    body: Json = {"model": settings.model, "messages": messages, "tools": [TOOL], "max_tokens": settings.max_tokens}
    if settings.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    said = ""
    for attempt in range(ATTEMPTS):
        wait = min(0.5 * 2**attempt, LONGEST_WAIT)
        try:
            return post(settings, data)
        except urllib.error.HTTPError as error:
            said = error.read(4000).decode("utf-8", "replace")
            if error.code not in (408, 429) and error.code < 500:
                full = error_code(said) == "context_length_exceeded"
                raise ServerError(f"HTTP {error.code}: {said}", 6 if full else 4) from error
            said = f"HTTP {error.code}: {said}"
            wait = retry_after(error.headers.get("Retry-After"), wait)
        except (OSError, Broken) as error:
            said = f"{type(error).__name__}: {error}"
        if attempt + 1 < ATTEMPTS:
            time.sleep(wait)
    raise ServerError(f"gave up after {ATTEMPTS} attempts: {said}")


def error_code(text: str) -> str | None:
    try:
        return json.loads(text)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None


def retry_after(value: str | None, otherwise: float) -> float:
    try:
        return min(max(float(value), 0.0), LONGEST_WAIT) if value else otherwise
    except ValueError:
        return otherwise


def post(settings: Settings, data: bytes) -> Json:
    request = urllib.request.Request(
        settings.url,
        data,
        {
            "Authorization": f"Bearer {settings.key}",
            "Content-Type": "application/json",
            "User-Agent": USER_AGENT,
        },
    )
    # No proxy from the environment: the model server is the only thing reachable.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=600) as response:
        if settings.stream:
            return read_stream(response)
        try:
            return echoable(json.load(response)["choices"][0]["message"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Broken(f"not a chat completion: {error!r}") from error


def read_stream(lines: Iterable[bytes]) -> Json:
    """The message that a stream of chunks adds up to; Broken when it ends before its finish reason."""
    message: Json = {"role": "assistant", "content": None}
    calls: dict[int, Json] = {}
    finished = False
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            break
        try:
            chunk = json.loads(payload)
        except ValueError as error:
            raise Broken(f"not JSON: {payload[:200]!r}") from error
        if "error" in chunk:
            raise Broken(f"error in the stream: {payload[:500]!r}")
        for choice in chunk.get("choices") or []:
            add(message, calls, choice.get("delta") or {})
            finished = finished or choice.get("finish_reason") is not None
    if not finished:
        raise Broken("the stream ended early")
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return echoable(message)


def add(message: Json, calls: dict[int, Json], delta: Json) -> None:
    for field in ("content", "reasoning_content"):
        if delta.get(field):
            message[field] = (message.get(field) or "") + delta[field]
    for piece in delta.get("tool_calls") or []:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(piece["index"], empty)
        call["id"] = piece.get("id") or call["id"]
        for field in ("name", "arguments"):
            call["function"][field] += (piece.get("function") or {}).get(field) or ""


def echoable(message: Json) -> Json:
    """The message as it goes back in the history: what the model said, verbatim, and nothing else."""
    kept: Json = {"role": "assistant", "content": message.get("content")}
    for field in ("reasoning_content", "tool_calls"):
        if message.get(field):
            kept[field] = message[field]
    return kept


if __name__ == "__main__":
    sys.exit(main())
