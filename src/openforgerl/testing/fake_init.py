"""Our init as a coroutine, for pods of a fake cluster that are no processes: thousands on two cores.

It dials like `sandboxes/inside`, speaks the same frames, keeps files in a dictionary and plays programs with a
function.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import struct
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from openforgerl.testing.fake_kubernetes import ProgramContext
from openforgerl.testing.fake_sandbox import Program
from openforgerl.types import Exit

_FRAME = struct.Struct(">II")
_FINAL = (401, 403, 404, 409, 410)
_NUMBERS = itertools.count(1)

Header = dict[str, Any]
Behaviour = Callable[["FakePod", Program], Awaitable[Exit]]
"""Plays every program. May read and write `pod.files`, call a model, sleep, or raise."""


class Over(Exception):
    """Nobody wants this pod any more."""


@dataclass(slots=True)
class FakePod:
    """One init. As an image's program: `Image(program=lambda context: FakePod(behaviour).run(context))`."""

    behaviour: Behaviour
    files: dict[str, tuple[bytes, int]] = field(default_factory=dict[str, tuple[bytes, int]])
    """Absolute path → (bytes, mode)."""
    writer: asyncio.StreamWriter | None = None
    token: str = ""
    """Its credential for the next connection."""
    last: int = 0
    jobs: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, asyncio.Task[None]])
    keys: dict[int, str] = field(default_factory=dict[int, str])
    kept: dict[int, tuple[Header, bytes]] = field(default_factory=dict[int, tuple[Header, bytes]])
    number: int = field(default_factory=lambda: next(_NUMBERS))
    """Stands for its namespaces: no two pods share it."""

    async def run(self, context: ProgramContext) -> int:
        """Dial until the gateway says that it is over, or for `patience` seconds in vain. TERM is ignored, as by a
        first process without a handler."""
        settings: Header = json.loads(context.argv[-1])
        self.token = context.env[settings["token_env"]]
        lost, tries = time.monotonic(), 0
        try:
            while time.monotonic() - lost < settings["patience"]:
                try:
                    await self._converse(settings)
                    lost, tries = time.monotonic(), 0
                except (OSError, asyncio.IncompleteReadError):
                    tries += 1
                await asyncio.sleep(min(0.1 * 2**tries, 10.0) * random.uniform(0.5, 1.5))
        except Over:
            return 0
        finally:
            for job in self.jobs.values():
                job.cancel()
            if self.writer is not None:
                self.writer.transport.abort()
        return 0

    async def _converse(self, settings: Header) -> None:
        """One connection, to its end."""
        reader, writer = await asyncio.open_connection(settings["host"], settings["port"])
        try:
            words = f"GET {settings['path']} HTTP/1.1\r\nHost: {settings['host']}\r\nConnection: Upgrade\r\n"
            words += f"Upgrade: openforgerl-sandbox\r\nAuthorization: Bearer {self.token}\r\n\r\n"
            writer.write(words.encode())
            status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
            if status in _FINAL:
                raise Over
            if status != 101:
                raise OSError(f"status {status}")
            self.writer = writer
            programs = [[number, self.keys[number], True] for number in self.jobs]
            programs += [[number, self.keys[number], False] for number in self.kept]
            self.say({"id": 0, "hello": 1, "last": self.last, "programs": programs, **self._namespaces()})
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    head, body = _FRAME.unpack(await reader.readexactly(_FRAME.size))
                    header = json.loads(await reader.readexactly(head))
                    self._command(header, await reader.readexactly(body))
        finally:
            self.writer = None
            writer.transport.abort()

    def say(self, header: Header, payload: bytes = b"") -> None:
        """Send a frame where there is somebody."""
        if self.writer is not None:
            text = json.dumps(header).encode()
            self.writer.write(_FRAME.pack(len(text), len(payload)) + text + payload)

    def _command(self, header: Header, payload: bytes) -> None:
        number: int = header["id"]
        target: int = header.get("target", 0)
        self.last = max(self.last, number)
        match header["op"]:
            case "exec":
                self._exec(number, header, payload)
            case "cancel" if target in self.jobs:
                self.jobs[target].cancel()
            case "ack":
                if not self.keys.get(target):
                    self.kept.pop(target, None)
            case "credential":
                self.token = header["token"]
                self.say({"id": number, "done": True})
            case "claim":
                self._claim(target)
            case "read":
                self._read(number, header)
            case "write":
                before = self.files.get(header["path"], (b"", 0))[0][: header["offset"]]
                self.files[header["path"]] = (before + payload, header["mode"])
                self.say({"id": number, "done": True})
            case "export":
                self._export(number, header)
            case "kill":
                for job in self.jobs.values():
                    job.cancel()
                self.say({"id": number, "done": True, "survivors": []})
            case "start":
                status = {"CapEff": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2", "Uid": "1000"}
                self.say({"id": number, "done": True, "status": status, "oom_counter": "", **self._namespaces()})
            case "cancel" | "go":
                return
            case _:
                self.say({"id": number, "done": True})

    def _exec(self, number: int, header: Header, payload: bytes) -> None:
        if number in self.jobs or number in self.kept:
            self._claim(number)
            return
        self.keys[number] = header.get("key", "")
        program = Program(tuple(header["argv"]), header["env"], payload, header["timeout"])
        self.jobs[number] = asyncio.create_task(self._play(number, program, header["output_limit"]))

    def _claim(self, number: int) -> None:
        if number in self.kept:
            self.say(*self.kept[number])
        elif number not in self.jobs:
            self.say({"id": number, "done": True, "error": f"program {number} is not known here", "kind": "input"})

    async def _play(self, number: int, program: Program, limit: int) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(program.timeout):
                exit = await self.behaviour(self, program)
        except TimeoutError:
            exit = Exit(code=None, signal=9, timed_out=True)
        except asyncio.CancelledError:
            exit = Exit(code=None, signal=9)
        except Exception:  # noqa: BLE001 - a program that crashes ends its sandbox's program, not the sandbox
            exit = Exit(code=1, stderr=traceback.format_exc().encode())
        out, err = exit.stdout[-limit:], exit.stderr[-limit:]
        answer: Header = {"id": number, "key": self.keys[number], "done": True, "code": exit.code}
        answer |= {"signal": exit.signal, "timed_out": exit.timed_out, "oom": exit.oom, "stdout": len(out)}
        answer["seconds"] = time.monotonic() - begun
        self.kept[number] = (answer, out + err)
        del self.jobs[number]
        self.say(answer, out + err)

    def _read(self, number: int, header: Header) -> None:
        path = header["path"]
        if path not in self.files:
            self.say({"id": number, "done": True, "error": f"{path}: No such file or directory", "kind": "missing"})
            return
        self.say({"id": number, "data": True}, self.files[path][0])
        self.say({"id": number, "done": True})

    def _export(self, number: int, header: Header) -> None:
        roots: list[str] = header["paths"]
        for path, (data, mode) in sorted(self.files.items()):
            if any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots):
                self.say({"id": number, "entry": "file", "path": path, "mode": 0o755 if mode & 0o100 else 0o644})
                self.say({"id": number, "data": True}, data)
        self.say({"id": number, "done": True, "skipped": []})

    def _namespaces(self) -> Header:
        return {"namespaces": {"pid": self.number, "user": self.number}}
