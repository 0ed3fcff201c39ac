"""`exec` over a websocket (v4 and v5.channel.k8s.io) and `log`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from openforgerl.testing.fake_kubernetes import statuses
from openforgerl.testing.fake_kubernetes.containers import ContainerLog, ExecProcess, StartRefused
from openforgerl.testing.fake_kubernetes.kinds import PODS
from openforgerl.testing.fake_kubernetes.kubelet import Kubelet
from openforgerl.testing.fake_kubernetes.objects import Key
from openforgerl.testing.fake_kubernetes.podlife import PodLife
from openforgerl.testing.fake_kubernetes.podstatus import Slot

STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")


def find(kubelet: Kubelet, key: Key, container: str) -> tuple[PodLife, Slot]:
    """The pod's life and its container. Raises Refusal (400, 404)."""
    stored = kubelet.registry.objects.get(PODS, key)
    life = kubelet.lives[stored.uid]
    names = [one["name"] for one in stored.body["spec"]["containers"]]
    if not container and len(names) > 1:
        listed = " ".join(names)
        raise statuses.bad_request(f"a container name must be specified for pod {key[1]}, choose one of: [{listed}]")
    for slot in life.slots:
        if slot.name == (container or names[0]):
            return life, slot
    raise statuses.bad_request(f"container {container} is not valid for pod {key[1]}")


async def execute(request: web.Request, kubelet: Kubelet, key: Key) -> web.StreamResponse:
    """Run a program in a container. On a lost node this hangs, as it does in a real cluster."""
    query = request.query
    life, slot = find(kubelet, key, query.get("container", ""))
    if "websocket" not in request.headers.get("Upgrade", "").lower():
        raise statuses.bad_request("Upgrade request required")
    if life.lost:
        await asyncio.Event().wait()
    if slot.container is None:
        message = f'container not found ("{slot.name}")'
        raise statuses.Refusal(
            500, "InternalError", f"Internal error occurred: unable to upgrade connection: {message}"
        )
    wants_input = query.get("stdin", "").lower() in ("1", "true")
    socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=0)
    await socket.prepare(request)
    try:
        process = await slot.container.exec(query.getall("command"), stdin=wants_input)
    except StartRefused as error:
        await _end(socket, statuses.Refusal(500, "InternalError", str(error)).body())
        return socket
    try:
        with contextlib.suppress(ConnectionResetError):  # the client has left
            await _serve(socket, process)
    finally:
        process.kill()
    return socket


async def _serve(socket: web.WebSocketResponse, process: ExecProcess) -> None:
    leaving = asyncio.create_task(_input(socket, process))
    outputs = [asyncio.create_task(_output(socket, process, stream)) for stream in (STDOUT, STDERR)]
    try:
        finished = asyncio.gather(*outputs)
        await asyncio.wait({leaving, finished}, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            process.kill()  # the client has left
        await finished
        await _end(socket, outcome(await process.wait()))
    finally:
        for task in (leaving, *outputs):
            task.cancel()
        await asyncio.wait({leaving, *outputs})


async def _input(socket: web.WebSocketResponse, process: ExecProcess) -> None:
    async for message in socket:
        if message.type is not WSMsgType.BINARY and message.type is not WSMsgType.TEXT:
            continue
        data: bytes = message.data if isinstance(message.data, bytes) else message.data.encode()
        if data[:1] == bytes([STDIN]) and len(data) > 1:
            await process.write(data[1:])
        elif data[:1] == bytes([CLOSE]) and data[1:] == bytes([STDIN]) and socket.ws_protocol == PROTOCOLS[0]:
            await process.write(b"")


async def _output(socket: web.WebSocketResponse, process: ExecProcess, stream: int) -> None:
    while data := await process.read(stream, 32768):
        if not socket.closed:
            await socket.send_bytes(bytes([stream]) + data)


def outcome(code: int) -> dict[str, Any]:
    """The `Status` on the error channel."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


async def _end(socket: web.WebSocketResponse, status: dict[str, Any]) -> None:
    if not socket.closed:
        await socket.send_bytes(bytes([ERROR]) + msgspec.json.encode(status))
        await socket.close()


async def read_log(request: web.Request, kubelet: Kubelet, key: Key) -> web.StreamResponse:
    """The container's log; with `follow=true` until it ends."""
    query = request.query
    life, slot = find(kubelet, key, query.get("container", ""))
    if slot.log is None:
        message = f'container "{slot.name}" in pod "{key[1]}" is waiting to start: {slot.reason}'
        raise statuses.bad_request(message)
    if life.lost:
        await asyncio.Event().wait()
    if query.get("previous", "").lower() in ("1", "true"):
        raise statuses.bad_request(f'previous terminated container "{slot.name}" in pod "{key[1]}" not found')
    text = cut(slot.log.read(), query.get("tailLines"), query.get("limitBytes"))
    if query.get("follow", "").lower() not in ("1", "true"):
        return web.Response(body=text, content_type="text/plain")
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionResetError):  # the client has left
        await _follow(response, slot.log, text)
    return response


async def _follow(response: web.StreamResponse, log: ContainerLog, text: bytes) -> None:
    await response.write(text)
    seen = log.written
    while True:
        news = log.news
        if log.written > seen:
            fresh = log.read()[-(log.written - seen) :]  # a rotation cuts it short
            seen = log.written
            await response.write(fresh)
        elif log.ended:
            return
        else:
            await news.wait()


def cut(text: bytes, lines: str | None, size: str | None) -> bytes:
    """`tailLines` of it, and of those the first `limitBytes`."""
    if lines is not None:
        text = b"".join(text.splitlines(keepends=True)[-int(lines) :]) if int(lines) else b""
    return text if size is None else text[: int(size)]
