"""The doors that others test against, through the real command line and real HTTP (issue-stable, see openapi.json)."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

SCRIPT = {
    "answers": [
        {"match": "list", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]},
        {"match": "README", "text": "One file.", "chunk_tokens": 2},
        {"match": "think", "reasoning": "hm", "text": "Four."},
    ]
}
CALL_FIELDS = {
    *("call_id", "index", "dialect", "thread", "role", "role_evidence", "parent_call_id", "status", "prompt_ids"),
    *("sampled_ids", "logprobs", "finish_reason", "weights_version", "sampling_asked", "sampling_applied"),
    *("off_policy", "request", "response"),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


@dataclass
class Doors:
    data: str
    control: str
    token_file: Path
    http: aiohttp.ClientSession
    run: Path

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.request(method, self.control + path, json=body, headers=self.bearer) as answer:
            return answer.status, await answer.json()

    async def chat(self, opened: dict[str, Any], messages: list[Any], **more: Any) -> tuple[int, Any]:
        url = opened["base_urls"]["chat"] + "/chat/completions"
        headers = {"Authorization": f"Bearer {opened['key']}"}
        body = {"model": "m", "messages": messages, "tools": [TOOL], **more}
        async with self.http.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncIterator[Doors]:
    openforgerl = Path(sys.executable).with_name("openforgerl")
    tiny = tmp_path / "tiny"
    made = await asyncio.create_subprocess_exec(openforgerl, "testing", "tiny-model", tiny)
    assert await made.wait() == 0
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    token_file = tmp_path / "token"
    process = await asyncio.create_subprocess_exec(
        *(openforgerl, "proxy", "--engine", f"scripted:{tmp_path / 'script.json'}", "--tokenizer", tiny),
        *("--port", "0", "--control-port", "0", "--control-token-file", token_file, "--run", tmp_path / "run"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    printed = (await process.stdout.readline()).decode() + (await process.stdout.readline()).decode()
    data, control = re.findall(r"http://[\d.]+:\d+", printed)
    assert str(token_file) in printed
    async with aiohttp.ClientSession() as http:
        yield Doors(data, control, token_file, http, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


async def test_a_session_from_opening_to_samples(doors: Doors) -> None:
    assert stat.S_IMODE(doors.token_file.stat().st_mode) == 0o600
    status, opened = await doors.ask(
        "POST", "/v1/sessions", {"session_id": "s1", "sampling": {"temperature": 0.5}, "limits": {"calls": 2}}
    )
    assert status in (200, 201) and opened["session_id"] == "s1" and set(opened) == {"session_id", "key", "base_urls"}
    assert set(opened["base_urls"]) == {"chat", "responses", "messages", "gemini"}
    assert opened["base_urls"]["chat"].startswith(doors.data)

    messages: list[Any] = [{"role": "user", "content": "list the files"}]
    status, first = await doors.chat(opened, messages, temperature=0.1, unheard_of=True)
    assert status == 200
    message = first["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"command": "ls"}
    messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "README\n"}]
    status, second = await doors.chat(opened, messages)
    assert second["choices"][0]["message"]["content"] == "One file."
    assert second["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]
    status, over = await doors.chat(opened, messages)
    assert status == 403 and "calls" in over["error"]["message"]

    assert (await doors.ask("POST", "/v1/sessions/s1/seal"))[0] == 200
    assert (await doors.ask("POST", "/v1/sessions/s1/seal"))[0] == 200
    status, closed = await doors.chat(opened, messages)
    assert (status, closed["error"]["code"]) == (403, "session_closed")

    _, page = await doors.ask("GET", "/v1/sessions/s1/calls?limit=1")
    assert len(page["calls"]) == 1 and page["next"] is not None
    _, rest = await doors.ask("GET", f"/v1/sessions/s1/calls?after={page['next']}")
    one, two = page["calls"][0], rest["calls"][0]
    assert set(one) >= CALL_FIELDS and rest["next"] is None
    assert (one["index"], two["index"], two["parent_call_id"]) == (0, 1, one["call_id"])
    assert one["sampling_asked"]["temperature"] == 0.1 and one["sampling_applied"]["temperature"] == 0.5
    # The second prompt goes on from the very ids that were sampled.
    prefix = one["prompt_ids"] + one["sampled_ids"]
    assert two["prompt_ids"][: len(prefix)] == prefix

    _, found = await doors.ask("GET", "/v1/sessions/s1/samples")
    (sample,) = found["samples"]
    assert sample["ids"] == two["prompt_ids"] + two["sampled_ids"]
    for span, call in zip(sample["spans"], (one, two), strict=True):
        assert span["call_id"] == call["call_id"]
        taken = call["sampled_ids"][span["offset"] : span["offset"] + span["stop"] - span["start"]]
        assert sample["ids"][span["start"] : span["stop"]] == taken == call["sampled_ids"]
    totals = found["totals"]
    sampled = len(one["sampled_ids"]) + len(two["sampled_ids"])
    assert totals["sampled"] == sampled
    assert totals["trained"] + sum(totals["masked"].values()) + sum(totals["dropped"].values()) == sampled


async def test_show_reads_what_a_bare_proxy_recorded(doors: Doors) -> None:
    _, opened = await doors.ask("POST", "/v1/sessions", {"session_id": "s1"})
    status, _ = await doors.chat(opened, [{"role": "user", "content": "the README"}])
    assert status == 200

    async def show(*words: str) -> str:
        command = (Path(sys.executable).with_name("openforgerl"), "show", doors.run, *words)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        assert process.returncode == 0
        return said.decode()

    assert re.search(r"s1 .* open .* 1 ", await show())
    one = await show("s1")
    assert "masked 0" not in one and re.search(r"call 0 .* complete, \d+ prompt ids, \d+ sampled", one)
    assert "One file." in one and "every sampled token, once" in one


async def test_control_needs_the_token_and_data_needs_the_key(doors: Doors) -> None:
    async with doors.http.post(doors.control + "/v1/sessions", json={}) as answer:
        assert answer.status == 401
    status, opened = await doors.ask("POST", "/v1/sessions", {})
    assert status in (200, 201) and len(opened["key"]) >= 43  # 256 bits in base64url
    wrong = {**opened, "key": "x" * len(opened["key"])}
    status, refused = await doors.chat(wrong, [{"role": "user", "content": "think"}])
    assert status == 401 and opened["key"] not in json.dumps(refused)
    status, _ = await doors.ask("POST", "/v1/sessions", {"limit": {}})
    assert status == 400


async def test_an_exhausted_script_is_a_500_that_names_the_request(doors: Doors) -> None:
    _, opened = await doors.ask("POST", "/v1/sessions", {})
    status, refused = await doors.chat(opened, [{"role": "user", "content": "something else"}])
    assert status == 500 and "something else" in refused["error"]["message"]
