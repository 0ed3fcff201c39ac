"""What an exit and the recorded calls mean, harness by harness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from openforgerl.engines.script import Script
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.harnesses import CommandOptions, HarnessOptions, observed_user_agents
from openforgerl.harnesses.command import CommandHarness
from openforgerl.harnesses.evidence import limit_reached
from openforgerl.harnesses.pi import PiHarness
from openforgerl.harnesses.react import ReactHarness
from openforgerl.protocols import Harness
from openforgerl.proxy import InProcessSessions, ProxyOptions, ProxyServer
from openforgerl.rendering import load_renderer
from openforgerl.store import CallStore, Database
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import CallStatus, Exit, FinishReason, Limits, ModelCall, Sampling

MakeCall = Callable[..., ModelCall]
ALL = [PiHarness(), ReactHarness(), CommandHarness(HarnessOptions(command=CommandOptions(argv=("true",))))]
DONE = Exit(code=0, stdout=b"Done.\n")


def failed(code: str) -> dict[str, Any]:
    return {
        "status": CallStatus.ERROR,
        "answer": None,
        "finish_reason": None,
        "response": {"error": {"message": "no", "code": code}},
        "error": f"{code}: no",
    }


def verdict(harness: Harness, exit: Exit, *calls: ModelCall) -> tuple[str, bool]:
    ending = harness.ending(exit, calls)
    assert ending.evidence
    return ending.kind, ending.by_policy


@pytest.mark.parametrize("harness", ALL, ids=lambda harness: harness.name)
class TestEveryHarness:
    def test_a_normal_end(self, harness: Harness, make_call: MakeCall) -> None:
        assert verdict(harness, DONE, make_call()) == ("finished", True)

    def test_the_time_limit_is_nobodys_crash(self, harness: Harness, make_call: MakeCall) -> None:
        assert verdict(harness, Exit(code=None, signal=9, timed_out=True), make_call()) == ("limit", False)

    def test_killed_from_outside(self, harness: Harness, make_call: MakeCall) -> None:
        bad = make_call(("bash", "{"))
        assert verdict(harness, Exit(code=None, signal=9), make_call()) == ("crashed", False)
        assert verdict(harness, Exit(code=None, signal=9, oom=True), bad) == ("crashed", False)

    def test_a_crash_is_the_harnesss_own(self, harness: Harness, make_call: MakeCall) -> None:
        assert verdict(harness, Exit(code=1, stderr=b"TypeError"), make_call()) == ("crashed", False)
        assert verdict(harness, Exit(code=1)) == ("crashed", False)

    def test_a_crash_right_after_a_malformed_call_is_the_models(self, harness: Harness, make_call: MakeCall) -> None:
        for call in (("bash", '{"command": "ec'), ("bash", "[1]"), ("bash", "null"), ("nosuch", "{}")):
            assert verdict(harness, Exit(code=1), make_call(), make_call(call)) == ("crashed", True)
        # Not if a good answer came after it, and not if the call was good.
        assert verdict(harness, Exit(code=1), make_call(("bash", "{")), make_call()) == ("crashed", False)
        assert verdict(harness, Exit(code=1), make_call(("bash", "{}"))) == ("crashed", False)

    def test_a_provider_error_is_ours(self, harness: Harness, make_call: MakeCall) -> None:
        assert verdict(harness, Exit(code=1), make_call(), make_call(**failed("engine_error"))) == ("crashed", False)

    def test_limits_by_the_last_call(self, harness: Harness, make_call: MakeCall) -> None:
        for code in ("context_length_exceeded", "session_limit"):
            assert verdict(harness, Exit(code=1), make_call(), make_call(**failed(code))) == ("limit", True)
        closed = make_call(**failed("session_closed"))
        assert verdict(harness, Exit(code=1), make_call(), closed) == ("crashed", False)

    def test_limits_by_the_printed_error(self, harness: Harness, make_call: MakeCall) -> None:
        printed = Exit(code=1, stderr=b'403: {"message":"x","code":"session_limit"}')
        assert verdict(harness, printed, make_call()) == ("limit", True)
        closed = Exit(code=1, stderr=b'403: {"message":"x","code":"session_closed"}')
        assert verdict(harness, closed, make_call()) == ("crashed", False)

    def test_the_models_words_cannot_pass_for_a_limit(self, harness: Harness, make_call: MakeCall) -> None:
        said = Exit(code=0, stdout=b"session_closed session_limit context_length_exceeded", stderr=b"session_closed")
        assert verdict(harness, said, make_call()) == ("finished", True)
        crashed = Exit(code=1, stdout=b"session_closed")
        assert verdict(harness, crashed, make_call()) == ("crashed", False)

    def test_an_answer_cut_at_its_length(self, harness: Harness, make_call: MakeCall) -> None:
        cut = make_call(finish_reason=FinishReason.LENGTH)
        assert verdict(harness, Exit(code=1), cut) == ("limit", True)


def test_pi_silences(make_call: MakeCall) -> None:
    pi, silent = PiHarness(), Exit(code=0)
    assert verdict(pi, silent, make_call(text="")) == ("gave_up", True)
    assert verdict(pi, silent, make_call(finish_reason=FinishReason.LENGTH)) == ("limit", True)
    assert verdict(pi, silent, make_call(), make_call(**failed("context_length_exceeded"))) == ("limit", True)
    assert verdict(pi, silent) == ("crashed", False)
    assert verdict(pi, silent, make_call(**failed("engine_error"))) == ("crashed", False)


def test_a_command_need_not_call_the_model(make_call: MakeCall) -> None:
    command = CommandHarness(HarnessOptions(command=CommandOptions(argv=("true",))))
    assert verdict(command, Exit(code=0)) == ("finished", True)
    assert verdict(PiHarness(), DONE) == ("crashed", False)
    assert verdict(ReactHarness(), DONE) == ("crashed", False)


def test_user_agents(make_call: MakeCall) -> None:
    calls = [
        make_call(),
        make_call(request_headers={"user-agent": "curl/8"}),
        make_call(request_headers={}),
        make_call(),
    ]
    assert observed_user_agents(calls) == ("", "curl/8", "pi/1.6.0 (linux; node/v24.19.0; x64)")


async def test_our_words_are_those_that_the_proxy_says(tmp_path: Path) -> None:
    """Every dialect's refusal of a used-up and of a closed session, of which a harness may print the message alone."""
    renderer = load_renderer(write_tiny_model(tmp_path / "model"))
    engine = ScriptedEngine(Script.decode('{"answers": [{"text": "Hi."}]}'), renderer, context_length=4096)
    async with (
        Database.open(tmp_path / "run.sqlite") as database,
        aiohttp.ClientSession() as http,
        ProxyServer(engine=engine, renderer=renderer, store=CallStore(database), options=ProxyOptions()) as proxy,
    ):
        sessions = InProcessSessions(proxy)

        async def refusal(session_id: str, limits: Limits, *, seal: bool, wait: float = 0.0) -> str:
            session = await sessions.open(
                session_id, sampling=Sampling(), limits=limits, metadata={}, template_kwargs={}
            )
            if seal:
                await sessions.seal(session_id)
            await asyncio.sleep(wait)
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
            url, headers = f"{session.base_urls['chat']}/chat/completions", {"Authorization": f"Bearer {session.key}"}
            for _ in range(2):
                async with http.post(url, json=body, headers=headers) as answer:
                    said = await answer.json()
            assert answer.status == 403, said
            return said["error"]["message"]

        used_up = await refusal("one", Limits(calls=1), seal=False)
        sealed = await refusal("two", Limits(), seal=True)
        over = await refusal("three", Limits(seconds=0.05), seal=False, wait=0.1)
    read = [limit_reached(Exit(code=1, stderr=said.encode()), ()) for said in (used_up, sealed, over)]
    assert read == ["session budget", "session closed", "session closed"]
