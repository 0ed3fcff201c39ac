"""`protocols.Sandboxes` on a Kubernetes cluster (`docs/kubernetes.md`)."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from openforgerl.errors import ConfigError, InputError, StageError, StoreError
from openforgerl.sandboxes import seccomp
from openforgerl.sandboxes.channel import Channel, Gone
from openforgerl.sandboxes.credentials import Credentials
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.kubernetes import classification, manifests, names
from openforgerl.sandboxes.kubernetes.access import find_access
from openforgerl.sandboxes.kubernetes.claims import ClaimingCluster
from openforgerl.sandboxes.kubernetes.cluster import POD, Cluster, ClusterError, Object, selector
from openforgerl.sandboxes.kubernetes.gateway import PATH, Gateway, Stream
from openforgerl.sandboxes.kubernetes.holding import free_lease
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.sandboxes.kubernetes.lifecycle import Facility, PodLife
from openforgerl.sandboxes.kubernetes.manifests import Boarding
from openforgerl.sandboxes.kubernetes.runs import reap_run, remove_pods
from openforgerl.sandboxes.kubernetes.sites import Site, Sites
from openforgerl.sandboxes.kubernetes.vessel import BACKEND, PodVessel, described
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.sandbox import LiveSandbox
from openforgerl.sandboxes.spec import init_settings
from openforgerl.types import Origin, SandboxRef, SandboxSpec, Stage

_KEY_FILE = "gateway.key"
_PORT_FILE = "gateway.port"
_TOKEN_ENV = "OPENFORGERL_TOKEN"
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_SETTLE = 120.0


class KubernetesSandboxes:
    """A backend; an async context manager that gives its runs up at the end.

    `state_dir` keeps the key of the gateway, so that a restarted process knows the pods of its predecessor. `guards`
    are for tests alone.
    """

    def __init__(self, options: SandboxOptions, state_dir: Path, *, guards: Guards | None = None) -> None:
        self._all = options
        self._options = options.kubernetes
        self._state = state_dir
        self._guards = guards or Guards()
        self._clusters: Sequence[Cluster] = ()
        self._gateway: Gateway | None = None
        self._address = ""
        self._key = b""
        self._runs: dict[str, Facility] = {}
        self._opening = asyncio.Lock()

    @staticmethod
    def check(options: SandboxOptions) -> None:
        """What can be known to be wrong before anything is started. Raises InputError, ConfigError."""
        if not options.kubernetes.image:
            raise InputError("sandbox.kubernetes.image is empty: name the image of the sandboxes (docs/kubernetes.md)")
        find_access(options.kubernetes.kubeconfig, options.kubernetes.context, os.environ)

    async def __aenter__(self) -> KubernetesSandboxes:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give every run up: what is left of its pods goes with its ConfigMap. Then close every connection."""
        while self._runs:
            _, facility = self._runs.popitem()
            with contextlib.suppress(ClusterError):  # the Lease runs out, and a reaper does the rest
                await facility.sites.close()
        async with self._opening:
            if self._gateway is not None:
                await self._gateway.close()
                self._gateway = None
            if self._clusters:
                await self._clusters[0].close()
                self._clusters = ()

    async def address(self) -> str:
        """This process's address as pods reach it, so that the proxy can listen where they find it."""
        await self._open()
        return self._address

    @asynccontextmanager
    async def create(self, spec: SandboxSpec, attempt_id: str) -> AsyncGenerator[LiveSandbox]:
        """A pod whose init has dialled in, with `spec.files` in place; deleted at the end, whatever happens.

        Raises InputError for a spec that no pod can be made of, StageError with what kept the pod from running.
        """
        manifests.check(spec, self._options)
        facility = await self._run(spec.run_id)
        name, nonce = names.pod_name(spec.run_id, attempt_id), secrets.token_hex(8)
        credentials = Credentials(self._key, name, nonce)

        def manifest(site: Site) -> Object:
            boarding = Boarding(
                attempt_id=attempt_id,
                nonce=nonce,
                arguments=self._dial(name),
                env={_TOKEN_ENV: credentials.token()},
                init_map=site.hold.init_map,
            )
            return manifests.pod(spec, self._options, boarding, site.hold.owner)

        life = PodLife(facility, await facility.sites.open(facility.sites.roomy), name, credentials)
        try:
            stream = await life.board(manifest, verifier=names.is_verifier(attempt_id))
            sandbox = await self._live(spec, attempt_id, life, stream)
        except BaseException:
            await asyncio.shield(life.remove(self._remove_seconds()))
            raise
        try:
            for target, source in spec.files.items():
                await sandbox.write_tree(Path(source), target)
            yield sandbox
        finally:
            await sandbox.close()

    @asynccontextmanager
    async def adopt(self, ref: SandboxRef, spec: SandboxSpec) -> AsyncGenerator[LiveSandbox]:
        """The sandbox that an earlier process of this run made; its programs are claimed by their keys.

        Raises StageError when it does not live any more. At the end it is deleted like any other.
        """
        facility = await self._run(ref.run_id)
        name, namespace = str(ref.detail["pod"]), str(ref.detail["namespace"])
        if namespace not in facility.sites:
            raise _gone(ref, f"it is in namespace {namespace}, which sandbox.kubernetes names no longer")
        site = await facility.sites.open(namespace)
        try:
            pod = await site.cluster.get(POD, name)
        except ClusterError as error:
            raise _gone(ref, str(error)) from error
        if pod["metadata"]["uid"] != ref.detail["uid"]:
            raise _gone(ref, "another pod has its name by now")
        # Its init was handed the second credential before it answered the first command: the first is dead.
        nonce = str(pod["metadata"]["annotations"][names.NONCE_NOTE])
        life = PodLife(facility, site, name, Credentials(self._key, name, nonce, first=1))
        try:
            stream = await life.rejoin(pod)
            sandbox = await self._live(spec, ref.attempt_id, life, stream)
        except BaseException as error:
            await asyncio.shield(life.remove(self._remove_seconds()))
            if isinstance(error, StageError) and (why := classification.abandoned(pod, error.kind, error.evidence)):
                raise _gone(ref, why) from error
            raise
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def list(self, run_id: str) -> Sequence[SandboxRef]:
        """Every pod of the run, whoever made it. Raises StoreError when the API server does not say."""
        try:
            return [_ref(pod) for cluster in await self._reach() for pod in await _pods(cluster, run_id)]
        except ClusterError as error:
            raise StoreError(f"what is left of run {run_id} cannot be listed now: {error}") from error

    async def reap(self, run_id: str) -> int:
        """Delete every pod of the run, its ConfigMap and its Lease; how many pods there were.

        Raises StoreError when some stay, or when another process works on the run.
        """
        held = self._runs.pop(run_id, None)
        try:
            if held is not None:
                await held.sites.close()
            await self._see_free(run_id)
            count, seconds = 0, self._remove_seconds()
            for cluster in await self._reach():
                count += await reap_run(cluster, run_id, grace=self._options.grace, seconds=seconds)
        except ClusterError as error:
            raise StoreError(f"what is left of run {run_id} cannot be removed now: {error}") from error
        if self._gateway is not None:
            self._gateway.settle()
        return count

    async def reap_others(self, run_id: str, keep: Collection[str]) -> int:
        """Delete the run's pods but for those of the attempts in `keep`, which are adopted next; how many there were.

        Those that are kept are let in from now on, however late their turn comes, and nobody else is any more.
        Raises StoreError when some stay, or when another process works on the run; StageError as `create` does.
        """
        kept, count = set(keep), 0
        if not kept:
            return await self.reap(run_id)
        try:
            await self._see_free(run_id)
            facility = await self._run(run_id)
            for cluster in await self._reach():
                pods = await _pods(cluster, run_id)
                spared = [pod for pod in pods if _ref(pod).attempt_id in kept]
                if spared:  # their Lease must be renewed before it runs out, however late they are adopted
                    await facility.sites.open(cluster.namespace)
                for pod in spared:
                    self._await_init_of(pod)
                doomed = [pod for pod in pods if _ref(pod).attempt_id not in kept]
                await remove_pods(cluster, run_id, doomed, grace=self._options.grace, seconds=self._remove_seconds())
                count += len(doomed)
        except ClusterError as error:
            raise StoreError(f"what is left of run {run_id} cannot be looked through now: {error}") from error
        facility.gateway.settle()
        return count

    async def _connect(self) -> Cluster:
        """The default namespace."""
        return (await self._reach())[0]

    async def _reach(self) -> Sequence[Cluster]:
        """The API server, and no more: enough to list and to reap. One for each namespace, the default first."""
        if not self._clusters:
            options = self._options
            access = find_access(options.kubeconfig, options.context, os.environ)
            first = HttpCluster(access, options.namespace, at_once=options.calls_at_once)
            if first.namespace in options.more_namespaces:
                raise ConfigError(
                    f"sandbox.kubernetes.more_namespaces names {first.namespace}, which is the default namespace"
                )
            more = map(first.beside, options.more_namespaces)
            self._clusters = (ClaimingCluster(first, options.warm_pool) if options.warm_pool else first, *more)
        return self._clusters

    async def _open(self) -> Cluster:
        """Connect, find our own address, and listen for inits."""
        async with self._opening:
            cluster = await self._connect()
            if self._gateway is None:
                await self._home()
                self._address = await _own_address(self._options.gateway_host, cluster.server)
                self._gateway = await self._listen()
            return cluster

    async def _home(self) -> str:
        """Machine and run folder, by which two processes of one run are told apart. The folder by its key's digest."""
        if not self._key:
            self._key = await asyncio.to_thread(_kept_key, self._state / _KEY_FILE)
        return f"{socket.gethostname()}/{hmac.digest(self._key, b'home', 'sha256').hex()[:16]}"

    async def _see_free(self, run_id: str) -> None:
        """Raises StoreError when another process works on the run."""
        home = await self._home()
        for cluster in await self._reach():
            await free_lease(cluster, run_id, home)

    async def _listen(self) -> Gateway:
        """Listen where pods of an earlier process of this run dial again, when that is free."""
        options, kept = self._options, self._state / _PORT_FILE
        before = int(kept.read_text()) if kept.exists() else 0
        ports = [options.gateway_port] if options.gateway_port else [before, 0] if before else [0]
        for port in ports:
            gateway = Gateway(options.gateway_listen or self._address, port, settle=_SETTLE)
            try:
                await gateway.start()
            except ConfigError:
                if port == ports[-1]:
                    raise
                continue
            kept.write_text(str(gateway.port))
            return gateway
        raise AssertionError("there is always a port to try")

    async def _run(self, run_id: str) -> Facility:
        """What the run's pods share, made when first needed."""
        await self._open()
        clusters, home = await self._reach(), await self._home()
        found = self._runs.get(run_id)
        if found is None:
            assert self._gateway is not None
            sites = Sites(clusters, run_id, home, self._options)
            found = self._runs[run_id] = Facility(sites, self._gateway, self._options)
        return found

    async def _live(self, spec: SandboxSpec, attempt_id: str, life: PodLife, stream: Stream) -> LiveSandbox:
        """The sandbox over its init's connection. Whoever calls removes the pod when this fails."""
        try:
            channel = await Channel.dialled(
                *stream, patience=self._options.reconnect_timeout, credentials=life.credentials
            )
        except (Gone, TimeoutError) as error:
            stream[1].transport.abort()
            raise await _no_hello(life) from error
        assert life.news.pod is not None
        vessel = PodVessel(_ref(life.news.pod), life, channel, self._remove_seconds())
        sandbox = LiveSandbox(spec, vessel, channel, self._all, self._guards)
        machine = _MACHINES[self._options.architecture]
        call_filter = seccomp.program(forbid_memory_files=False, machine=machine) if self._guards.seccomp else b""
        settings = init_settings(
            spec,
            self._guards,
            watched=False,
            counted=not self._options.user_namespaces,
            call_filter=call_filter,
        )
        try:
            said = await sandbox.begin(settings)
        except BaseException:
            await sandbox.close()
            raise
        sandbox.describe(described(life, spec, self._options, said, filtered=bool(call_filter)))
        return sandbox

    def _await_init_of(self, pod: Object) -> None:
        """Its attempt will be adopted: let its init in already, lest it give up."""
        assert self._gateway is not None
        name, nonce = str(pod["metadata"]["name"]), str(pod["metadata"]["annotations"][names.NONCE_NOTE])
        self._gateway.keep(name, Credentials(self._key, name, nonce, first=1))

    def _dial(self, name: str) -> list[str]:
        assert self._gateway is not None
        settings = {
            "host": self._address,
            "port": self._gateway.port,
            "path": PATH + name,
            "token_env": _TOKEN_ENV,
            "patience": self._options.reconnect_timeout,
        }
        return ["dial", json.dumps(settings)]

    def _remove_seconds(self) -> float:
        return self._options.grace + self._all.kill_timeout


def _ref(pod: Object) -> SandboxRef:
    metadata = pod["metadata"]
    notes: dict[str, str] = metadata.get("annotations") or {}
    return SandboxRef(
        backend=BACKEND,
        run_id=notes.get(names.RUN_NOTE, ""),
        attempt_id=notes.get(names.ATTEMPT_NOTE, ""),
        detail={"namespace": metadata["namespace"], "pod": metadata["name"], "uid": metadata["uid"]},
    )


async def _pods(cluster: Cluster, run_id: str) -> Sequence[Object]:
    found = await cluster.list(POD, labels=selector(names.run_labels(run_id)))
    return [pod for pod in found.items if pod["metadata"].get("annotations", {}).get(names.RUN_NOTE) == run_id]


def _kept_key(path: Path) -> bytes:
    """The run's key, made when first asked for. Whole or not there, and for us alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.touch(mode=0o600)
        partial.write_bytes(secrets.token_bytes(32))
        partial.replace(path)
    return path.read_bytes()


async def _own_address(given: str, server: str) -> str:
    """An IP address, because pods have no resolver. `POD_IP` comes from the downward API."""
    loop = asyncio.get_running_loop()
    host = given or os.environ.get("POD_IP", "")
    if host:
        try:
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"sandbox.kubernetes.gateway_host {host!r} has no address: {error.strerror}") from error
        return str(found[0][4][0])
    parts = urlsplit(server)
    with contextlib.suppress(OSError):
        found = await loop.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    raise ConfigError(f"no address of ours faces {server}: set sandbox.kubernetes.gateway_host to one that pods reach")


def _gone(ref: SandboxRef, why: str) -> StageError:
    text = f"the sandbox of attempt {ref.attempt_id} cannot be adopted: {why}"
    return StageError(Stage.SANDBOX, "not_adopted", text, origin=Origin.INFRASTRUCTURE, retryable=True)


async def _no_hello(life: PodLife) -> StageError:
    failure = await life.failed(5.0)
    kind, said = (failure.kind, failure.message) if failure else ("no_hello", "its init dialled in and said nothing")
    return StageError(
        Stage.SANDBOX, kind, said, origin=Origin.INFRASTRUCTURE, retryable=True, evidence=dict(await life.evidence())
    )
