"""Through the real proxy: volatile lines, dropped thoughts, and prefixes that break while a session runs."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from openforgerl.cli.proxy import ProxyConfig
from openforgerl.config import load_config
from openforgerl.errors import ConfigError
from openforgerl.proxy.samples import session_samples
from openforgerl.rendering import ChatRenderer
from openforgerl.trajectory import build, check_exact, find_breaks

from .house import TOOLS, Client, House, ask, house, scripted

HEADER = "x-billing: cch={};"
SCRUB = (r"^x-billing: .*cch=", r"^Today is ")


def talk(turn: int, history: list[dict[str, Any]], system: str = "Be good.") -> dict[str, Any]:
    head = {"role": "system", "content": f"{HEADER.format(f'{turn:05x}')}\r\n{system}\nToday is day {turn}.\n"}
    return {"messages": [head, *history], "tools": TOOLS}


async def led(client: Client, turns: int) -> None:
    """A harness whose system prompt holds a counter and a date."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "Today is what the user says."}]
    for turn in range(turns):
        answer = await client.message(talk(turn, history))
        history += [answer, {"role": "user", "content": f"And {turn}?"}]


async def rows(home: House, session: str = "s1") -> int:
    return len(session_samples(home.proxy.sessions.get(session).record, await home.calls(session)).samples)


async def test_scrubbed_lines_reach_no_model_and_break_no_prefix(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = scripted(renderer, {"text": "Yes.", "times": 0})
    async with house(tmp_path, renderer, engine, scrub=SCRUB) as home:
        client = await home.client()
        await led(client, 3)
        calls = await home.calls()
        assert await rows(home) == 1
    for turn, call in enumerate(calls):
        text = renderer.decode(call.prompt.ids)
        assert "x-billing" not in text and "day" not in text and "Be good.\n" in text
        # What the harness sent is in the record as it came, and so is that something was left out.
        assert call.request == talk(turn, call.request["messages"][1:])
        assert call.warnings == tuple(f"scrubbed: {pattern}" for pattern in SCRUB)
    assert calls[2].parent_call_id == calls[1].call_id
    # The user's text had only that line: the block goes with it. What an assistant or a tool says is never touched.
    assert calls[0].conversation.messages[1].parts == ()


async def test_without_a_scrub_list_nothing_is_removed_and_every_call_is_a_row(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "Yes.", "times": 0})) as home:
        await led(await home.client(), 3)
        calls = await home.calls()
        assert await rows(home) == 3
    assert "cch=00002" in renderer.decode(calls[2].prompt.ids)


async def test_counting_tokens_counts_what_would_be_rendered(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = scripted(renderer, {"text": "Yes.", "times": 0})
    async with house(tmp_path, renderer, engine, scrub=("^x-billing",)) as home:
        client = await home.client()
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": f"{HEADER.format(1)}\nHi."}]}
        url = f"{client.session.base_urls['messages']}/v1/messages"
        head = {"x-api-key": client.session.key}
        async with client.http.post(f"{url}/count_tokens", json=body, headers=head) as answer:
            counted = (await answer.json())["input_tokens"]
        async with client.http.post(url, json=body, headers=head) as answer:
            assert answer.status == 200
        (call,) = await home.calls()
    assert counted == len(call.prompt.ids)
    assert renderer.decode(call.prompt.ids).count("Hi.") == 1


@pytest.mark.parametrize("bad", ["[", "(?P<x"])
def test_a_scrub_list_holds_regular_expressions(bad: str) -> None:
    with pytest.raises(ConfigError, match="scrub must be regular expressions"):
        load_config(ProxyConfig, None, [f"proxy.scrub=['{bad}']"])


# -- thoughts

THINKS = {"reasoning": "I wonder.", "text": "Well.", "times": 0}


async def forgetful(client: Client, turns: int) -> None:
    """A harness that sends tool-using turns back without their thoughts."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for turn in range(turns):
        answer = await client.message({"messages": history, "tools": TOOLS})
        assert answer.pop("reasoning_content") == "I wonder."
        (call,) = answer["tool_calls"]
        history += [answer, {"role": "tool", "tool_call_id": call["id"], "content": f"seen {turn}"}]


CALLS = {"reasoning": "I wonder.", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}], "times": 0}


async def test_as_the_template_does_is_the_default(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, CALLS)) as home:
        await forgetful(await home.client(), 4)
        calls = await home.calls()
        assert await rows(home) == 4
    assert "I wonder." not in renderer.decode(calls[3].prompt.ids)
    assert Counter(found.cause for found in find_breaks(build("s1", calls))) == {"reasoning_dropped": 3}


async def test_restored_thoughts_make_one_exact_row(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, CALLS), reasoning="restore") as home:
        await forgetful(await home.client(), 4)
        calls = await home.calls()
        found = session_samples(home.proxy.sessions.get("s1").record, calls)
    (sample,) = found.samples
    assert renderer.decode(calls[3].prompt.ids).count("I wonder.") == 3
    assert sample.trained_tokens == found.totals.sampled == sum(len(call.sampled_ids) for call in calls)
    check_exact(sample, {call.call_id: call for call in calls})
    # The turns are the sampled ids themselves, not a new encoding of the thought.
    ids = calls[3].prompt.ids
    for before in calls[:3]:
        start = len(before.prompt.ids)
        assert ids[start : start + len(before.sampled_ids)] == before.sampled_ids
    assert calls[0].warnings == () and calls[3].warnings == ("thoughts restored that the harness had dropped",)
    assert "reasoning_content" not in repr(calls[3].request)


async def test_what_the_harness_rewrote_otherwise_gets_no_thought_back(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, THINKS), reasoning="restore") as home:
        client = await home.client()
        answer = await client.message(ask("Go."))
        history = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": answer["content"] + " Edited."}]
        await client.message({"messages": [*history, {"role": "user", "content": "And?"}]})
        calls = await home.calls()
    assert "I wonder." not in renderer.decode(calls[1].prompt.ids)
    assert "thoughts restored that the harness had dropped" not in calls[1].warnings


# -- prefixes that break


async def test_a_broken_prefix_is_said_once_for_each_cause_and_harness_and_counted(
    tmp_path: Path, renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "openforgerl.proxy.placing")
    async with house(tmp_path, renderer, scripted(renderer, {"text": "Yes.", "times": 0})) as home:
        for number in range(2):
            await led(await home.client(f"s{number}", metadata={"harness": "clock"}), 3)
        other = await home.client("s2", metadata={"harness": "other"})
        history: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
        history += [await other.message(talk(0, history)), {"role": "user", "content": "And?"}]
        await other.message({**talk(0, history), "tools": []})
        await led(await home.client("s3", metadata={"harness": "third"}), 2)
        calls = await home.calls("s1")
        breaks = find_breaks(build("s1", calls))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0].startswith(
        "clock (session s0): a prefix broke at messages[0], marker_changed: 'illing: cch=00000;\\r\\nBe good."
    )
    assert "became 'illing: cch=00001;" in said[0]
    assert said[1].startswith("other (session s2): a prefix broke at tools, tools_changed: 'bash' became ''")
    assert said[2].startswith("third (session s3): a prefix broke at messages[0], marker_changed")
    # Every call says so in the record, as the audit finds it later.
    assert [call.warnings for call in calls] == [
        (),
        ("prefix broken: marker_changed",),
        ("prefix broken: marker_changed",),
    ]
    assert [found.cause for found in breaks] == ["marker_changed"] * 2


async def test_a_conversation_that_goes_on_breaks_nothing(
    tmp_path: Path, renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "Yes.", "times": 0})) as home:
        client = await home.client()
        history: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
        for _ in range(3):
            answer = await client.message({"messages": history})
            await client.message({"messages": history})  # asked again: a retry breaks nothing
            history += [answer, {"role": "user", "content": "And?"}]
        calls = await home.calls()
    assert [call.warnings for call in calls] == [()] * 6
    assert not [record for record in caplog.records if record.name == "openforgerl.proxy.placing"]


async def test_breaks_are_seen_after_a_restart(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = scripted(renderer, {"text": "Yes.", "times": 0})
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client()
        first = await client.message(talk(0, [{"role": "user", "content": "Go."}]))
        session = client.session
    async with house(tmp_path, renderer, scripted(renderer, {"text": "Yes.", "times": 0})) as home:
        urls = home.proxy.base_urls(session.session_id)
        again = Client(home.http, type(session)(session_id=session.session_id, key=session.key, base_urls=urls))
        await again.message(talk(1, [{"role": "user", "content": "Go."}, first, {"role": "user", "content": "And?"}]))
        calls = await home.calls()
    assert calls[1].warnings == ("prefix broken: marker_changed",)
