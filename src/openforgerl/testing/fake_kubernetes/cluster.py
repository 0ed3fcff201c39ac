"""The fake cluster as one object: start it, plant faults in it, ask what happened."""

from __future__ import annotations

import asyncio
import base64
import secrets
import shutil
import socket
import ssl
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
from aiohttp import web

from openforgerl.testing.fake_kubernetes import certificates, policies
from openforgerl.testing.fake_kubernetes.access import Access
from openforgerl.testing.fake_kubernetes.app import ApiServer, Counts
from openforgerl.testing.fake_kubernetes.clock import Clock, Timings
from openforgerl.testing.fake_kubernetes.collecting import Collector
from openforgerl.testing.fake_kubernetes.containers import Image
from openforgerl.testing.fake_kubernetes.faults import Faults
from openforgerl.testing.fake_kubernetes.jobs import Jobs
from openforgerl.testing.fake_kubernetes.kinds import NAMESPACES, PODS, Object
from openforgerl.testing.fake_kubernetes.kubelet import Kubelet
from openforgerl.testing.fake_kubernetes.networks import PodNetwork
from openforgerl.testing.fake_kubernetes.nodes import Nodes, NodeSpec
from openforgerl.testing.fake_kubernetes.objects import Key, Objects
from openforgerl.testing.fake_kubernetes.registry import Registry
from openforgerl.testing.fake_kubernetes.scenarios import Scenarios
from openforgerl.testing.fake_kubernetes.warmpools import WarmPools
from openforgerl.testing.fake_kubernetes.watching import Watching


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What a cluster is made of. `port` 0: any free one. `namespaces`: besides `default` and `kube-system`."""

    nodes: Sequence[NodeSpec] = (NodeSpec(name="node-0"),)
    namespaces: Sequence[str] = ()
    clock: Clock = field(default_factory=Clock)
    timings: Timings = field(default_factory=Timings)
    images: Mapping[str, Image] = field(default_factory=dict[str, Image])
    """Pattern of image names → what they stand for. Other names: this machine's own system, read-only."""
    volume_images: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Reference of an image volume → directory."""
    rotate_at: int = 10 << 20
    """Bytes of a log above which it is rotated."""
    network: Literal["machine", "own"] = "machine"
    """`own`: pods have addresses and uids of their own, and NetworkPolicies are enforced (networks.py; as root)."""
    port: int = 0
    tls: bool = False
    """Serve HTTPS with a certificate of its own (needs openssl). kubectl sends its token to no other server."""


def _abort(runner: web.AppRunner) -> None:
    for connection in list(runner.server.connections) if runner.server is not None else []:
        if connection.transport is not None:
            connection.transport.abort()


class FakeCluster:
    """`async with FakeCluster() as cluster:` serves an API on 127.0.0.1 and runs what is created there.

    Pods are real processes in bubblewrap (`Image()`) or coroutines (`Image(program=...)`). `scenarios` plants what
    goes wrong with pods and is the oracle; `faults` are the API server's own; `counts` what it was asked; `access`
    the tokens. Leaving kills every container.
    """

    def __init__(self, options: ClusterOptions | None = None) -> None:
        self.options = options or ClusterOptions()
        self.scenarios = Scenarios()
        self.faults = Faults(bookmark_every=60.0 * self.options.clock.cluster)
        self.access = Access()
        self.token = self.access.add("system:admin", master=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []
        """Bugs of the fake itself: tests should find it empty, and `close` raises the first."""
        self._state = Path(tempfile.gettempdir(), f"fake-kubernetes-{secrets.token_hex(8)}")
        clock, timings = self.options.clock, self.options.timings
        self.objects = Objects()
        self.registry = Registry(self.objects, clock)
        self._collector = Collector(self.objects, self.registry, clock, timings, self._spawn)
        self._jobs = Jobs(self.registry, clock, timings, self._spawn)
        self._warm_pools = WarmPools(self.registry, clock, timings, self._spawn)
        self.nodes = Nodes(self.registry, clock, timings, self._spawn)
        self.network = PodNetwork(self.objects, self._spawn) if self.options.network == "own" else None
        self.kubelet = Kubelet(
            registry=self.registry,
            clock=clock,
            timings=timings,
            nodes=self.nodes,
            scenarios=self.scenarios,
            spawn=self._spawn,
            state=self._state,
            images=dict(self.options.images),
            volume_images=dict(self.options.volume_images),
            rotate_at=self.options.rotate_at,
            network=self.network,
        )
        self.objects.listeners.append(self.kubelet.noticed)
        if self.network is not None:
            self.objects.listeners.append(self.network.noticed)
        self.watching = Watching(self.objects, self.scenarios, self.faults, clock.cluster)
        self.server = ApiServer(self.registry, self.watching, self.kubelet, self.access, self.scenarios, self.faults)
        self._runner: web.AppRunner | None = None
        self._tls: ssl.SSLContext | None = None
        self.certificate = b""
        """PEM, with `tls`."""
        self.port = self.options.port

    @property
    def counts(self) -> Counts:
        """What the API server was asked."""
        return self.server.counts

    @property
    def url(self) -> str:
        """Of the API server."""
        return f"{'https' if self.options.tls else 'http'}://127.0.0.1:{self.port}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def __aenter__(self) -> FakeCluster:
        if self.network is not None:
            await self.network.open()
        self._state.mkdir(mode=0o711 if self.network is not None else 0o700)
        for name in ("default", "kube-system", *self.options.namespaces):
            body: Object = {"metadata": {"name": name}, "status": {"phase": "Active"}}
            self.registry.create(NAMESPACES, "", body)
        for spec in self.options.nodes:
            self.nodes.add(spec)
        if self.options.tls:
            self._tls, self.certificate = await asyncio.to_thread(certificates.make, self._state)
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _listen(self) -> None:
        self._runner = web.AppRunner(
            self.server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.05
        )
        await self._runner.setup()
        listener = socket.create_server(("127.0.0.1", self.port), backlog=2048)
        await web.SockSite(self._runner, listener, ssl_context=self._tls).start()
        self.port = listener.getsockname()[1]

    async def stop_serving(self, linger: float = 0.0) -> None:
        """Stop the API server: connections are refused, and after `linger` seconds watches break. Pods and data stay.

        A real one that is told to stop keeps open watches for up to 60 s.
        """
        if self._runner is not None:
            server, self._runner = self._runner, None
            for site in list(server.sites):
                await site.stop()
            await asyncio.sleep(linger)
            self.watching.drop()
            _abort(server)
            await server.cleanup()
            await asyncio.sleep(0)  # what was accepted meanwhile has a transport only now
            _abort(server)
            await asyncio.sleep(0)

    async def restart(self, down: float = 0.5, *, linger: float = 0.0) -> None:
        """Stop the API server and start it again on the same port after `down` seconds."""
        await self.stop_serving(linger)
        await asyncio.sleep(down)
        await self._listen()

    def compact(self) -> None:
        """Forget the history: watches from versions before now are told 410."""
        self.objects.compact()

    def expire_watches(self) -> None:
        """Tell every open watch 410 in its stream."""
        self.watching.expire()

    def reachable(self, source: Key, target: Key | str, port: int) -> bool:
        """Whether the NetworkPolicies would let pod `source` (namespace, name) reach a port of `target`.

        `target`: a pod, or an address outside the cluster. Only `network="own"` enforces it. Raises Refusal (404).
        """
        found = target if isinstance(target, str) else self.objects.get(PODS, target).body
        return policies.allowed(self.objects, self.objects.get(PODS, source).body, found, port)

    def lose_node(self, name: str) -> None:
        """Stop a node's kubelet."""
        self.nodes.lose(name)

    def restore_nodes(self) -> None:
        """Start the kubelet of every lost node again."""
        for name in list(self.nodes.nodes):
            self.kubelet.restore(name)

    async def settled(self, timeout: float = 30.0) -> None:
        """Until no container runs and no pod's life goes on. Raises TimeoutError with what is left."""
        try:
            async with asyncio.timeout(timeout):
                await self.kubelet.quiet()
        except TimeoutError as error:
            left = [f"{'/'.join(life.key)} ({life.uid})" for life in self.kubelet.lives.values()]
            raise TimeoutError(f"pods that still live: {', '.join(left)}") from error

    async def close(self) -> None:
        """Stop serving, kill every container, remove every folder. Raises the first of `errors`."""
        await self.stop_serving()
        for task in list(self._tasks):
            task.cancel()
        self.restore_nodes()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        if self.network is not None:
            await self.network.close()
        await asyncio.to_thread(shutil.rmtree, self._state, ignore_errors=True)
        if self.errors:
            raise self.errors[0]

    def kubeconfig(self, *, token: str = "", namespace: str = "default") -> Object:
        """A kubeconfig for `token` (default: the administrator's) as an object; JSON is YAML."""
        authority = {"certificate-authority-data": base64.b64encode(self.certificate).decode()} if self._tls else {}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url, **authority}}],
            "users": [{"name": "fake", "user": {"token": token or self.token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": namespace}}],
            "current-context": "fake",
        }

    def write_kubeconfig(self, path: Path, *, token: str = "", namespace: str = "default") -> Path:
        """Write it, for our eyes only."""
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.kubeconfig(token=token, namespace=namespace))))
        return path
