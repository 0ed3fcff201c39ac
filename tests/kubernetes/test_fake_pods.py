"""Pods of the fake cluster that are real processes: what is inside, what is not, how they end, exec."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from openforgerl.sandboxes import cgroups
from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image

from .kubectl import Kubectl, Object, config_map, ended, eventually, kubectl, pod, state

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncGenerator[FakeCluster]:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "greet").write_text("#!/bin/sh\necho from the image volume\n")
    (tools / "greet").chmod(0o755)
    system = {name: name for name in ("/usr", "/bin", "/lib", "/lib64") if os.path.lexists(name)}
    options = ClusterOptions(
        clock=Clock(cluster=0.02, promised=0.3),
        images={"withtools:*": Image(root={**system, "/opt/tools": str(tools)}), "gone/*": Image(missing=True)},
        volume_images={"registry/tools:1": tools},
    )
    async with FakeCluster(options) as cluster:
        yield cluster


@pytest.fixture
async def api(cluster: FakeCluster) -> AsyncGenerator[Kubectl]:
    async with kubectl(cluster) as client:
        yield client


def running(body: Object) -> bool:
    return state(body)[0] == "running"


async def output(api: Kubectl, body: Object) -> str:
    """Run a pod to its end; what it printed."""
    await api.create("pods", body)
    await api.follow(body["metadata"]["name"], ended)
    status, text = await api.ask("GET", api.path("pods", body["metadata"]["name"]) + "/log")
    assert status == 200
    return text


def shell(name: str, script: str, **spec: object) -> Object:
    return pod(name, "/bin/sh", "-c", script, **spec)


async def test_a_program_s_output_and_end(api: Kubectl) -> None:
    assert await output(api, shell("p", "echo out; echo err >&2; exit 3")) == "out\nerr\n"
    _, fields = state(await api.get("pods", "p"))
    assert (fields["reason"], fields["exitCode"]) == ("Error", 3)


async def test_a_program_that_is_not_there(api: Kubectl) -> None:
    await api.create("pods", pod("p", "/no/such/program"))
    kind, fields = state((await api.follow("p", ended))[-1])
    assert (kind, fields["reason"], fields["exitCode"]) == ("terminated", "StartError", 128)
    assert "No such file or directory" in fields["message"]


async def test_the_environment(api: Kubectl) -> None:
    await api.create("secrets", {"metadata": {"name": "s"}, "data": {"token": base64.b64encode(b"secret-1").decode()}})
    await api.create("configmaps", config_map("c", {"A": "1", "B": "2"}))
    env = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "RUN", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['run']"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "BOTH", "value": "$(NAME)/$(TOKEN) $$(NAME) $(UNKNOWN)"},
    ]
    container = {"env": env, "envFrom": [{"prefix": "C_", "configMapRef": {"name": "c"}}], "workingDir": "/usr"}
    script = (
        'echo "$TOKEN $NAME $RUN $NODE $C_A$C_B"; echo "$BOTH"; pwd; hostname; echo "$ADDRESS" | cut -c1-4; echo "$0"'
    )
    body = shell("p", script, labels={"run": "r1"}, container=container)
    body["spec"]["containers"][0]["args"] = ["$(NAME)"]
    lines = (await output(api, body)).splitlines()
    assert lines == [
        "secret-1 p r1 node-0 12",
        "p/secret-1 $(NAME) $(UNKNOWN)",
        "/usr",
        "p",
        "127.",
        "p",
    ]
    (host_variable,) = [name for name in ("HOME", "USER", "VIRTUAL_ENV") if name in os.environ][:1] or ["HOME"]
    assert await output(api, shell("q", f"echo ${host_variable}")) == "\n"


async def test_volumes_are_shared_and_carry_what_they_should(api: Kubectl) -> None:
    data = {"key": base64.b64encode(b"k").decode(), "other": base64.b64encode(b"o").decode()}
    await api.create("secrets", {"metadata": {"name": "s"}, "data": data})
    await api.create(
        "configmaps", config_map("c", {"f": "text"}) | {"binaryData": {"b": base64.b64encode(b"\0\1").decode()}}
    )
    volumes = [
        {"name": "work", "emptyDir": {}},
        {"name": "s", "secret": {"secretName": "s", "items": [{"key": "key", "path": "deep/k"}], "defaultMode": 0o400}},
        {"name": "c", "configMap": {"name": "c"}},
        {"name": "tools", "image": {"reference": "registry/tools:1"}},
    ]
    mounts = [
        {"name": "work", "mountPath": "/workspace"},
        {"name": "work", "mountPath": "/sub", "subPath": "inner"},
        {"name": "s", "mountPath": "/etc/s", "readOnly": True},
        {"name": "c", "mountPath": "/usr/share/c"},
        {"name": "tools", "mountPath": "/opt/tools"},
    ]
    first = {
        "name": "init",
        "image": "x:1",
        "command": ["/bin/sh", "-c", "echo made > /here/file; touch /here/inner/x"],
    }
    first["volumeMounts"] = [{"name": "work", "mountPath": "/here"}]
    script = (
        "cat /workspace/file /etc/s/deep/k; ls /etc/s /sub /usr/share/c; stat -c %a /etc/s/deep/k; /opt/tools/greet;"
        "echo more > /workspace/new && echo written; (echo x > /etc/s/new) 2>/dev/null || echo refused;"
        "(echo x > /usr/share/c/f) 2>/dev/null || echo refused; ls /usr/share | wc -l"
    )
    first["command"][-1] = "mkdir -p /here/inner && " + first["command"][-1]
    body = shell("p", script, volumes=volumes, initContainers=[first], container={"volumeMounts": mounts})
    text = await output(api, body)
    assert text.startswith("made\nk/etc/s:\ndeep\n\n/sub:\nx\n\n/usr/share/c:\nb\nf\n400\nfrom the image volume\n")
    assert text.splitlines()[-4:-1] == ["written", "refused", "refused"]
    assert int(text.splitlines()[-1]) > 5  # the rest of /usr/share is still there
    status = (await api.get("pods", "p"))["status"]
    assert status["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 0


async def test_an_image_is_the_directories_it_names(api: Kubectl) -> None:
    text = await output(api, shell("p", "ls /; /opt/tools/greet", image="withtools:1"))
    assert "from the image volume" in text and "etc" not in text.split()
    await api.create("pods", shell("q", "true", image="gone/a:1"))
    await api.follow("q", lambda body: state(body)[1].get("reason") == "ImagePullBackOff")


async def test_who_a_program_is_and_what_it_sees(api: Kubectl) -> None:
    probe = (
        "import json,os,pathlib;"
        "status=dict(l.split(':\\t',1) for l in open('/proc/self/status').read().splitlines() if ':\\t' in l);"
        "print(json.dumps({'uid':os.getuid(),'gid':os.getgid(),'caps':int(status['CapEff'],16),"
        "'nnp':status['NoNewPrivs'],'pid':os.getpid(),'procs':[p for p in os.listdir('/proc') if p.isdigit()],"
        "'homes':os.listdir('/home') if os.path.exists('/home') else [],'shadow':os.path.exists('/etc/shadow')}))"
    )
    container = {"securityContext": {"readOnlyRootFilesystem": True}}
    security = {"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True}
    body = pod("p", "/usr/bin/python3", "-c", probe, container=container, securityContext=security)
    seen = json.loads(await output(api, body))
    assert seen == {
        "uid": 1000,
        "gid": 1000,
        "caps": 0,
        "nnp": "1",
        "pid": 1,
        "procs": ["1"],
        "homes": [],
        "shadow": False,
    }
    tries = "for d in / /dev /usr /etc /tmp; do (touch $d/x 2>/dev/null && echo wrote $d); done; echo end"
    assert await output(api, shell("q", tries, container=container, securityContext=security)) == "end\n"
    assert await output(api, shell("r", tries, securityContext=security)) == "wrote /tmp\nend\n"
    everywhere = "wrote /\nwrote /dev\nwrote /etc\nwrote /tmp\nend\n"
    assert await output(api, shell("root", tries)) == everywhere
    await api.create("pods", shell("s", "true", securityContext={"runAsNonRoot": True}))
    last = (await api.follow("s", lambda body: state(body)[1].get("reason") == "CreateContainerConfigError"))[-1]
    assert "runAsNonRoot" in state(last)[1]["message"]


async def test_termination_messages(api: Kubectl) -> None:
    fallback = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    cases = {
        "file": ("echo said > /dev/termination-log; echo log; exit 1", {}, "said\n"),
        "nothing": ("echo log; exit 1", {}, None),
        "log": (
            "for i in $(seq 100); do echo line $i; done; exit 1",
            fallback,
            "\n".join(f"line {n}" for n in range(21, 101)),
        ),
        "success": ("echo log", fallback, None),
        "elsewhere": ("echo there > /said", {"terminationMessagePath": "/said"}, "there\n"),
    }
    for name, (script, container, expected) in cases.items():
        await api.create("pods", shell(name, script, container=container))
        _, fields = state((await api.follow(name, ended))[-1])
        assert fields.get("message") == expected, name


async def test_memory_in_a_volume_ends_and_disk_evicts(api: Kubectl) -> None:
    def with_volume(name: str, script: str, **empty: str) -> Object:
        volumes = [{"name": "v", "emptyDir": {**empty, "sizeLimit": "1Mi"}}]
        return shell(name, script, volumes=volumes, container={"volumeMounts": [{"name": "v", "mountPath": "/v"}]})

    fill = "dd if=/dev/zero of=/v/f bs=64k count=64 2>&1 | grep -c 'No space'"
    assert await output(api, with_volume("p", fill, medium="Memory")) == "1\n"
    await api.create("pods", with_volume("q", "dd if=/dev/zero of=/v/f bs=64k count=64 2>/dev/null; sleep 60"))
    last = (await api.follow("q", ended))[-1]
    assert (last["status"]["reason"], state(last)[1]["exitCode"]) == ("Evicted", 137)
    assert last["status"]["message"] == 'Usage of EmptyDir volume "v" exceeds the limit "1Mi". '


HOG = "x=[bytearray(1<<20) for _ in range(400)]"


@pytest.mark.skipif(cgroups.detect() is None, reason="no cgroup is writable here, so no memory limit is in force")
async def test_memory_limits_are_real(api: Kubectl) -> None:
    container = {"resources": {"limits": {"memory": "64Mi"}}}
    await api.create("pods", pod("first", "/usr/bin/python3", "-c", HOG, container=container))
    _, fields = state((await api.follow("first", ended))[-1])
    assert (fields["reason"], fields["exitCode"]) == ("OOMKilled", 137)
    await api.create("pods", shell("child", f"/usr/bin/python3 -c '{HOG}'; exit 0", container=container))
    last = (await api.follow("child", ended))[-1]
    _, fields = state(last)
    assert (last["status"]["phase"], fields["reason"], fields["exitCode"]) == ("Succeeded", "OOMKilled", 0)


async def test_the_scenario_of_an_oom_takes_a_real_child(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("oom-child", name="p", after=10.0)
    assert (await output(api, shell("p", "sleep 60; echo $?; exit 0"))).endswith("137\n")
    last = await api.get("pods", "p")
    _, fields = state(last)
    assert (last["status"]["phase"], fields["reason"], fields["exitCode"]) == ("Succeeded", "OOMKilled", 0)


async def test_terminating(api: Kubectl, cluster: FakeCluster) -> None:
    await api.create("pods", shell("deaf", "sleep 60; echo"))  # sh as PID 1 has no handler for TERM
    await api.create("pods", shell("polite", "trap 'exit 7' TERM; echo ready; sleep 60 & wait"))
    for name in ("deaf", "polite"):
        await api.follow(name, running)
    uid = (await api.get("pods", "polite"))["metadata"]["uid"]
    log = cluster.kubelet.lives[uid].slots[0].log
    await eventually(lambda: log is not None and b"ready" in log.read())
    ends: dict[str, Object] = {}
    for name in ("deaf", "polite"):
        await api.delete("pods", name, gracePeriodSeconds="2")
        ends[name] = state((await api.follow(name, lambda _: False))[-1])[1]
    assert (ends["deaf"]["exitCode"], ends["polite"]["exitCode"]) == (137, 7)


async def run(api: Kubectl, name: str, *argv: str, stdin: bytes | None = None, version: int = 5) -> Object:
    """exec: what came on each channel, and the exit code that the error channel told."""
    query = [("command", word) for word in argv] + [("stdout", "true"), ("stderr", "true"), ("container", "main")]
    query += [("stdin", "true")] if stdin is not None else []
    channels: dict[int, bytes] = {}
    path = api.path("pods", name) + "/exec"
    async with api.session.ws_connect(path, params=query, protocols=[f"v{version}.channel.k8s.io"]) as socket:
        assert socket.protocol == f"v{version}.channel.k8s.io"
        if stdin is not None:
            for start in range(0, len(stdin), 30000):
                await socket.send_bytes(b"\0" + stdin[start : start + 30000])
            await socket.send_bytes(b"\xff\0")
        async for message in socket:
            channels[message.data[0]] = channels.get(message.data[0], b"") + message.data[1:]
    return {"out": channels.get(1, b""), "err": channels.get(2, b""), "status": json.loads(channels[3])}


async def test_exec(api: Kubectl, cluster: FakeCluster) -> None:
    security = {"runAsUser": 1000, "runAsGroup": 1000}
    container = {"workingDir": "/usr", "env": [{"name": "WORD", "value": "w"}]}
    await api.create(
        "pods", shell("p", "echo mine > /tmp/file; sleep 60", securityContext=security, container=container)
    )
    await api.follow("p", running)
    said = await run(api, "p", "/bin/sh", "-c", "id -u; pwd; echo $WORD; cat /tmp/file; echo bad >&2")
    assert said["out"] == b"1000\n/usr\nw\nmine\n" and said["err"] == b"bad\n"
    assert said["status"] == {"metadata": {}, "status": "Success"}
    said = await run(api, "p", "/bin/sh", "-c", "exit 3", version=4)
    assert said["status"]["reason"] == "NonZeroExitCode"
    assert said["status"]["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]
    said = await run(api, "p", "/bin/sh", "-c", "kill -9 $$")
    assert said["status"]["details"]["causes"][0]["message"] == "137"
    data = bytes(range(256)) * 2000
    said = await run(api, "p", "cat", stdin=data)  # only v5 can close stdin
    assert said["out"] == data
    said = await run(api, "p", "/bin/sh", "-c", "grep CapEff /proc/self/status; ls /proc | grep -c '^[0-9]*$'")
    assert said["out"].split() == [b"CapEff:", b"0000000000000000", b"5"]  # sh, sleep, sh, ls, grep: nobody else
    path = api.path("pods", "p") + "/exec"
    status, answer = await api.ask("GET", path, command="true")
    assert status == 400 and answer["message"] == "Upgrade request required"
    assert (await api.ask("GET", path, command="true", container="other"))[0] == 400


async def test_exec_ends_with_whoever_ends_first(api: Kubectl, cluster: FakeCluster) -> None:
    await api.create("pods", shell("p", "sleep 60"))
    await api.follow("p", running)
    path = api.path("pods", "p") + "/exec"
    query = [("command", word) for word in ("/bin/sh", "-c", "echo $$; sleep 61")] + [("stdout", "1")]
    socket = await api.session.ws_connect(path, params=query, protocols=["v5.channel.k8s.io"])
    await socket.receive()
    await socket.close()  # the client leaves

    def sleepers() -> int:
        return sum("sleep\x0061" in _command(name) for name in os.listdir("/proc") if name.isdigit())

    await eventually(lambda: sleepers() == 0)
    async with api.session.ws_connect(path, params=query, protocols=["v5.channel.k8s.io"]) as socket:
        await socket.receive()
        await api.delete("pods", "p", gracePeriodSeconds="0")
        while not (message := await socket.receive()).type.name.startswith("CLOS"):
            if message.data[:1] == b"\x03":
                assert json.loads(message.data[1:])["details"]["causes"][0]["message"] == "137"
    await api.create("pods", shell("q", "true"))
    await api.follow("q", ended)
    with pytest.raises(Exception, match="500"):
        await api.session.ws_connect(api.path("pods", "q") + "/exec", params={"command": "true"})


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def test_closing_kills_everything_and_leaves_no_folder() -> None:
    async with FakeCluster(ClusterOptions(clock=Clock(cluster=0.02))) as cluster, kubectl(cluster) as api:
        for name in ("a", "b"):
            await api.create("pods", shell(name, "sleep 60 & sleep 60"))
            await api.follow(name, running)
        pids = [pid for _, _, pid in cluster.kubelet.containers]
        folder = cluster.kubelet.state
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids) and folder.exists()
        cluster.scenarios.attach("node-lost", name="lost", after=0.0)
        await api.create("pods", shell("lost", "sleep 60"))
        await eventually(lambda: len(cluster.kubelet.containers) == 3)
        pids = [pid for _, _, pid in cluster.kubelet.containers]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids) and not folder.exists()
    assert cluster.errors == []


async def test_a_following_log_reads_to_the_end(api: Kubectl) -> None:
    await api.create("pods", shell("p", "for i in 1 2 3; do echo $i; sleep 0.1; done"))
    await api.follow("p", running)
    assert await api.ask("GET", api.path("pods", "p") + "/log", follow="true") == (200, "1\n2\n3\n")
    assert await api.ask("GET", api.path("pods", "p") + "/log", tailLines="2", limitBytes="3") == (200, "2\n3")
