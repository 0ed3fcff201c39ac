"""Escapes and attempts to reach other rollouts, from pods with a network of their own: the programs of `tests/attacks`.

The fake cluster enforces the NetworkPolicies of `deploy/` here by rules of its own (`enforcing.py`): what is shown is
what they say, not what a network plugin does. Each attack is also made without its guard, and then succeeds.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import secrets
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import yaml

from openforgerl.sandboxes import SandboxOptions
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.kubernetes import manifests, names
from openforgerl.sandboxes.kubernetes.backend import KubernetesSandboxes
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.testing.fake_kubernetes import (
    Clock,
    ClusterOptions,
    FakeCluster,
    Image,
    NodeSpec,
    ProgramContext,
    networks,
)
from openforgerl.testing.fake_kubernetes.kinds import NAMESPACES, PODS, POLICIES
from openforgerl.types import SandboxLimits, SandboxSpec

LACKING = networks.lacking()
pytestmark = [pytest.mark.sandbox, pytest.mark.skipif(bool(LACKING), reason=LACKING or "it can be had")]

ATTACKS = Path(__file__).parents[1] / "attacks"
DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
NAMESPACE, GATEWAY, PROXY, OTHER = "rollouts", 8090, 8080, 9000
OUTSIDE = "198.51.100.7"


def loaded(name: str) -> ModuleType:
    """A module of `tests/attacks`, which is no package that can be imported from here."""
    spec = importlib.util.spec_from_file_location(f"attacks_{name}", ATTACKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULES = {name: loaded(name) for name in ("conftest", "test_files", "test_processes", "test_reach")}
Open = Callable[..., AbstractAsyncContextManager[Any]]


def documents(file: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((DEPLOY / file).read_text()) if one["kind"] == kind]


async def idle(context: ProgramContext) -> int:
    await context.terminating.wait()
    return 0


class Site:
    """A cluster in which the orchestrator is a pod, as the manifests have it."""

    def __init__(self, cluster: FakeCluster, orchestrator: str, folder: Path) -> None:
        self.cluster = cluster
        self.orchestrator = orchestrator
        """Its address."""
        self._folder = folder
        self._open: dict[str, tuple[KubernetesSandboxes, int]] = {}
        """By what their guards are, with how many cells they have: they share the gateway's port."""

    async def enforce(self) -> None:
        """Apply the policies of `deploy/`."""
        for body in documents("network.yaml", "NetworkPolicy"):
            self.cluster.registry.create(POLICIES, NAMESPACE, body)
        assert self.cluster.network is not None
        await self.cluster.network.enforced()

    @asynccontextmanager
    async def cell(
        self,
        guards: Guards | None = None,
        *,
        limits: SandboxLimits | None = None,
        endpoint: bool = True,
        cgroups: str = "auto",
        **spec: Any,
    ) -> AsyncIterator[Any]:
        """As the `cell` of `tests/attacks`, in a pod. `endpoint`: what an agent has and a verifier has not."""
        assert cgroups == "auto"  # they are the kubelet's
        asked = SandboxSpec(
            run_id="attacks",
            limits=limits or SandboxLimits(),
            files={"/tmp/programs": str(MODULES["conftest"].PROGRAMS)},
            endpoint=(self.orchestrator, PROXY) if endpoint else None,
            **spec,
        )
        attempt = f"attempt-{secrets.token_hex(4)}"
        async with self._sandboxes(guards) as sandboxes, sandboxes.create(asked, attempt) as sandbox:
            yield MODULES["conftest"].Cell(sandbox)

    @asynccontextmanager
    async def _sandboxes(self, guards: Guards | None) -> AsyncIterator[KubernetesSandboxes]:
        key = repr(guards)
        if key not in self._open:
            settings = KubernetesOptions(
                kubeconfig=str(self._folder / "kubeconfig"),
                image="system:1",
                gateway_host=self.orchestrator,
                gateway_port=GATEWAY,
                grace=1,
                user_namespaces=True,
            )
            opened = KubernetesSandboxes(
                SandboxOptions(kubernetes=settings), self._folder / secrets.token_hex(4), guards=guards
            )
            self._open[key] = (await opened.__aenter__(), 0)
        sandboxes, count = self._open[key]
        self._open[key] = (sandboxes, count + 1)
        try:
            yield sandboxes
        finally:
            _, count = self._open[key]
            self._open[key] = (sandboxes, count - 1)
            if count == 1:
                del self._open[key]
                await sandboxes.close()


@asynccontextmanager
async def made(folder: Path, network: Literal["machine", "own"]) -> AsyncIterator[Site]:
    options = ClusterOptions(
        network=network,
        nodes=[NodeSpec(name=f"node-{number}") for number in range(2)],
        clock=Clock(cluster=0.02),
        namespaces=[NAMESPACE, "elsewhere"],
        images={"coroutine:*": Image(program=idle, handles_term=True)},
    )
    (job,) = documents("orchestrator.yaml", "Job")
    labels = job["spec"]["template"]["metadata"]["labels"]
    spec = {"restartPolicy": "Never", "containers": [{"name": "orchestrator", "image": "coroutine:1"}]}
    async with FakeCluster(options) as cluster:
        cluster.write_kubeconfig(folder / "kubeconfig", namespace=NAMESPACE)
        body = {"metadata": {"name": "orchestrator", "labels": labels}, "spec": spec}
        cluster.registry.create(PODS, NAMESPACE, body)
        yield Site(cluster, await running(cluster, NAMESPACE, "orchestrator"), folder)


async def running(cluster: FakeCluster, namespace: str, name: str) -> str:
    """The pod's address once it runs."""
    async with asyncio.timeout(20):
        while (pod := cluster.objects.get(PODS, (namespace, name)).body)["status"]["phase"] != "Running":
            await cluster.objects.news(PODS).wait()
    return str(pod["status"]["podIP"])


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    """Pods with a network of their own."""
    async with made(tmp_path, "own") as opened:
        yield opened


LEFT_OUT = {
    "test_only_the_endpoint_is_reachable": "a pod has a network; see test_what_an_agent_and_a_verifier_reach",
    "test_in_the_hosts_network_the_canaries_are_found": "see test_in_this_machines_network_they_are_found",
    "test_nothing_of_the_host_can_be_read": "the guard is in the manifest; see test_nothing_of_the_node_can_be_read",
    "test_one_of_the_two_mount_guards_is_enough": "the same; see the test of that name below",
    "test_with_capabilities_and_all_calls_the_system_becomes_writable": "see test_a_privileged_pod_...",
    "test_the_process_limit_stops_a_storm": "see the test of that name below",
    "test_without_the_process_limit_the_storm_passes": "see test_the_process_limit_stops_a_storm",
    "test_a_dumpable_init_shows_its_descriptors": "the guard cannot be switched off for an init that dials",
    "test_only_sized_directories_can_be_written": "the fake's image is this machine's, the mounts are bubblewrap's",
    "test_no_set_user_id_program_gives_anything": "a pod's report has no uid of the host; it asserts one",
}
"""Attacks of `tests/attacks` that are not made in a pod just as they are, and why."""


def attacks() -> Iterator[Any]:
    """Every other one, with its parameters; those of a machine without cgroups are about processes only."""
    seen: set[str] = set()
    for module in ("test_files", "test_processes", "test_reach"):
        for name, attack in vars(MODULES[module]).items():
            if not name.startswith("test_") or name in LEFT_OUT:
                seen.add(name)
                continue
            marks = getattr(attack, "pytestmark", [])
            if any(mark.name == "process_only" for mark in marks):
                continue
            choices = [mark.args for mark in marks if mark.name == "parametrize"]
            names = [[one.strip() for one in what.split(",")] for what, _ in choices]
            for chosen in itertools.product(*(values for _, values in choices)):
                given: dict[str, Any] = {}
                for words, value in zip(names, chosen, strict=True):
                    given |= dict(zip(words, value if len(words) > 1 else [value], strict=True))
                if given.pop("cgroups", "auto") == "auto":
                    label = "-".join([name, *(str(value)[:20] for value in given.values())])
                    yield pytest.param(attack, given, id=label)
    assert set(LEFT_OUT) <= seen, "no such attack"


@pytest.mark.parametrize(("attack", "given"), list(attacks()))
async def test_as_in_every_other_sandbox(attack: Any, given: dict[str, Any], site: Site, tmp_path: Path) -> None:
    await site.enforce()
    known = {"cell": site.cell, "tmp_path": tmp_path, "backend": "container", "cgroups": "auto"} | given
    async with asyncio.timeout(90):
        await attack(**{one: known[one] for one in inspect.signature(attack).parameters})


LISTEN = "import socket, time\nend = socket.create_server(('', 9000))\nprint('listens', flush=True)\ntime.sleep(60)\n"


@asynccontextmanager
async def listening(host: str, *ports: int) -> AsyncIterator[None]:
    servers = [await asyncio.start_server(lambda r, w: w.close(), host, port) for port in ports]
    try:
        yield
    finally:
        for server in servers:
            server.close()


async def address(cell: Any) -> str:
    """A pod's own, as it sees it."""
    end = await cell.sandbox.exec(["cat", "/proc/net/fib_trie"], env={}, timeout=5)
    found = [line.split()[-1] for line in end.stdout.decode().splitlines() if "198.18." in line]
    return found[0]


async def answers(cell: Any, door: str) -> None:
    """Until what was started in that cell listens."""
    for _ in range(100):
        if await cell.words("reach.py", door):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"nothing listens at {door}")


@pytest.mark.parametrize("enforced", [False, True], ids=["without policies", "with ours"])
async def test_what_an_agent_and_a_verifier_reach(site: Site, enforced: bool) -> None:
    """Other rollouts, the orchestrator's other ports and the world: with our policies, only what they are to reach.

    Kubernetes lets a pod reach its own node, whatever the policies: what listens there must guard itself.
    """
    assert site.cluster.network is not None
    space, node = await site.cluster.network.outside(OUTSIDE), site.cluster.network.node
    words = ["nsenter", f"--net={space}", "/usr/bin/python3", "-c", LISTEN]
    outside = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert outside.stdout is not None and await outside.stdout.readline() == b"listens\n"
    if enforced:
        await site.enforce()
    try:
        async with (
            listening(site.orchestrator, PROXY, OTHER),
            listening(node, OTHER),
            site.cell() as agent,
            site.cell() as neighbour,
            site.cell(endpoint=False) as verifier,
        ):
            victim = asyncio.create_task(neighbour.sandbox.exec(["python3", "-c", LISTEN], env={}, timeout=60))
            there = await address(neighbour)
            await answers(neighbour, f"{there}:9000")
            doors = {
                "gateway": f"{site.orchestrator}:{GATEWAY}",
                "proxy": f"{site.orchestrator}:{PROXY}",
                "another port of the orchestrator": f"{site.orchestrator}:{OTHER}",
                "another rollout": f"{there}:9000",
                "the world": f"{OUTSIDE}:9000",
                "its node": f"{node}:{OTHER}",
            }
            found = {
                who: {name for name, door in doors.items() if door in reached}
                for who, reached in (
                    ("agent", await agent.words("reach.py", *doors.values())),
                    ("verifier", await verifier.words("reach.py", *doors.values())),
                )
            }
            assert found == {
                "agent": {"gateway", "proxy", "its node"} if enforced else set(doors),
                "verifier": {"gateway", "its node"} if enforced else set(doors),
            }
            await neighbour.sandbox.kill_agent()
            await victim
    finally:
        outside.kill()
        await outside.wait()


@pytest.mark.parametrize("enforced", [False, True], ids=["without policies", "with ours"])
async def test_nobody_from_elsewhere_reaches_a_rollout(site: Site, enforced: bool) -> None:
    """A pod that no policy of ours selects, in another namespace."""
    if enforced:
        await site.enforce()
    container = {"name": "c", "image": "system:1", "command": ["/bin/sleep", "60"]}
    spec = {"restartPolicy": "Never", "containers": [container], "securityContext": {"runAsUser": 1000}}
    site.cluster.registry.create(PODS, "elsewhere", {"metadata": {"name": "stranger"}, "spec": spec})
    await running(site.cluster, "elsewhere", "stranger")
    (life,) = [one for one in site.cluster.kubelet.lives.values() if one.key[1] == "stranger"]
    assert life.slots[0].container is not None
    program = (MODULES["conftest"].PROGRAMS / "reach.py").read_text()
    async with site.cell() as rollout:
        victim = asyncio.create_task(rollout.sandbox.exec(["python3", "-c", LISTEN], env={}, timeout=60))
        door = f"{await address(rollout)}:9000"
        await answers(rollout, door)
        process = await life.slots[0].container.exec(["/usr/bin/python3", "-c", program, door], stdin=False)
        assert (await process.read(1, 4096)).decode().split() == ([] if enforced else [door])
        await rollout.sandbox.kill_agent()
        await victim


@pytest.mark.parametrize("labelled", [True, False], ids=["as in more", "without the namespace's label"])
async def test_rollouts_of_a_further_namespace_reach_the_same(labelled: bool) -> None:
    """`deploy/kubernetes/more`: across the border gateway and proxy, and nothing else of the orchestrator's."""
    home, more = "openforgerl", "openforgerl-more"
    options = ClusterOptions(
        network="own",
        clock=Clock(cluster=0.02),
        namespaces=[home],
        images={"coroutine:*": Image(program=idle, handles_term=True)},
    )
    async with FakeCluster(options) as cluster:
        assert cluster.network is not None
        (namespace,) = documents("../more/namespace.yaml", "Namespace")
        if not labelled:
            namespace["metadata"]["labels"] = {}
        cluster.registry.create(NAMESPACES, "", namespace)
        for folder, where in (("../base", home), ("../more", more)):
            for body in documents(f"{folder}/network.yaml", "NetworkPolicy"):
                cluster.registry.create(POLICIES, where, body)
        (job,) = documents("orchestrator.yaml", "Job")
        labels = job["spec"]["template"]["metadata"]["labels"]
        for name, where, has, image in (
            ("orchestrator", home, labels, "coroutine:1"),
            ("agent", more, names.pod_labels("r", "t-r0-a1", network=True), "system:1"),
            ("verifier", more, names.pod_labels("r", "t-r0-a1-verify", network=False), "system:1"),
        ):
            container = {"name": "c", "image": image, "command": ["/bin/sleep", "60"]}
            spec = {"restartPolicy": "Never", "containers": [container], "securityContext": {"runAsUser": 1000}}
            cluster.registry.create(PODS, where, {"metadata": {"name": name, "labels": has}, "spec": spec})
        host = await running(cluster, home, "orchestrator")
        program = (MODULES["conftest"].PROGRAMS / "reach.py").read_text()
        found: dict[str, list[str]] = {}
        async with listening(host, GATEWAY, PROXY, OTHER):
            for who in ("agent", "verifier"):
                await running(cluster, more, who)
                (life,) = [one for one in cluster.kubelet.lives.values() if one.key[1] == who]
                assert life.slots[0].container is not None
                doors = [f"{host}:{port}" for port in (GATEWAY, PROXY, OTHER)]
                process = await life.slots[0].container.exec(["/usr/bin/python3", "-c", program, *doors], stdin=False)
                found[who] = [door.partition(":")[2] for door in (await process.read(1, 4096)).decode().split()]
        both = [str(GATEWAY), str(PROXY)]
        assert found == ({"agent": both, "verifier": both[:1]} if labelled else {"agent": [], "verifier": []})


async def test_this_machines_loopback_and_sockets_are_out_of_reach(site: Site) -> None:
    with MODULES["test_reach"].canaries() as (port, name):
        async with site.cell() as inside:
            assert await inside.words("scan.py", port - 20, port + 20, name) == ["|", "eth0", "lo"]


async def test_in_this_machines_network_they_are_found(tmp_path: Path) -> None:
    """The same attack with the guard off: what a pod with `hostNetwork` would find."""
    with MODULES["test_reach"].canaries() as (port, name):
        async with made(tmp_path, "machine") as site, site.cell() as inside:
            words = await inside.words("scan.py", port, port, name)
    assert words[: words.index("|")] == [f"127.0.0.1:{port}", "abstract"]


Weaken = Callable[[Callable[[dict[str, Any]], None]], None]


@pytest.fixture
def weaken(monkeypatch: pytest.MonkeyPatch) -> Weaken:
    """`weaken(change)`: pods are made of manifests that `change` has spoilt."""

    def spoil(change: Callable[[dict[str, Any]], None]) -> None:
        whole = manifests.pod

        def spoilt(*args: Any) -> dict[str, Any]:
            change(made := whole(*args))
            return made

        monkeypatch.setattr(manifests, "pod", spoilt)

    return spoil


def show_the_node(pod: dict[str, Any]) -> None:
    """A hostPath of everything, which our manifests never have."""
    pod["spec"]["volumes"].append({"name": "node", "hostPath": {"path": "/"}})
    mount = {"name": "node", "mountPath": "/host", "readOnly": True}
    pod["spec"]["containers"][0]["volumeMounts"].append(mount)


@pytest.mark.parametrize("guarded", [True, False])
async def test_nothing_of_the_node_can_be_read(site: Site, weaken: Weaken, guarded: bool) -> None:
    secret = secrets.token_hex(8)
    canary = "61." + str(int(secret, 16))
    folder = Path(tempfile.mkdtemp(prefix="openforgerl-attack-"))
    folder.chmod(0o755)
    (folder / f"verifier-{secret}").write_text(secret)
    process = await asyncio.create_subprocess_exec("sleep", canary)
    try:
        if not guarded:
            weaken(show_the_node)
        async with site.cell() as inside:
            words = await inside.words("find_file.py", f"verifier-{secret}", canary, folder)
        assert set(words) == (set() if guarded else {"file", secret, "process"})
    finally:
        process.kill()
        await process.wait()
        shutil.rmtree(folder)


def privilege(pod: dict[str, Any]) -> None:
    """Root with every capability, which `restricted` pods may not be."""
    pod["spec"]["securityContext"] |= {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False}
    pod["spec"]["containers"][0]["securityContext"] = {"privileged": True, "readOnlyRootFilesystem": True}


@pytest.mark.parametrize(("guards", "worked"), [(None, set()), (Guards(seccomp=False), {"unshare"})])
async def test_one_of_the_two_mount_guards_is_enough(site: Site, guards: Guards | None, worked: set[str]) -> None:
    """Without the filter a user namespace of its own can be had; in it, no mount of ours moves."""
    async with site.cell(guards) as inside:
        assert set(await inside.words("remount.py")) == worked


async def test_a_privileged_pod_without_the_filter_has_a_writable_system(site: Site, weaken: Weaken) -> None:
    weaken(privilege)
    async with site.cell(Guards(seccomp=False)) as inside:
        assert {"unshare", "mount", "remount", "write"} <= set(await inside.words("remount.py"))
    async with site.cell() as inside:
        assert set(await inside.words("remount.py")) == set()


async def test_the_process_limit_stops_a_storm(site: Site) -> None:
    limits = SandboxLimits(processes=64)
    async with site.cell(limits=limits) as inside:
        assert int((await inside.attack("fork_many.py", 150, 0)).stdout) == 63  # 64 with itself
    async with site.cell(Guards(process_limit=False), limits=limits) as inside:
        assert int((await inside.attack("fork_many.py", 150, 0)).stdout) == 150
