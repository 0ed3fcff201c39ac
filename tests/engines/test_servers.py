"""vLLM and SGLang servers as an engine, against real HTTP: exact ids and log-probs, dying replicas, weight updates."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from openforgerl.engines.opening import open_engine
from openforgerl.engines.options import EngineOptions, ServersOptions
from openforgerl.engines.server_engine import ServerEngine
from openforgerl.engines.server_replicas import Replica, Replicas
from openforgerl.errors import ConfigError, EngineError, EngineOverloaded, InputError
from openforgerl.protocols import InferenceEngine, WeightControl
from openforgerl.testing.fake_server import FakeServer, Flavour, continuation, logprob, serving
from openforgerl.types import Chunk, FinishReason, PlacedImage, Prompt, Sampling

from .byte_renderer import ByteRenderer

PROMPT = (3, 1, 4, 1, 5)
FLAVOURS: tuple[Flavour, ...] = ("vllm", "sglang", "sglang-incremental")
QUICK = ServersOptions(connect_s=1.0, retry_seconds=0.05, patience_s=0.4, silence_s=5.0)


class NoStop(ByteRenderer):
    """Nothing in the fake's vocabulary ends an answer, unless a test says so."""

    ends: tuple[int, ...] = (999,)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.ends


@contextlib.asynccontextmanager
async def engine(
    *servers: FakeServer, ends: tuple[int, ...] = (999,), options: ServersOptions = QUICK
) -> AsyncIterator[ServerEngine]:
    renderer = NoStop()
    renderer.ends = ends
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(serving(server))
        spec = servers[0].flavour.partition("-")[0] + ":" + ",".join(server.url for server in servers)
        # a probe is blocking, and the fake lives on this very loop
        opened = await asyncio.to_thread(open_engine, spec, renderer, EngineOptions(servers=options))
        assert isinstance(opened, ServerEngine)
        stack.push_async_callback(opened.close)
        yield opened


async def collect(opened: ServerEngine, sampling: Sampling, *, session: str = "s", **more: Any) -> list[Chunk]:
    return [chunk async for chunk in opened.generate(Prompt(ids=PROMPT), sampling, affinity=session, **more)]


def sessions_of(*servers: FakeServer, each: int = 4) -> list[str]:
    """Names of sessions: `each` for every server. Ports differ from run to run, and so do the shares of given names."""
    replicas = Replicas([Replica(server.url) for server in servers], retry_seconds=1.0, clock=lambda: 0.0)
    found: dict[str, list[str]] = {server.url: [] for server in servers}
    for number in itertools.count():
        chosen = replicas.choose(f"session-{number}")
        assert chosen is not None
        if len(found[chosen.url]) < each:
            found[chosen.url].append(f"session-{number}")
        if all(len(names) == each for names in found.values()):
            return [name for names in found.values() for name in names]
    raise AssertionError("unreachable")


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [id for chunk in chunks for id in chunk.ids], [v for chunk in chunks for v in chunk.logprobs or ()]


def expected_logprobs(ids: list[int], temperature: float = 1.0, weights: int = 0) -> list[float]:
    return [logprob([*PROMPT, *ids[:at]], id, temperature, weights) for at, id in enumerate(ids)]


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_ids_and_logprobs_are_the_servers_own(flavour: Flavour) -> None:
    async with engine(FakeServer(flavour=flavour)) as opened:
        assert isinstance(opened, InferenceEngine) and isinstance(opened, WeightControl)
        assert (opened.model_name, opened.context_length, opened.weights_version) == ("fake", 64, 0)
        chunks = await collect(opened, Sampling(max_tokens=7, temperature=0.5, seed=3))
    ids, logprobs = joined(chunks)
    assert ids == continuation(PROMPT, 7)
    assert logprobs == pytest.approx(expected_logprobs(ids, 0.5), abs=1e-12)
    assert [chunk.finish for chunk in chunks] == [None] * 6 + [FinishReason.LENGTH]
    assert len(chunks) == 7  # as it comes


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_only_our_stop_ids_end_an_answer_and_they_are_part_of_it(flavour: Flavour) -> None:
    ids = continuation(PROMPT, 6)
    server = FakeServer(flavour=flavour)
    async with engine(server, ends=(ids[3],)) as opened:
        chunks = await collect(opened, Sampling(max_tokens=20))
    assert joined(chunks)[0] == ids[: ids.index(ids[3]) + 1] and chunks[-1].finish is FinishReason.STOP
    body = server.bodies[0] if flavour == "vllm" else server.bodies[0]["sampling_params"]
    # What is not given, a server takes from the model's generation config.
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    given |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "stop_token_ids": [ids[3]]}
    assert {name: body[name] for name in given} == given
    assert not {"seed", "sampling_seed"} & body.keys()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_replica_that_dies_in_mid_answer_loses_nothing(flavour: Flavour) -> None:
    servers = [FakeServer(flavour=flavour), FakeServer(flavour=flavour)]
    async with engine(*servers) as opened:
        await collect(opened, Sampling(max_tokens=1))
        own = next(server for server in servers if server.bodies)
        other = next(server for server in servers if not server.bodies)
        own.dies_after = 3
        chunks = await collect(opened, Sampling(max_tokens=8, seed=5))
        ids, logprobs = joined(chunks)
        assert ids == continuation(PROMPT, 8)
        assert logprobs == pytest.approx(expected_logprobs(ids), abs=1e-12)
        (continued,) = other.bodies
        vllm = flavour == "vllm"
        params = continued if vllm else continued["sampling_params"]
        assert continued["prompt" if vllm else "input_ids"] == [*PROMPT, *ids[:3]]
        assert params["max_tokens" if vllm else "max_new_tokens"] == 5
        assert params["seed" if vllm else "sampling_seed"] == 8  # not the numbers that were drawn already
        # While it is down its sessions go to the other; then they come back to the cache that knows them.
        own.dies_after = None
        own.bodies.clear()
        await collect(opened, Sampling(max_tokens=1))
        assert not own.bodies
        await asyncio.sleep(0.06)
        await collect(opened, Sampling(max_tokens=1))
        assert len(own.bodies) == 1


async def test_the_only_replica_goes_on_after_a_break_and_an_abort() -> None:
    for trouble in ({"dies_after": 2}, {"aborts_after": 2}):
        server = FakeServer(**trouble)  # type: ignore[arg-type]
        async with engine(server) as opened:
            # each request gives two ids (an abort's are kept), so five take three requests
            chunks = await collect(opened, Sampling(max_tokens=5))
        assert joined(chunks)[0] == continuation(PROMPT, 5)
        assert [len(body["prompt"]) for body in server.bodies] == [5, 7, 9]


async def test_when_none_answers_the_call_fails_with_every_reason() -> None:
    servers = [FakeServer(), FakeServer()]
    async with engine(*servers) as opened:
        servers[0].refuses, servers[1].dies_after = 503, 0
        started = time.monotonic()
        with pytest.raises(EngineError) as caught:
            await collect(opened, Sampling(max_tokens=3))
    assert caught.value.status == 503 and time.monotonic() - started < 5
    assert "HTTP 503" in str(caught.value) and servers[1].url in str(caught.value)


async def test_overload_and_refusals() -> None:
    server = FakeServer()
    async with engine(server) as opened:
        server.refuses = 429
        with pytest.raises(EngineOverloaded) as caught:
            await collect(opened, Sampling(max_tokens=3))
        assert caught.value.retry_after == 2.5
        server.refuses = 400
        with pytest.raises(EngineError, match="refuses the request: HTTP 400"):
            await collect(opened, Sampling(max_tokens=3))
        server.refuses = 0
        with pytest.raises(EngineError, match="do not fit"):
            [c async for c in opened.generate(Prompt(ids=(1,) * 64), Sampling(), affinity="s")]
        image = PlacedImage(sha256="a" * 64, start=0, count=1, grid=(1, 1, 1))
        with pytest.raises(EngineError, match="bytes of image aaaa"):
            [c async for c in opened.generate(Prompt(ids=(1,), images=(image,)), Sampling(), affinity="s")]


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_logprobs_of_another_temperature_are_not_taken_for_ours(flavour: Flavour) -> None:
    with pytest.raises(ConfigError, match="not those of the sampling temperature"):
        async with engine(FakeServer(flavour=flavour, at_temperature=False)):
            pass
    lenient = ServersOptions(require_temperature=False)
    async with engine(FakeServer(flavour=flavour, at_temperature=False), options=lenient) as opened:
        assert all(chunk.logprobs is None for chunk in await collect(opened, Sampling(max_tokens=2, temperature=0.5)))
        ids, logprobs = joined(await collect(opened, Sampling(max_tokens=2)))
        assert logprobs == pytest.approx(expected_logprobs(ids), abs=1e-12)


@pytest.mark.parametrize(
    ("sampling", "truncated"),
    [
        (Sampling(max_tokens=2, top_p=0.9), True),
        (Sampling(max_tokens=2, top_k=3), True),
        (Sampling(max_tokens=2, temperature=0.0), False),
        (Sampling(max_tokens=2, repetition_penalty=1.1), False),
    ],
)
async def test_changed_distributions_give_no_policy_logprobs(sampling: Sampling, truncated: bool) -> None:
    async with engine(FakeServer()) as opened:
        chunks = await collect(opened, sampling)
    assert all(chunk.logprobs is None for chunk in chunks)
    assert all((chunk.sampling_logprobs is not None) == truncated for chunk in chunks)


async def test_a_deadline_and_a_client_that_leaves_end_the_generation() -> None:
    server = FakeServer(delay_s=0.05)
    async with engine(server) as opened:
        chunks = await collect(opened, Sampling(max_tokens=50), deadline=time.time() + 0.3)
        assert chunks[-1].finish is FinishReason.ABORTED and 1 < len(chunks) < 20
        async with aclosing(opened.generate(Prompt(ids=PROMPT), Sampling(max_tokens=50), affinity="s")) as stream:  # type: ignore[type-var]
            await anext(stream)
        async with asyncio.timeout(5):
            while server.left < 2:  # noqa: ASYNC110  the server's side of the end of a connection
                await asyncio.sleep(0.01)


async def test_a_deadline_strikes_the_server_and_not_the_reader() -> None:
    """A reader that is busy with a chunk has the task: what is cancelled then would be the reader's own work."""
    async with engine(FakeServer(delay_s=0.05)) as opened:
        chunks: list[Chunk] = []
        async for chunk in opened.generate(
            Prompt(ids=PROMPT), Sampling(max_tokens=50), affinity="s", deadline=time.time() + 0.2
        ):
            chunks.append(chunk)
            await asyncio.sleep(0.4)  # past the deadline, in the first chunk
    assert [chunk.finish for chunk in chunks] == [None, FinishReason.ABORTED]


@pytest.mark.parametrize("flavour", FLAVOURS[:2])
async def test_new_weights_answer_and_old_ones_never_do(flavour: Flavour, tmp_path: Path) -> None:
    servers = [FakeServer(flavour=flavour), FakeServer(flavour=flavour)]
    async with engine(*servers) as opened:
        await opened.pause()
        waiting = asyncio.create_task(collect(opened, Sampling(max_tokens=4)))
        await asyncio.sleep(0.05)
        assert not waiting.done() and not servers[0].bodies + servers[1].bodies
        await opened.load(tmp_path, 7)
        await opened.resume()
        chunks = await waiting
        ids, logprobs = joined(chunks)
        assert ids == continuation(PROMPT, 4, weights=1)
        assert logprobs == pytest.approx(expected_logprobs(ids, weights=1), abs=1e-12)
        assert {chunk.weights_version for chunk in chunks} == {7} == {opened.weights_version}
        # One that does not take the next ones is left out, whoever's session it is.
        servers[0].takes_weights = False
        servers[0].bodies.clear()
        await opened.load(tmp_path, 8)
        for session in sessions_of(*servers):
            ids, _ = joined(await collect(opened, Sampling(max_tokens=2), session=session))
            assert ids == continuation(PROMPT, 2, 2)
        assert not servers[0].bodies
        servers[1].takes_weights = False
        with pytest.raises(EngineError, match=r"no .* server took weights version 9") as caught:
            await opened.load(tmp_path, 9)
        assert ("VLLM_SERVER_DEV_MODE=1" in str(caught.value)) == (flavour == "vllm")
        assert opened.weights_version == 8
        with pytest.raises(InputError, match="directory"):
            await opened.load({}, 9)


async def test_what_is_no_such_server_is_refused_with_the_reason() -> None:
    def opening(spec: str) -> None:
        open_engine(spec, NoStop(), EngineOptions(servers=QUICK))

    with pytest.raises(ConfigError, match="cannot be reached"):
        await asyncio.to_thread(opening, "vllm:http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="no http"):
        await asyncio.to_thread(opening, "sglang:127.0.0.1:9")
    async with serving(FakeServer(flavour="sglang")) as server:
        with pytest.raises(ConfigError, match="answers 404"):
            await asyncio.to_thread(opening, f"vllm:{server.url}")


def test_a_replica_that_goes_moves_only_its_own_sessions() -> None:
    now = 0.0
    replicas = Replicas([Replica(f"http://r{n}") for n in range(4)], retry_seconds=10.0, clock=lambda: now)
    sessions = [f"session-{n}" for n in range(400)]
    before = {session: replicas.choose(session) for session in sessions}
    # 100 expected each, standard deviation 8.7: within four of them
    for replica in replicas.all:
        assert 65 <= sum(chosen is replica for chosen in before.values()) <= 135
    gone = replicas.all[1]
    replicas.failed(gone, "gone")
    after = {session: replicas.choose(session) for session in sessions}
    assert all(after[session] is before[session] for session in sessions if before[session] is not gone)
    assert all(after[session] is not gone for session in sessions)
    now = 10.0
    assert {session: replicas.choose(session) for session in sessions} == before
    replicas.failed(gone, "again")
    now = 29.9
    assert replicas.choose(next(s for s in sessions if before[s] is gone)) is not gone  # 20 s the second time


HOSTILE = 7
"""An id at which the servers of these tests fail; no prompt or answer of others holds it."""


async def ask(opened: ServerEngine, ids: tuple[int, ...], session: str) -> list[int]:
    stream = opened.generate(Prompt(ids=ids), Sampling(max_tokens=8), affinity=session)
    return joined([chunk async for chunk in stream])[0]


@pytest.mark.parametrize("fails_after", [None, 0, 2])
@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_prompt_at_which_servers_fail_takes_them_from_nobody(flavour: Flavour, fails_after: int | None) -> None:
    servers = [FakeServer(flavour=flavour, fails_at=HOSTILE, fails_after=fails_after) for _ in range(3)]
    patient = ServersOptions(connect_s=20.0, retry_seconds=60.0, patience_s=20.0)  # one mark would be seen
    async with engine(*servers, options=patient) as opened:

        async def hostile(number: int) -> None:
            with pytest.raises(EngineError, match=r"fails at this request: .*(CUDA|assertion)") as caught:
                await ask(opened, (1, HOSTILE, 2), f"hostile-{number}")
            assert caught.value.status == 500

        await asyncio.gather(*(hostile(number) for number in range(9)))
        # Each was tried twice, by two replicas: not once, not by all.
        assert sum(len(server.bodies) for server in servers) == 18
        for server in servers:
            server.bodies.clear()
        answers = await asyncio.gather(*(ask(opened, PROMPT, session) for session in sessions_of(*servers)))
        assert answers == [continuation(PROMPT, 8)] * 12
        assert [len(server.bodies) for server in servers] == [4, 4, 4]  # every replica still has its own sessions


async def test_a_failure_at_one_answer_that_another_replica_does_not_have_is_not_seen() -> None:
    servers = [FakeServer(fails_at=HOSTILE), FakeServer(fails_at=HOSTILE)]
    async with engine(*servers) as opened:
        await ask(opened, PROMPT, "s")
        next(server for server in servers if not server.bodies).fails_at = None
        assert await ask(opened, (1, HOSTILE), "s") == continuation((1, HOSTILE), 8)


async def test_a_replica_that_fails_and_says_that_it_is_ill_is_left_alone() -> None:
    servers = [FakeServer(fails_at=HOSTILE), FakeServer()]
    patient = ServersOptions(connect_s=20.0, retry_seconds=60.0, patience_s=20.0)
    async with engine(*servers, options=patient) as opened:
        sessions = sessions_of(*servers)
        for session in sessions:
            await ask(opened, PROMPT, session)
        assert [len(server.bodies) for server in servers] == [4, 4]
        servers[0].health = 503
        for session in sessions:
            assert await ask(opened, (1, HOSTILE), session) == continuation((1, HOSTILE), 8)
        servers[0].bodies.clear()
        for session in sessions:
            assert await ask(opened, PROMPT, session) == continuation(PROMPT, 8)
        assert not servers[0].bodies


async def test_a_replica_that_may_still_answer_gets_no_weights_and_one_that_may_stand_still_no_prompts(
    tmp_path: Path,
) -> None:
    servers = [FakeServer(), FakeServer()]
    async with engine(*servers) as opened:

        async def update(version: int) -> None:
            await opened.pause()
            await opened.load(tmp_path, version)
            await opened.resume()
            for server in servers:
                server.bodies.clear()
            for session in sessions_of(*servers):
                assert await ask(opened, PROMPT, session) == continuation(PROMPT, 8, weights=version)

        servers[0].update_fails_at = "/pause"  # its last answers took too long
        await update(1)
        assert servers[0].weights == 0 and not servers[0].bodies
        servers[0].update_fails_at, servers[0].weights = "", 1  # as if it had missed nothing
        await update(2)
        assert [len(server.bodies) for server in servers] == [4, 4]
        servers[0].update_fails_at = "/resume"
        await update(3)
        assert servers[0].weights == 3 and not servers[0].bodies
        await asyncio.sleep(3 * QUICK.retry_seconds)
        assert await ask(opened, PROMPT, sessions_of(*servers)[0]) == continuation(PROMPT, 8, weights=3)
        assert not servers[0].bodies  # nor later, by itself
        servers[0].update_fails_at = ""
        await update(4)
        assert [len(server.bodies) for server in servers] == [4, 4]


async def test_an_answer_ended_from_outside_before_its_first_id_waits_and_marks_nobody() -> None:
    """A weight update of somebody else's: what was waiting is ended, and comes again until it is over."""
    servers = [FakeServer(aborts_after=0), FakeServer(aborts_after=0)]
    async with engine(*servers) as opened:
        began = time.monotonic()
        asking = asyncio.create_task(ask(opened, PROMPT, "s"))
        async with asyncio.timeout(10):
            while sum(len(server.bodies) for server in servers) < 3:  # noqa: ASYNC110  the servers' own counters
                await asyncio.sleep(0.01)
        for server in servers:
            server.aborts_after = None
        assert await asking == continuation(PROMPT, 8)
        tries = sum(len(server.bodies) for server in servers)
        assert tries <= 1 + (time.monotonic() - began) / QUICK.retry_seconds  # no busy loop
        assert all(replica.failures == 0 for replica in opened._replicas.all)  # pyright: ignore[reportPrivateUsage]
        for server in servers:
            server.aborts_after = 0
        with pytest.raises(EngineError, match="the server ended the answer: abort"):
            await ask(opened, PROMPT, "s")
