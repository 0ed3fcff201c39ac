"""The agent has found a way into its init: the host is harmed by nothing that it says, and calls it what it is."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import InputError, StageError
from openforgerl.types import Origin, Stage

_spec = importlib.util.spec_from_file_location("liar", Path(__file__).with_name("liar.py"))
assert _spec is not None and _spec.loader is not None
liars: Any = sys.modules.setdefault("liar", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(liars)

MEGABYTE = bytes(1 << 20)
ENDED = {"done": True, "code": 0, "signal": None, "stdout": 0, "timed_out": False, "oom": False, "seconds": 0.1}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def exec_(sandbox: Any) -> Any:
    return await sandbox.exec(["true"], env={}, timeout=60)


async def read(sandbox: Any) -> Any:
    return await sandbox.read("/x", limit=10)


async def kill(sandbox: Any) -> Any:
    return await sandbox.kill_agent()


async def unsound(call: Callable[[Any], Any], answer: Any) -> StageError:
    """The error of `call` to such an init, which must come at once and be no other."""
    vessel = liars.PaperVessel()
    async with liars.sandbox_of(answer, vessel) as (sandbox, _), asyncio.timeout(10):
        with pytest.raises(StageError) as raised:
            await call(sandbox)
    error = raised.value
    assert (error.stage, error.kind, error.origin) == (Stage.SANDBOX, "init_unsound", Origin.INFRASTRUCTURE)
    assert vessel.destroyed == 1 and error.message.isprintable()
    return error


def saying(*frames: tuple[Any, bytes]) -> Any:
    """An init that answers with these; in their headers `id` is filled in."""

    async def answer(liar: Any, asked: dict[str, Any]) -> None:
        for header, payload in frames:
            said = {"id": asked["id"], **header} if isinstance(header, dict) else header
            await liar.say(said, payload)

    return answer


def flooding(header: dict[str, Any], payload: bytes) -> Any:
    async def answer(liar: Any, asked: dict[str, Any]) -> None:
        while True:
            await liar.say({"id": asked["id"], **header}, payload)

    return answer


@pytest.mark.parametrize("call", [exec_, read, kill])
@pytest.mark.parametrize("payload", [MEGABYTE, b""])
async def test_a_flood_fills_no_memory(call: Any, payload: bytes) -> None:
    before = peak_mb()
    error = await unsound(call, flooding({"data": True}, payload))
    assert "that were asked for" in error.message
    assert peak_mb() - before < 80


async def test_a_flood_waits_for_who_takes_it_slowly() -> None:
    """An export may be large: what waits for the disk is not all of it."""
    async with liars.channel_to(flooding({"data": True}, MEGABYTE)) as (channel, liar):
        frames = channel.stream("export", {})
        await anext(frames)
        while True:
            written = liar.written
            await asyncio.sleep(0.3)
            if liar.written == written:
                break
        assert 30 << 20 < written < 40 << 20
        for _ in range(40):
            await anext(frames)
        await asyncio.sleep(0.3)
        assert liar.written > written
        await frames.aclose()  # and whoever leaves lets the others go on
        await asyncio.sleep(0.3)
        assert liar.written > 100 << 20


async def test_no_more_is_read_than_was_asked_for() -> None:
    async with liars.sandbox_of(saying(({"data": True}, b"1234567890"), ({"done": True}, b""))) as (sandbox, _):
        assert await read(sandbox) == b"1234567890"
    await unsound(read, saying(({"data": True}, bytes(2 << 20)), ({"done": True}, b"")))


def deep(length: int) -> bytes:
    return b'{"id": 1, "x": ' + b"[" * length + b"]" * length + b"}"


@pytest.mark.parametrize(
    "said",
    [
        deep(100_000),
        deep(900),
        b'{"id": 1, "done": true, "seconds": NaN}',
        b'{"id": 1, "done": true, "seconds": 1e999}',
        b'{"id": 1, "x": ' + b"9" * 5000 + b"}",
        b"[1]",
        b"1",
        b"",
        b"{}",
        b'{"id": [1]}',
        b'{"id": {}}',
        b'{"id": 1, "x": "\xff"}',
        b'\xff\xfe{\x00"\x00',
        b"x" * (2 << 20),
    ],
    ids=lambda said: said[:24].decode("latin-1") + str(len(said)),
)
async def test_what_is_no_frame_ends_it_at_once(said: bytes) -> None:
    await unsound(exec_, saying((said, b"")))


async def test_a_frame_larger_than_any_is_not_waited_for() -> None:
    async def answer(liar: Any, asked: dict[str, Any]) -> None:
        liar.writer.write(liars.FRAME.pack(10, 1 << 31))

    await unsound(exec_, answer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"code": "x"},
        {"code": 1.5},
        {"signal": [1]},
        {"stdout": None},
        {"timed_out": 3},
        {"oom": "no"},
        {"seconds": "x"},
        {"seconds": None},
    ],
    ids=str,
)
async def test_an_end_that_is_none(wrong: dict[str, Any]) -> None:
    await unsound(exec_, saying((ENDED | wrong, b"")))
    (name,) = wrong
    await unsound(exec_, saying(({key: value for key, value in ENDED.items() if key != name}, b"")))


async def test_survivors_and_pids_that_are_none() -> None:
    await unsound(kill, saying(({"done": True}, b"")))
    await unsound(kill, saying(({"done": True, "survivors": [["x", 1, 2]]}, b"")))
    await unsound(exec_, saying(({"started": "x"}, b"")))


async def exported(answer: Any, folder: Path) -> StageError:
    return await unsound(lambda sandbox: sandbox.export(["/w"], folder / "out", limit=100), answer)


def file(path: Any, mode: Any = 0o644) -> tuple[dict[str, Any], bytes]:
    return {"entry": "file", "path": path, "mode": mode}, b""


async def test_an_export_that_is_none(tmp_path: Path) -> None:
    data = ({"data": True}, bytes(60))
    lies: dict[str, list[Any]] = {
        "more bytes": [file("/w/a"), data, data],
        "of no file": [data],
        "more files": [file(f"/w/{number}") for number in range(51)],
        "more files and": [({"entry": "directory", "path": f"/w/{number}"}, b"") for number in range(51)],
        "twice": [file("/w/a"), file("/w/a")],
        "same path": [file("/w/a"), file("/w/a/b")],
        "same": [file("/w/a"), ({"entry": "directory", "path": "/w/a"}, b"")],
        "the path": [file("/w/../../b")],
        "path None": [file(None)],
        "path 7": [file(7)],
        "path '/w": [file("/w/\ud800")],
        "3000 bytes": [file("/w" + "/x" * 1500)],
        "mode": [file("/w/b", "rw")],
        "missing required": [({"done": True}, b"")],
        "Expected": [({"done": True, "skipped": "x"}, b"")],
    }
    for number, (words, frames) in enumerate(lies.items()):
        (tmp_path / str(number)).mkdir()
        error = await exported(saying(*frames), tmp_path / str(number))
        assert words in error.message, (words, error.message)
        assert sorted(path.name for path in (tmp_path / str(number)).iterdir()) == ["out"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, range(len(lies))))


async def test_an_export_that_says_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openforgerl.sandboxes.sandbox._SILENCE", 0.3)
    async with liars.sandbox_of(saying(file("/w/a"))) as (sandbox, _):
        with pytest.raises(StageError) as raised:
            await sandbox.export(["/w"], tmp_path / "out", limit=100)
    assert raised.value.kind == "sandbox_hangs"


NAMES = {"a\udcffb": "a\\udcffb", "\x1b[2J": "\\x1b[2J", "new\nline": "new\\nline", "abc\u202edef": "abc\\u202edef"}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_what_it_says_is_text_that_can_be_recorded_and_shown(name: str, tmp_path: Path) -> None:
    """Names of files and processes are the agent's own choice, and no terminal may obey them."""
    shown = NAMES[name]
    refusing = saying(({"done": True, "error": f"{name}: too large", "kind": "limit"}, b""))
    async with liars.sandbox_of(refusing) as (sandbox, _):
        with pytest.raises(StageError) as refused:
            await exec_(sandbox)
    assert refused.value.message == f"{shown}: too large"
    for kind, error in (("input", InputError), ("io", OSError), ("missing", FileNotFoundError), (None, InputError)):
        async with liars.sandbox_of(saying(({"done": True, "error": name, "kind": kind}, b""))) as (sandbox, _):
            with pytest.raises(error) as raised:
                await exec_(sandbox)
            assert str(raised.value) == shown
    async with liars.sandbox_of(saying(({"done": True, "survivors": [[7, name, "Z"]]}, b""))) as (sandbox, _):
        with pytest.raises(StageError) as alive:
            await kill(sandbox)
    assert json.dumps(shown)[1:-1] in alive.value.message and alive.value.message.isprintable()
    told = saying(({"done": True, "skipped": [[name, name]]}, b""))
    async with liars.sandbox_of(told) as (sandbox, _):
        await sandbox.export(["/w"], tmp_path / "skipped", limit=100)
        assert sandbox.report["export_skipped"] == [[shown, shown]]


async def test_a_name_that_is_no_text_comes_out_as_it_is(tmp_path: Path) -> None:
    """Were it written otherwise, two files of one directory could become one."""
    frames = [file("/w/\udcff"), ({"data": True}, b"1"), file("/w/\\udcff"), ({"data": True}, b"2")]
    async with liars.sandbox_of(saying(*frames, ({"done": True, "skipped": []}, b""))) as (sandbox, _):
        await sandbox.export(["/w"], tmp_path / "out", limit=100)
    out = {path.name: path.read_bytes() for path in (tmp_path / "out/w").iterdir()}
    assert out == {"\udcff": b"1", "\\udcff": b"2"}


async def test_a_close_that_fails_is_tried_again_and_leaves_the_record_until_it_works() -> None:
    vessel = liars.PaperVessel(failures=2)
    async with liars.sandbox_of(saying(), vessel) as (sandbox, _):
        for _ in range(2):
            with pytest.raises(StageError, match="busy"):
                await sandbox.close()
            assert vessel.recorded
        await asyncio.gather(sandbox.close(), sandbox.close())
        await sandbox.close()
    assert (vessel.destroyed, vessel.recorded) == (3, False)


async def test_a_removal_that_fails_hides_no_reason() -> None:
    vessel = liars.PaperVessel(failures=1)
    async with liars.sandbox_of(saying((b"[]", b"")), vessel) as (sandbox, _):
        with pytest.raises(StageError) as raised:
            await exec_(sandbox)
        assert raised.value.kind == "init_unsound" and vessel.recorded
        await sandbox.close()
    assert not vessel.recorded
