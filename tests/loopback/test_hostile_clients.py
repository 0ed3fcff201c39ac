"""An agent's code can speak to the data port too: other sessions' doors, odd paths, smuggled and giant requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from pathlib import Path

import aiohttp
import pytest

from openforgerl.rendering import ChatRenderer
from openforgerl.types import Limits

from .house import Client, House, ask, house, scripted


async def raw(home: House, data: bytes, *, seconds: float = 5) -> bytes:
    """Everything the data port answers to these bytes until it closes the connection or the client's side ends."""
    host, port = home.proxy.data_address
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        await writer.drain()
        answer = b""
        async with asyncio.timeout(seconds):
            while piece := await reader.read(65536):
                answer += piece
        return answer
    finally:
        writer.close()


def request(path: str, key: str, body: bytes | None = None, *, extra: str = "", version: str = "1.1") -> bytes:
    body = json.dumps(ask()).encode() if body is None else body
    length = "" if "ransfer-" in extra else f"Content-Length: {len(body)}\r\n"
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n{length}"
    credentials = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{head}{credentials}{extra}\r\n".encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def two_sessions(home: House) -> tuple[Client, Client]:
    return await home.client("mine"), await home.client("theirs")


async def test_another_sessions_door_stays_shut(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        mine, theirs = await two_sessions(home)
        stolen = Client(home.http, theirs.session)
        credentials = (
            {"Authorization": f"Bearer {mine.session.key}"},
            {"Authorization": f"Bearer {home.token}"},
            {"Authorization": f"Bearer {theirs.session.key}0"},
            {"Authorization": f"Bearer {theirs.session.key[:-1]}"},
            {"Authorization": f"Basic {theirs.session.key}"},
            {"Authorization": theirs.session.key},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer é"},
            {"X-Api-Key": mine.session.key},
            {"X-Goog-Api-Key": theirs.session.key[1:]},
            {"Authorization": f"Bearer {theirs.session.key}", "X-Api-Key": mine.session.key},
            {"Authorization": f"Basic {theirs.session.key}", "X-Api-Key": theirs.session.key},
            {"Api-Key": theirs.session.key},
            {},
        )
        refusals = set()
        for headers in credentials:
            stolen.headers = headers
            reply = await stolen.post(ask())
            assert reply.status == 401, headers
            refusals.add(json.dumps(reply.body))
        assert len(refusals) == 1
        unknown = Client(home.http, theirs.session)
        unknown.url = unknown.url.replace("/theirs/", "/nobody/")
        reply = await unknown.post(ask())
        assert reply.status == 404
        assert set(reply.body["error"]) == set(json.loads(refusals.pop())["error"])
        assert await home.calls("theirs") == []
        assert (await mine.post(ask())).status == 200


async def test_two_credentials_are_none(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a"})) as home:
        mine, theirs = await two_sessions(home)
        second = f"Authorization: Bearer {theirs.session.key}\r\n"
        for key in (mine.session.key, theirs.session.key):
            answer = await raw(home, request("/s/theirs/v1/chat/completions", key, extra=second))
            assert status_of(answer) in (400, 401)
        assert await home.calls("theirs") == []


@pytest.mark.parametrize(
    "path",
    [
        "/s/mine/../theirs/v1/chat/completions",
        "/s/mine/v1/../../theirs/v1/chat/completions",
        "/s/mine/%2e%2e/theirs/v1/chat/completions",
        "/s/mine%2f..%2ftheirs/v1/chat/completions",
        "/s/thei%72s/v1/chat/completions",
        "//s/theirs/v1/chat/completions",
        "/s//theirs/v1/chat/completions",
        "/s/./theirs/v1/chat/completions",
        "/s/theirs/v1/chat/completions/",
        "/s/theirs/v1/chat%2fcompletions",
        "/S/theirs/v1/chat/completions",
        "/s/theirs\\v1\\chat\\completions",
        "/s/theirs;x/v1/chat/completions",
        "/s/theirs%00/v1/chat/completions",
        "http://x/s/theirs/v1/chat/completions",
        "/v1/chat/completions",
        "/v1/sessions",
        "/v1/sessions/theirs/calls",
        "/healthz",
        "/openapi.json",
        "*",
    ],
)
async def test_odd_paths_lead_nowhere(tmp_path: Path, renderer: ChatRenderer, path: str) -> None:
    """Even with the right key: a path has one spelling, and the control port's doors are not on this port."""
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        mine, theirs = await two_sessions(home)
        for key in (mine.session.key, theirs.session.key, home.token):
            assert status_of(await raw(home, request(path, key))) in (400, 404, 405)
        assert await home.calls("mine") == await home.calls("theirs") == []


@pytest.mark.parametrize(
    "extra",
    [
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
    ],
)
async def test_a_request_cannot_hide_another(tmp_path: Path, renderer: ChatRenderer, extra: str) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        mine, _ = await two_sessions(home)
        path = "/s/mine/v1/chat/completions"
        hidden = request(path, mine.session.key)
        answer = await raw(home, request(path, mine.session.key, b"0\r\n\r\n" + hidden, extra=extra))
        # At most one answer, and no call: the bytes after the ambiguous head are not a second request.
        assert answer.count(b"HTTP/1.1 ") <= 1
        if answer:
            assert status_of(answer) == 400
        assert await home.calls("mine") == []


async def test_two_lengths(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        mine, _ = await two_sessions(home)
        answer = await raw(
            home, request("/s/mine/v1/chat/completions", mine.session.key, extra="Content-Length: 1\r\n")
        )
        assert not answer or status_of(answer) == 400
        assert await home.calls("mine") == []


async def test_giant_bodies(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0}), body_limit_mb=0.1) as home:
        mine, _ = await two_sessions(home)
        largest = int(0.1 * 2**20)
        fits = json.dumps(ask()).encode()
        fits += b" " * (largest - len(fits))
        assert (await mine.post(fits)).status == 200
        path, key = "/s/mine/v1/chat/completions", mine.session.key
        # By the announced length alone, before a byte of the body is there.
        announced = request(path, key, b"", extra="").replace(
            b"Content-Length: 0", f"Content-Length: {10**12}".encode()
        )
        answer = await raw(home, announced)
        assert status_of(answer) == 413
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"

        async def endless() -> object:
            while True:
                yield b" " * 4096

        try:
            async with home.http.post(mine.url, data=endless(), headers=mine.headers) as response:
                assert response.status == 413
        except aiohttp.ClientError:
            pass  # the connection was cut while we were still sending: as good
        assert len(await home.calls("mine")) == 1


async def test_compressed_bodies_are_refused_unopened(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        mine, _ = await two_sessions(home)
        reply = await mine.post(gzip.compress(b" " * 10**7), **{"Content-Encoding": "gzip"})
    assert (reply.status, reply.body["error"]["code"]) == (415, "unsupported_encoding")


async def test_giant_heads(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer), header_limit_kb=4) as home:
        mine, _ = await two_sessions(home)
        path, key = "/s/mine/v1/chat/completions", mine.session.key
        long = await raw(home, request(path, key, extra=f"X: {'x' * 9000}\r\n"))
        many = await raw(home, request(path, key, extra="".join(f"X{n}: x\r\n" for n in range(2000))))
        line = await raw(home, request(path + "?" + "x" * 9000, key))
        assert [status_of(answer) for answer in (long, many, line)] == [400, 400, 400]
        assert await home.calls("mine") == []


async def test_slow_and_silent_clients_are_let_go(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer), read_timeout_s=0.2, idle_timeout_s=0.3) as home:
        mine, _ = await two_sessions(home)
        whole = request("/s/mine/v1/chat/completions", mine.session.key)
        slow = await raw(home, whole[:-10])
        assert status_of(slow) == 408
        assert await raw(home, b"") == b""  # says nothing
        assert await raw(home, whole[:40]) == b""  # half a head, then nothing


async def test_secrets_reach_no_log_and_no_record(
    tmp_path: Path, renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = scripted(renderer, {"text": "a"}, {"error": {"status": 500}})
    async with house(tmp_path, renderer, engine) as home:
        mine, theirs = await two_sessions(home)
        await mine.post(ask())
        await mine.post(ask())
        await mine.post(b"{")
        stolen = Client(home.http, theirs.session)
        stolen.headers = mine.headers
        await stolen.post(ask())
        await raw(home, b"GARBAGE\r\n" + request("/s/mine/v1/chat/completions", mine.session.key))
        await raw(home, f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer {mine.session.key}\r\n\r\n".encode())
        await raw(home, f"GET /{mine.session.key} HTTP/1.1 {mine.session.key}\r\n\r\n".encode())
        secrets = (mine.session.key, theirs.session.key, home.token)
    for secret in secrets:
        assert secret not in caplog.text
    assert "Traceback" not in caplog.text
    for path in tmp_path.iterdir():
        if path.name != "control.token":
            data = path.read_bytes()
            assert not any(secret.encode() in data for secret in secrets), path


async def test_a_key_in_a_header_of_the_clients_own_is_not_recorded(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a"})) as home:
        client = await home.client()
        client.url += f"?token={client.session.key}&beta=true"
        extra = {
            "X-Upstream-Auth": f"Bearer {client.session.key}",
            "X-Forwarded-Key": client.session.key,
            "X-Kept": "k",
        }
        assert (await client.post(ask(), **extra)).status == 200
        (call,) = await home.calls()
    assert client.session.key not in repr(call)
    assert call.request_headers["x-kept"] == "k"
    assert call.request_headers[":path"].endswith("/chat/completions?beta=true")
    assert not {"x-upstream-auth", "x-forwarded-key"} & set(call.request_headers)


async def test_malformed_http_is_answered_with_400(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a"})) as home:
        mine, _ = await two_sessions(home)
        for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"):
            answer = await raw(home, garbage)
            assert not answer or status_of(answer) in (400, 404, 405, 505)
        assert (await mine.post(ask())).status == 200


async def test_field_names_without_end_stay_bounded(
    tmp_path: Path, renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        mine, _ = await two_sessions(home)
        await mine.post(ask(**{"x" * 10_000: 1}))
        for start in (0, 900):
            assert (await mine.post(ask(**{f"field{start + n}": 1 for n in range(900)}))).status == 200
        async with home.http.get(f"{home.control_url}/healthz") as response:
            counts = (await response.json())["unlisted_fields"]
    # 1 long name and 999 others, then 801 together under one name of their own.
    assert len(counts) == 1001
    assert counts["chat:..."] == 801
    assert max(map(len, counts)) <= len("chat:") + 100
    assert sum("does not list" in record.getMessage() for record in caplog.records) == 1000


async def test_a_used_up_session_is_refused_before_its_body_is_read(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a"})) as home:
        client = await home.client(limits=Limits(calls=1))
        await client.message(ask())
        announced = request("/s/s1/v1/chat/completions", client.session.key, b"{")
        answer = await raw(home, announced.replace(b"Content-Length: 1", b"Content-Length: 9999"))
        assert status_of(answer) == 403


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hello world\n" * 60_000}],
        [{"role": "user", "content": ""}] * 20_000,
        [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]" * 300_000}}],
            },
        ],
    ],
)
async def test_a_giant_conversation_does_not_stop_the_others(
    tmp_path: Path, renderer: ChatRenderer, messages: list[dict[str, object]]
) -> None:
    """It is refused as too long before its tokens are counted: nothing of it is rendered, encoded or kept."""
    rendered: list[int] = []

    class Watched:
        def __getattr__(self, name: str) -> object:
            if name == "render":
                rendered.append(1)
            return getattr(renderer, name)

    async with house(tmp_path, Watched(), scripted(renderer, {"text": "a"}, context_length=2048)) as home:
        client = await home.client("mine")
        reply = await client.post({"messages": messages})
        assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")
        assert rendered == []
        assert (await client.post(ask())).status == 200
        assert len(rendered) == 1
        assert len(await home.calls("mine")) == 1
