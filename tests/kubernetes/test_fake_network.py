"""The fake cluster's network of the pods' own: addresses, and NetworkPolicies that are enforced."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, ProgramContext, networks
from openforgerl.testing.fake_kubernetes.enforcing import HEAD, Member, ruleset
from openforgerl.testing.fake_kubernetes.kinds import NAMESPACES, PODS, POLICIES
from openforgerl.testing.fake_kubernetes.objects import Objects

LACKING = networks.lacking()
needs_network = pytest.mark.skipif(bool(LACKING), reason=LACKING or "it can be had")
Object = dict[str, Any]
OUTSIDE = "198.51.100.7"
DOORS = (8000, 8001)
SERVER = (
    "import socket, sys, time\n"
    "ends = [socket.create_server(('', int(port))) for port in sys.argv[1:]]\n"
    "print('listens', flush=True)\ntime.sleep(600)\n"
)
PROBE = (
    "import socket, sys\n"
    "for word in sys.argv[1:]:\n"
    "    host, port = word.split(':')\n"
    "    with socket.socket() as end:\n"
    "        end.settimeout(0.5)\n"
    "        print(end.connect_ex((host, int(port))), end=' ', flush=True)\n"
)


def pod(name: str, labels: dict[str, str], *, image: str = "system:1", ports: dict[str, int] | None = None) -> Object:
    named = [{"name": key, "containerPort": port} for key, port in (ports or {}).items()]
    command = ["/usr/bin/python3", "-c", SERVER, *map(str, DOORS)]
    container = {"name": "c", "image": image, "command": command, "ports": named}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"restartPolicy": "Never", "containers": [container], "securityContext": {"runAsUser": 1000}},
    }


def policy(name: str, selected: dict[str, str], **rules: Any) -> Object:
    types = [way.title() for way in rules]
    return {
        "metadata": {"name": name},
        "spec": {"podSelector": {"matchLabels": selected}, "policyTypes": types} | rules,
    }


async def idle(context: ProgramContext) -> int:
    await context.terminating.wait()
    return 0


@pytest.fixture
async def cluster() -> AsyncGenerator[FakeCluster]:
    options = ClusterOptions(
        network="own",
        clock=Clock(cluster=0.02),
        namespaces=["one", "two"],
        images={"coroutine:*": Image(program=idle, handles_term=True)},
    )
    async with FakeCluster(options) as made:
        yield made


async def started(cluster: FakeCluster, namespace: str, body: Object) -> str:
    """Create it and wait until it runs; its address."""
    key = (namespace, body["metadata"]["name"])
    cluster.registry.create(PODS, namespace, body)
    async with asyncio.timeout(20):
        while cluster.objects.get(PODS, key).body["status"]["phase"] != "Running":
            await cluster.objects.news(PODS).wait()
        (life,) = [one for one in cluster.kubelet.lives.values() if one.key == key]
        while life.slots[0].container is not None and life.slots[0].container.pid:
            if life.slots[0].log is not None and b"listens" in life.slots[0].log.read():
                break
            await asyncio.sleep(0.02)
    return str(cluster.objects.get(PODS, key).body["status"]["podIP"])


async def reached(cluster: FakeCluster, source: str, *targets: str) -> list[bool]:
    """Whether a program that runs in pod `source` connects to each `host:port`."""
    (life,) = [one for one in cluster.kubelet.lives.values() if one.key[1] == source]
    assert life.slots[0].container is not None
    words = ["/usr/bin/python3", "-c", PROBE, *targets]
    process = await life.slots[0].container.exec(words, stdin=False)
    said = b""
    while data := await process.read(1, 4096):
        said += data
    assert await process.wait() == 0
    return [code == b"0" for code in said.split()]


def test_policies_as_rules() -> None:
    """Derived by hand from the API's words: two selected pods, one peer by label, a block with a hole, a range."""
    objects = Objects()
    objects.put(NAMESPACES, {"metadata": {"name": "one", "uid": "n"}})
    selected, peer = {"app": "x"}, {"app": "peer"}
    egress = [
        {"to": [{"podSelector": {"matchLabels": peer}}], "ports": [{"port": "web"}, {"port": 53, "protocol": "UDP"}]},
        {"to": [{"ipBlock": {"cidr": "10.0.0.0/30", "except": ["10.0.0.2/31"]}}], "ports": [{"port": 1, "endPort": 9}]},
    ]
    body = policy("p", selected, egress=egress, ingress=[{"from": [{"podSelector": {}}]}])
    body["metadata"] |= {"namespace": "one", "uid": "p"}
    objects.put(POLICIES, body)
    members = {
        name: Member({**made, "metadata": {**made["metadata"], "namespace": "one"}}, address)
        for name, made, address in (
            ("x", pod("x", selected), "192.0.2.1"),
            ("peer", pod("peer", peer, ports={"web": 8080}), "192.0.2.2"),
        )
    }
    assert ruleset(objects, members, "192.0.2.9").splitlines() == [
        *HEAD[:4],
        ":Egress-0 - [0:0]",
        ":Ingress-0 - [0:0]",
        HEAD[4],
        "-A FORWARD -s 192.0.2.9 -j ACCEPT",
        "-A FORWARD -d 192.0.2.9 -j ACCEPT",
        "-A FORWARD -s 192.0.2.1 -j Egress-0",
        "-A Egress-0 -d 192.0.2.2/32 -p tcp --dport 8080 -j RETURN",
        "-A Egress-0 -d 192.0.2.2/32 -p udp --dport 53:53 -j RETURN",
        "-A Egress-0 -d 10.0.0.0/31 -p tcp --dport 1:9 -j RETURN",
        "-A Egress-0 -j DROP",
        "-A FORWARD -d 192.0.2.1 -j Ingress-0",
        "-A Ingress-0 -s 192.0.2.1/32 -j RETURN",
        "-A Ingress-0 -s 192.0.2.2/32 -j RETURN",
        "-A Ingress-0 -j DROP",
        "COMMIT",
    ]


@needs_network
@pytest.mark.sandbox
async def test_what_is_enforced_is_what_the_policies_say(cluster: FakeCluster) -> None:
    """Between pods of two namespaces, to an address outside, and to a pod that is a coroutine; each by a connection."""
    web, client = {"app": "web"}, {"app": "client"}
    addresses = {
        "web": await started(cluster, "one", pod("web", web, ports={"http": DOORS[0]})),
        "client": await started(cluster, "one", pod("client", client)),
        "other": await started(cluster, "two", pod("other", client)),
        "here": await started(cluster, "one", pod("here", {"app": "here"}, image="coroutine:1")),
    }
    assert cluster.network is not None and len(set(addresses.values())) == 4
    space = await cluster.network.outside(OUTSIDE)
    words = ["nsenter", f"--net={space}", "/usr/bin/python3", "-c", SERVER, *map(str, DOORS)]
    outside = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    assert outside.stdout is not None and await outside.stdout.readline() == b"listens\n"
    servers = [await asyncio.start_server(lambda r, w: w.close(), addresses["here"], port) for port in DOORS]
    node = await asyncio.start_server(lambda r, w: w.close(), cluster.network.node, 0)
    node_port = node.sockets[0].getsockname()[1]

    async def holds(denied: set[tuple[str, str, int]]) -> None:
        assert cluster.network is not None
        await cluster.network.enforced()
        for source, namespace in (("client", "one"), ("web", "one"), ("other", "two")):
            wanted = [(name, port) for name in (*addresses, "outside") if name != source for port in DOORS]
            targets = [f"{addresses.get(name, OUTSIDE)}:{port}" for name, port in wanted]
            *seen, at_node = await reached(cluster, source, *targets, f"{cluster.network.node}:{node_port}")
            assert at_node  # Kubernetes promises a pod its own node
            found = {(source, *target) for target, open_ in zip(wanted, seen, strict=True) if not open_}
            assert found == {one for one in denied if one[0] == source}
            for name, port in wanted:
                target = OUTSIDE if name == "outside" else ("two" if name == "other" else "one", name)
                assert cluster.reachable((namespace, source), target, port) == ((source, name, port) not in found)

    try:
        await holds(set())
        ingress = [{"from": [{"podSelector": {"matchLabels": client}}], "ports": [{"port": "http"}]}]
        cluster.registry.create(POLICIES, "one", policy("web", web, ingress=ingress))
        denied = {("client", "web", 8001), ("other", "web", 8000), ("other", "web", 8001)}
        await holds(denied)
        cluster.registry.create(POLICIES, "one", policy("shut", client, egress=[]))
        nothing = {("client", name, port) for name in ("web", "other", "here", "outside") for port in DOORS}
        await holds(denied | nothing)
        block = {"cidr": "0.0.0.0/0", "except": [f"{addresses['web']}/32"]}
        cluster.registry.create(POLICIES, "one", policy("block", client, egress=[{"to": [{"ipBlock": block}]}]))
        await holds(denied | {("client", "web", 8000)})
    finally:
        for server in (*servers, node):
            server.close()
        outside.kill()
        await outside.wait()


@needs_network
@pytest.mark.sandbox
async def test_a_label_that_changes_changes_what_holds(cluster: FakeCluster) -> None:
    target = await started(cluster, "one", pod("target", {}))
    await started(cluster, "one", pod("client", {"app": "client"}))
    cluster.registry.create(POLICIES, "one", policy("shut", {"app": "client"}, egress=[]))
    assert cluster.network is not None
    await cluster.network.enforced()
    assert await reached(cluster, "client", f"{target}:8000") == [False]
    stored = cluster.objects.get(PODS, ("one", "client"))
    cluster.objects.put(PODS, {**stored.body, "metadata": {**stored.body["metadata"], "labels": {}}})
    await cluster.network.enforced()
    assert await reached(cluster, "client", f"{target}:8000") == [True]


@needs_network
@pytest.mark.sandbox
async def test_a_pod_has_only_its_own_network(cluster: FakeCluster) -> None:
    """Not this machine's loopback, its interfaces or its abstract sockets; and no capability over its own."""
    await started(cluster, "one", pod("p", {}))
    (life,) = cluster.kubelet.lives.values()
    assert life.slots[0].container is not None
    script = "ls /sys/class/net 2>/dev/null; cat /proc/net/dev | grep -o '^ *[a-z0-9]*:' | tr -d ' \\n'"
    script += "; grep CapEff /proc/self/status"
    process = await life.slots[0].container.exec(["/bin/sh", "-c", script], stdin=False)
    said = b""
    while data := await process.read(1, 4096):
        said += data
    assert said.split() == [b"lo:eth0:CapEff:", b"0000000000000000"]


def ours() -> list[str]:
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in spaces.splitlines() if line.startswith("fake-k8s-")]


@needs_network
async def test_nothing_is_left_of_it_even_when_it_is_killed(tmp_path: Path) -> None:
    options = ClusterOptions(network="own", clock=Clock(cluster=0.02))
    async with FakeCluster(options) as first:
        assert first.network is not None
        mine, interface = f"fake-k8s-{os.getpid()}-", first.network._interface
        assert [name for name in ours() if name.startswith(mine)]
        assert Path("/sys/class/net", interface).exists()
    assert not [name for name in ours() if name.startswith(mine)]
    assert not Path("/sys/class/net", interface).exists()
    program = tmp_path / "killed.py"
    program.write_text(
        "import asyncio, os\n"
        "from openforgerl.testing.fake_kubernetes import ClusterOptions, FakeCluster\n"
        "async def main():\n"
        "    async with FakeCluster(ClusterOptions(network='own')) as cluster:\n"
        "        print(cluster.network._interface, flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    killed = await asyncio.create_subprocess_exec(sys.executable, str(program), stdout=subprocess.PIPE)
    left = (await killed.communicate())[0].decode().strip()
    assert killed.returncode == -9 and Path("/sys/class/net", left).exists()
    async with FakeCluster(options):
        living = {name for name in ours() if Path("/proc", name.split("-")[2]).exists()}
        assert living == set(ours())
