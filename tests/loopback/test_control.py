"""The control API door by door, against its own OpenAPI document."""

from __future__ import annotations

import json
import secrets
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforgerl.errors import ConfigError
from openforgerl.proxy import ProxyOptions, ProxyServer, control_token
from openforgerl.proxy.openapi import document
from openforgerl.rendering import ChatRenderer
from openforgerl.store import CallStore, Database

from .house import Client, ask, house, scripted


async def test_the_doors_of_the_issue(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        opened = await home.control(
            "POST",
            "/v1/sessions",
            {"session_id": "x", "sampling": {"temperature": 0.5}, "limits": {"calls": 9}, "metadata": {"k": "v"}},
        )
        assert opened.status == 200
        assert set(opened.body) == {"session_id", "key", "base_urls"}
        other = await home.control("POST", "/v1/sessions")
        assert other.status == 200
        assert other.body["session_id"] not in ("", "x")
        client = await home.client("y")
        for number in range(5):
            await client.message(ask(str(number)))
        page = (await home.control("GET", "/v1/sessions/y/calls?limit=2")).body
        assert [call["index"] for call in page["calls"]] == [0, 1]
        page = (await home.control("GET", f"/v1/sessions/y/calls?after={page['next']}&limit=2")).body
        assert [call["index"] for call in page["calls"]] == [2, 3]
        page = (await home.control("GET", f"/v1/sessions/y/calls?after={page['next']}&limit=2")).body
        assert ([call["index"] for call in page["calls"]], page["next"]) == ([4], None)
        whole = (await home.control("GET", "/v1/sessions/y/calls")).body
        assert (len(whole["calls"]), whole["next"]) == (5, None)
        wanted = (
            "call_id index dialect thread role role_evidence parent_call_id status prompt_ids sampled_ids logprobs "
            "finish_reason weights_version sampling_asked sampling_applied off_policy request response"
        )
        assert set(wanted.split()) <= set(whole["calls"][0])
        assert whole["calls"][0]["status"] == "complete"
        sealed = await home.control("POST", "/v1/sessions/y/seal")
        assert (sealed.status, sealed.body) == (200, {"session_id": "y", "state": "sealed"})
        samples = (await home.control("GET", "/v1/sessions/y/samples")).body
        assert set(samples) == {"samples", "totals"}
        assert set(samples["totals"]) == {"sampled", "trained", "masked", "dropped"}
        assert set(samples["samples"][0]) == {"ids", "spans", "logprobs", "source"}
        assert set(samples["samples"][0]["spans"][0]) == {"start", "stop", "call_id", "offset", "state", "reason"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"shiny": 1}, "shiny"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature"),
        ({"limits": {"call": 1}}, "limits.call"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling"),
        ({"sampling": []}, "sampling"),
        ({"sampling": [1]}, "sampling"),
        ({"limits": {"calls": 0}}, "limits"),
        ({"limits": {"concurrent": 0}}, "limits"),
        ({"metadata": {"a": 1}}, None),
        ({"session_id": 5}, "session_id"),
        ({"session_id": "../x"}, "session_id"),
    ],
)
async def test_a_complaint_names_the_field(
    tmp_path: Path, renderer: ChatRenderer, body: dict[str, Any], param: str | None
) -> None:
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        reply = await home.control("POST", "/v1/sessions", body)
    assert reply.status == 400
    error = reply.body["error"]
    assert error["code"] == "invalid_request"
    if param is not None:
        assert error["param"] == param
    assert (param or "metadata").split(".")[-1] in error["message"]


@pytest.mark.parametrize(
    ("query", "param"),
    [("after=x", "after"), ("after=-2", "after"), ("limit=0", "limit"), ("limit=1001", "limit"), ("page=1", "page")],
)
async def test_a_bad_query_is_named(tmp_path: Path, renderer: ChatRenderer, query: str, param: str) -> None:
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        await home.client("y")
        reply = await home.control("GET", f"/v1/sessions/y/calls?{query}")
    assert (reply.status, reply.body["error"]["param"]) == (400, param)


async def test_only_the_token_opens_the_doors(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        client = await home.client("y")
        for token in ("", "x" * 64, client.session.key, home.token[:-1], home.token + "0"):
            for method, path in (
                ("POST", "/v1/sessions"),
                ("POST", "/v1/sessions/y/seal"),
                ("GET", "/v1/sessions/y/calls"),
                ("GET", "/v1/sessions/y/samples"),
                ("GET", "/v1/nothing"),
            ):
                reply = await home.control(method, path, token=token)
                assert (reply.status, reply.body["error"]["code"]) == (401, "invalid_token"), (token, path)
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("DELETE", "/v1/sessions", 405),
            ("GET", "/v1/sessions/nobody/calls", 404),
            ("GET", "/v1/sessions/nobody/samples", 404),
            ("POST", "/v1/sessions/nobody/seal", 404),
        ):
            assert (await home.control(method, path)).status == status
        duplicate = await home.control("POST", "/v1/sessions", {"session_id": "y"})
        assert (duplicate.status, duplicate.body["error"]["code"]) == (409, "session_exists")


async def test_the_document_describes_every_door(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        async with home.http.get(f"{home.control_url}/openapi.json") as response:
            served = await response.json()
        assert served == json.loads(msgspec.json.encode(document()))
        for path, methods in served["paths"].items():
            for method, operation in methods.items():
                url = home.control_url + path.replace("{session_id}", "nobody")
                async with home.http.request(method, url) as response:
                    # Without a token: open doors answer, the others say 401, none is unknown.
                    assert response.status == (200 if operation.get("security") == [] else 401)
                reply = await home.control(method.upper(), path.replace("{session_id}", "nobody"))
                assert str(reply.status) in operation["responses"]
        references = _references(served)
    assert references
    for reference in references:
        at: Any = served
        for step in reference.removeprefix("#/").split("/"):
            at = at[step]


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set[str]()
        return found.union(*map(_references, value.values()))
    return set[str]().union(*map(_references, value)) if isinstance(value, list) else set()


def test_the_token_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    token = control_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) == 64
    assert control_token(path) == token
    path.write_text("  chosen-by-a-person-1234\n")
    assert control_token(path) == "chosen-by-a-person-1234"
    for bad in ("", "short", "two words are not one token"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="must hold one token"):
            control_token(path)
    with pytest.raises(ConfigError, match="cannot be used"):
        control_token(tmp_path)


def test_no_empty_token_file_is_ever_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: int) -> str:
        raise KeyboardInterrupt

    path = tmp_path / "token"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(secrets, "token_hex", killed)
        control_token(path)
    assert not path.exists()
    assert len(control_token(path)) == 64
    assert list(tmp_path.iterdir()) == [path]


def test_of_two_processes_that_make_a_token_the_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"

    def late(_: int) -> str:
        path.write_text("made-by-the-other-process")
        return "0" * 64

    monkeypatch.setattr(secrets, "token_hex", late)
    assert control_token(path) == "made-by-the-other-process"


async def test_without_a_token_file_there_is_no_control_port(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with (
        Database.open(tmp_path / "run.sqlite") as database,
        ProxyServer(engine=scripted(renderer), renderer=renderer, store=CallStore(database)) as proxy,
    ):
        assert proxy.data_address[1] > 0
        with pytest.raises(ConfigError, match="control_token_file"):
            _ = proxy.control_address


@pytest.mark.parametrize("field", [{"port": 70000}, {"keep_alive_s": 0}, {"body_limit_mb": -1}])
def test_options_are_checked(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        ProxyOptions(**field)


async def test_a_public_url_is_what_agents_are_given(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer), public_url="https://proxy.example/") as home:
        client: Client = await home.client("y")
        urls = client.session.base_urls
    assert urls["chat"] == urls["responses"] == "https://proxy.example/s/y/v1"
    assert urls["messages"] == urls["gemini"] == "https://proxy.example/s/y"
