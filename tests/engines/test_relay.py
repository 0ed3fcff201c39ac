"""The relay against a real HTTP server: answers, faults, retries, pace, cost. Nothing here renders."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforgerl.engines.opening import open_engine
from openforgerl.engines.options import EngineOptions, RelayOptions
from openforgerl.engines.relay import RelayEngine
from openforgerl.engines.relay_faults import retry_after
from openforgerl.errors import ConfigError, ContextOverflow, EngineError, EngineOverloaded
from openforgerl.testing.fake_upstream import (
    KEY,
    Upstream,
    calls,
    chunk,
    data,
    drop,
    openai,
    refuse,
    says,
    silent,
    stream,
    upstream,
)
from openforgerl.types import (
    Conversation,
    FinishReason,
    Message,
    MessageDelta,
    Question,
    Role,
    Sampling,
    Text,
    TextChunk,
)

from .byte_renderer import ByteRenderer

HELLO = Question(
    conversation=Conversation(messages=(Message(role=Role.USER, parts=(Text("Hi."),)),)), prompt_tokens=900
)


def relay(fake: Upstream, kind: str = "openai", context_length: int | None = None, **options: Any) -> RelayEngine:
    given = RelayOptions(**{"model": "teacher-1", "backoff_s": 0.01, **options})
    spec = f"relay:{kind}:{fake.url}"
    engine = open_engine(spec, ByteRenderer(), EngineOptions(relay=given, context_length=context_length))
    assert isinstance(engine, RelayEngine)
    return engine


async def ask(
    engine: RelayEngine, question: Question = HELLO, sampling: Sampling | None = None, **fields: Any
) -> list[TextChunk]:
    given = {"affinity": "s", "seed": "c1", **fields}
    stream = engine.converse(question, sampling or Sampling(max_tokens=50), **given)
    return [chunk async for chunk in stream]


def text_of(chunks: list[TextChunk]) -> str:
    return "".join(delta.text for chunk in chunks for delta in chunk.deltas if delta.kind == "text")


async def test_an_answer_comes_piece_by_piece_and_is_billed() -> None:
    async with upstream(says("Hello there")) as fake:
        engine = relay(fake, price_in=2.0, price_out=10.0, price_cached=0.5)
        chunks = await ask(engine)
        await engine.close()
    assert text_of(chunks) == "Hello there"
    assert len(chunks) == 12  # 11 letters and the last chunk
    assert chunks[-1].finish is FinishReason.STOP
    # 40 plain tokens at 2, 60 cached at 0.5, 7 of answer at 10, per million.
    cost = (40 * 2 + 60 * 0.5 + 7 * 10) / 1e6
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.cached_tokens) == (100, 60)
    assert chunks[-1].usage.cost == pytest.approx(cost)
    stats = engine.stats
    assert (stats.answered, stats.requests, stats.retries, stats.without_usage) == (1, 1, 0, 0)
    assert stats.cost == pytest.approx(cost)


async def test_what_is_sent() -> None:
    async with upstream(says("ok")) as fake:
        engine = relay(
            fake,
            extra={"reasoning_effort": "high", "max_tokens": 9},
            omit=("stream_options",),
            headers={"X-Title": "ours"},
            models={"small": "teacher-mini"},
        )
        await ask(engine, msgspec.structs.replace(HELLO, model="small"), Sampling(max_tokens=50, seed=4))
        await ask(engine, msgspec.structs.replace(HELLO, model="anything"))
        await engine.close()
    assert fake.paths == ["/v1/chat/completions"] * 2
    assert fake.bodies[0] == {
        "model": "teacher-mini",
        "messages": [{"role": "user", "content": "Hi."}],
        "stream": True,
        "max_tokens": 9,
        "seed": 4,
        "reasoning_effort": "high",
    }
    assert fake.bodies[1]["model"] == "teacher-1"
    assert fake.headers[0]["x-title"] == "ours"
    assert "authorization" not in fake.headers[0]


@pytest.mark.parametrize(("kind", "header"), [("openai", "authorization"), ("anthropic", "x-api-key")])
async def test_the_key_comes_from_a_file_or_the_environment(
    kind: str, header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv("TEACHER_KEY", KEY)
    async with upstream(refuse(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})) as fake:
        for given in ({"key_file": str(tmp_path / "key")}, {"key_env": "TEACHER_KEY"}):
            engine = relay(fake, kind, **given)
            with pytest.raises(EngineError, match=r"engine\.relay\.key_env") as caught:
                await ask(engine)
            assert caught.value.status == 500
            assert KEY not in str(caught.value) + repr(vars(engine)) + repr(engine._door.__dict__["_secret"])
            await engine.close()
    assert [headers[header].removeprefix("Bearer ") for headers in fake.headers] == [KEY, KEY]
    assert KEY not in caplog.text
    assert "unencrypted" not in caplog.text  # it does not leave this machine
    given = EngineOptions(relay=RelayOptions(model="m", key_env="TEACHER_KEY"))
    open_engine(f"relay:{kind}:http://teacher.example/v1", ByteRenderer(), given)
    assert "unencrypted" in caplog.text


async def test_an_upstream_that_echoes_the_key_does_not_spread_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    async with upstream(refuse(400, {"error": {"message": f"bad: {KEY}"}}), says_whole(f"it is {KEY}")) as fake:
        engine = relay(fake, key_env="TEACHER_KEY")
        with pytest.raises(EngineError, match=r"bad: \[key\]") as caught:
            await ask(engine)
        assert caught.value.status == 400
        assert text_of(await ask(engine)) == "it is [key]"
        await engine.close()


@pytest.mark.parametrize("key", ["EMPTY", "none", "1", "content", "token-abc123", "sk-no-key-required"])
async def test_an_answer_is_never_altered_for_a_key_that_is_a_word(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", key)
    answer = f'It is {key}: 101 of none, EMPTY. "error"'
    async with upstream(says_whole(answer), calls(("f", json.dumps({"error": key})))) as fake:
        engine = relay(fake, key_env="TEACHER_KEY")
        assert text_of(await ask(engine)) == answer
        deltas = [delta for chunk in await ask(engine) for delta in chunk.deltas]
        assert "".join(delta.text for delta in deltas if delta.kind == "arguments") == json.dumps({"error": key})
        await engine.close()
    assert fake.headers[0]["authorization"] == f"Bearer {key}"


async def test_a_short_key_does_not_spoil_the_numbers_of_an_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "1")
    said = "This model's maximum context length is 1000 tokens. However, you requested 1100 tokens."
    async with upstream(refuse(400, {"error": {"message": said}})) as fake:
        engine = relay(fake, key_env="TEACHER_KEY")
        with pytest.raises(ContextOverflow, match="1100"):
            await ask(engine)
        await engine.close()


@pytest.mark.parametrize("key", ["hunter-2", "token-abc123", KEY])
async def test_no_error_shows_the_key(
    key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TEACHER_KEY", key)
    said = {"error": {"message": f"bad: {key}"}}
    async with upstream(refuse(400, said), refuse(500, said), stream(data(said))) as fake:
        engine = relay(fake, key_env="TEACHER_KEY", retries=1)
        with pytest.raises(EngineError, match=r"bad: \[key\]"):
            await ask(engine)
        with pytest.raises(EngineError, match=r"bad: \[key\]"):
            await ask(engine)
        assert engine.stats.requests == 3  # the second question was asked again after the 500
        await engine.close()
    assert "[key]" in caplog.text and key not in caplog.text


def says_whole(text: str) -> Any:
    return openai({"content": text})


@pytest.mark.parametrize(
    "faults",
    [
        [refuse(429)],
        [refuse(500), refuse(502), refuse(503)],
        [refuse(529)],
        [drop(), drop()],
        [stream(b"data: {not json\n\n")],
        [stream(b"data: \xff\xff\n\n")],
        [stream(data({"choices": {"0": 1}}))],
        [stream(data([1, 2]))],
        [stream(data({"error": {"message": "later", "type": "server_error"}}))],
        [stream(b'{"id": "x"}', content_type="application/json")],
        [stream(chunk({"role": "assistant"}), cut=True)],
        [stream(chunk({"role": "assistant"}))],
    ],
    ids=["429", "5xx", "529", "drop", "json", "utf8", "choices", "list", "event", "whole", "cut", "no-end"],
)
async def test_faults_before_the_first_piece_are_tried_again(faults: list[Any]) -> None:
    async with upstream(*faults, says("fine")) as fake:
        engine = relay(fake)
        assert text_of(await ask(engine)) == "fine"
        await engine.close()
    assert (engine.stats.requests, engine.stats.retries) == (len(faults) + 1, len(faults))


@pytest.mark.parametrize(
    "broken",
    [
        stream(chunk({"content": "half"}), cut=True),
        stream(chunk({"content": "half"})),
        stream(chunk({"content": "half"}), b"data: {\n\n"),
        stream(chunk({"content": "half"}), data({"error": {"message": "died", "code": 502}})),
    ],
)
async def test_faults_after_the_first_piece_are_not(broken: Any) -> None:
    async with upstream(broken, says("never")) as fake:
        engine = relay(fake)
        got: list[TextChunk] = []
        with pytest.raises(EngineError) as caught:
            async for piece in engine.converse(HELLO, Sampling(), affinity="s", seed="c"):
                got.append(piece)
        await engine.close()
    assert text_of(got) == "half"
    assert caught.value.status == 503
    assert (len(fake.bodies), engine.stats.failed, engine.stats.without_usage) == (1, 1, 1)


async def test_retries_end() -> None:
    async with upstream(refuse(500)) as fake:
        engine = relay(fake, retries=2)
        with pytest.raises(EngineError, match="HTTP 500") as caught:
            await ask(engine)
        await engine.close()
    assert (len(fake.bodies), caught.value.status) == (3, 503)


async def test_retry_after_is_honoured_and_passed_on() -> None:
    async with upstream(refuse(429, Retry_After="0.3"), says("ok")) as fake:
        engine = relay(fake)
        await ask(engine)
        assert fake.at[1] - fake.at[0] >= 0.3
        fake.plays[:] = [refuse(429, {"error": {"message": "slow down"}}, Retry_After="7200")]
        began = time.monotonic()
        with pytest.raises(EngineOverloaded, match="slow down") as caught:
            await ask(engine)
        assert caught.value.retry_after == 7200
        # Nobody else is sent there meanwhile.
        with pytest.raises(EngineOverloaded, match="pause") as held:
            await ask(engine)
        assert 7190 < held.value.retry_after <= 7200
        assert time.monotonic() - began < 5
        await engine.close()
    assert len(fake.bodies) == 3


def test_retry_after_in_its_three_spellings() -> None:
    assert retry_after({"retry-after": "12"}) == 12
    assert retry_after({"retry-after-ms": "250", "retry-after": "12"}) == 0.25
    assert retry_after({"retry-after": "Thu, 01 Jan 2060 00:00:00 GMT"}) == pytest.approx(
        2840140800 - time.time(), abs=5
    )
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None


@pytest.mark.parametrize(
    ("status", "error", "numbers"),
    [
        (
            400,
            {
                "message": "This model's maximum context length is 8192 tokens. However, your messages resulted in "
                "9001 tokens.",
                "code": "context_length_exceeded",
            },
            (9001, 8192),
        ),
        (
            400,
            {
                "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
                "(4000 in the messages, 1000 in the completion)."
            },
            (5000, 4096),
        ),
        (
            400,
            {"type": "invalid_request_error", "message": "prompt is too long: 210000 tokens > 200000 maximum"},
            (210000, 200000),
        ),
        (413, {"message": "the request exceeds the context window"}, (1001, 1000)),
        (400, {"message": "no", "code": "context_length_exceeded"}, (1001, 1000)),
    ],
)
async def test_an_overflow_is_one(status: int, error: dict[str, Any], numbers: tuple[int, int]) -> None:
    async with upstream(refuse(status, {"error": error}), stream(data({"type": "error", "error": error}))) as fake:
        for _ in range(2):  # as an answer, and as an event in a stream
            engine = relay(fake, context_length=1000)
            if len(fake.bodies) == 1 and not ("type" in error or "code" in error):
                break  # an event without type and code says nothing of whose fault it is
            with pytest.raises(ContextOverflow) as caught:
                await ask(engine)
            assert (caught.value.prompt_tokens, caught.value.limit) == numbers
            await engine.close()


@pytest.mark.parametrize(
    ("status", "error", "said", "told"),
    [
        (400, {"message": "tools[0] is bad"}, r"tools\[0\] is bad", 400),
        (404, {"message": "no such model"}, r"engine\.relay\.model", 500),
        (403, {"message": "secret words"}, "credentials", 500),
        (429, {"message": "pay", "code": "insufficient_quota"}, "no credit", 500),
        (302, {}, "redirect", 500),
        (501, {}, "HTTP 501", 500),
    ],
)
async def test_what_no_retry_helps_against(status: int, error: dict[str, Any], said: str, told: int) -> None:
    async with upstream(refuse(status, {"error": error}, Location="http://127.0.0.1:1/")) as fake:
        engine = relay(fake)
        with pytest.raises(EngineError, match=said) as caught:
            await ask(engine)
        await engine.close()
    assert "secret words" not in str(caught.value)
    assert (caught.value.status, len(fake.bodies)) == (told, 1)


async def test_huge_answers_end() -> None:
    big = b"x" * 2**20
    async with upstream(stream(b"data: ", *[big] * 9)) as fake:
        engine = relay(fake)
        with pytest.raises(EngineError, match="too large") as caught:
            await ask(engine)
        await engine.close()
    assert (caught.value.status, len(fake.bodies)) == (500, 1)


async def test_silence_and_the_time_for_an_answer() -> None:
    async with upstream(silent(5), says("late")) as fake:
        engine = relay(fake, silence_s=0.2)
        assert text_of(await ask(engine)) == "late"
        await engine.close()
        fake.plays[:] = [says("0123456789", delay=0.1)]
        engine = relay(fake, timeout_s=0.4)
        with pytest.raises(EngineError, match="timeout_s") as caught:
            await ask(engine)
        assert caught.value.status == 503
        chunks = await ask(engine, deadline=time.time() + 0.3)
        assert chunks[-1].finish is FinishReason.ABORTED
        await engine.close()
    assert (engine.stats.failed, engine.stats.stopped) == (1, 1)


async def test_a_caller_that_leaves_ends_the_request() -> None:
    async with upstream(says("0123456789", delay=0.05)) as fake:
        engine = relay(fake)
        pieces = engine.converse(HELLO, Sampling(), affinity="s", seed="c")
        async with aclosing(pieces):  # type: ignore[type-var]
            assert (await anext(pieces)).deltas[0].text == "0"
        async with asyncio.timeout(2):
            while fake.running:  # noqa: ASYNC110  (the fake's counter)
                await asyncio.sleep(0.01)
        await engine.close()
    assert (engine.stats.stopped, engine.stats.answered, engine.stats.without_usage) == (1, 0, 1)


async def test_no_more_at_once_than_allowed() -> None:
    async with upstream(says("ok", delay=0.02)) as fake:
        engine = relay(fake, concurrent=2)
        await asyncio.gather(*(ask(engine) for _ in range(6)))
        await engine.close()
    assert (fake.most_running, len(fake.bodies)) == (2, 6)


async def test_no_more_in_a_minute_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openforgerl.engines.relay_pace.MINUTE", 0.5)
    async with upstream(says("ok")) as fake:
        engine = relay(fake, requests_per_minute=2)
        await asyncio.gather(*(ask(engine) for _ in range(5)))
        await engine.close()
    at = sorted(fake.at)
    # A few milliseconds lie between our clock and the fake's.
    assert at[2] - at[0] >= 0.47 and at[3] - at[1] >= 0.47 and at[4] - at[2] >= 0.47


async def test_calls_keep_their_order_and_get_ids_of_ours() -> None:
    async with upstream(calls(("bash", '{"command": "ls"}'), ("read", "{not json"))) as fake:
        engine = relay(fake)
        first, second = await ask(engine, seed="a"), await ask(engine, seed="b")
        await engine.close()
    deltas = [delta for chunk in first for delta in chunk.deltas]
    assert [(delta.kind, delta.call_index) for delta in deltas] == [
        ("call", 0),
        ("arguments", 0),
        ("arguments", 0),
        ("call", 1),
        ("arguments", 1),
        ("arguments", 1),
    ]
    assert joined(deltas, 0) == ("bash", '{"command": "ls"}')
    assert joined(deltas, 1) == ("read", "{not json")
    ids = {delta.call_id for chunks in (first, second) for chunk in chunks for delta in chunk.deltas}
    assert len(ids) == 4 and all(name.isalnum() for name in ids)
    assert first[-1].finish is FinishReason.STOP


def joined(deltas: list[MessageDelta], index: int) -> tuple[str, str]:
    mine = [delta for delta in deltas if delta.call_index == index]
    return mine[0].text, "".join(delta.text for delta in mine[1:])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"key_env": "A", "key_file": "b"}, "not both"),
        ({"headers": {"X-API-Key": "s"}}, "no secret"),
        ({"concurrent": 0}, "concurrent must be above 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be above 0"),
        ({"retries": -1}, "retries must be 0 or more"),
        ({"price_in": -1.0}, "price_in must be 0 or more"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        RelayOptions(**options)


@pytest.mark.parametrize(
    ("path", "options", "complaint"),
    [
        ("https://host/v1", {}, "openai:URL or anthropic:URL"),
        ("openai:host/v1", {}, "must be a URL"),
        ("openai:https://me:secret@host/v1", {}, "no user name"),
        ("openai:https://host/v1?key=1", {}, "without query"),
        ("openai:https://host:x/v1", {}, "no URL"),
        ("openai:https://host/v1", {"model": ""}, r"engine\.relay\.model is empty"),
        ("openai:https://host/v1", {"key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE holds no key"),
        ("openai:https://host/v1", {"key_file": "/nowhere/key"}, "/nowhere/key cannot be read"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(path: str, options: dict[str, Any], complaint: str) -> None:
    given = RelayOptions(**{"model": "m", **options})
    with pytest.raises(ConfigError, match=complaint):
        open_engine(f"relay:{path}", ByteRenderer(), EngineOptions(relay=given))


async def test_nobody_there() -> None:
    async with upstream(says("ok")) as fake:
        engine = relay(fake, retries=1)
    with pytest.raises(EngineError, match="cannot be reached") as caught:  # its port is closed now
        await ask(engine)
    await engine.close()
    assert (caught.value.status, engine.stats.requests) == (503, 2)
    with pytest.raises(EngineError, match="closed"):
        await ask(engine)
