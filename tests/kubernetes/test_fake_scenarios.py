"""Every row of what a real cluster showed, on the fake: the fields, their order, and their times by its clock.

The expected values are those that were measured on Kubernetes 1.36 (containerd, cgroup v1), not the fake's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
import pytest

from openforgerl.testing.fake_kubernetes import (
    FAULTS,
    SCENARIOS,
    Clock,
    ClusterOptions,
    FakeCluster,
    Image,
    ProgramContext,
)
from openforgerl.testing.fake_kubernetes.kinds import EVENTS, JOBS

from .kubectl import Kubectl, Object, condition, ended, eventually, kubectl, pod, state

SCALE = 0.05
"""A cluster's second on this clock."""
LATE = 30.0
"""By how many of them a busy machine may be late. Nothing is ever early."""


async def long(context: ProgramContext) -> int:
    context.print("alive")
    await asyncio.sleep(float(context.env.get("SECONDS", "600")))
    context.print("last words")
    return int(context.env.get("CODE", "0"))


async def stubborn(context: ProgramContext) -> int:
    """Like `sh` as PID 1: SIGTERM does nothing."""
    await asyncio.Event().wait()
    return 0


@pytest.fixture
async def cluster() -> AsyncGenerator[FakeCluster]:
    images = {"stubborn:*": Image(program=stubborn, handles_term=True), "*": Image(program=long)}
    async with FakeCluster(ClusterOptions(clock=Clock(cluster=SCALE, promised=SCALE), images=images)) as cluster:
        yield cluster


@pytest.fixture
async def api(cluster: FakeCluster) -> AsyncGenerator[Kubectl]:
    async with kubectl(cluster) as client:
        yield client


def env(**values: str) -> Object:
    return {"env": [{"name": name, "value": value} for name, value in values.items()]}


async def play(api: Kubectl, cluster: FakeCluster, scenario: str, **spec: object) -> list[Object]:
    """A pod with that scenario, from creation to its last phase."""
    cluster.scenarios.attach(scenario, name="p")
    await api.create("pods", pod("p", **spec))
    return await api.follow("p", ended)


def reasons(cluster: FakeCluster) -> set[str]:
    return {stored.body["reason"] for stored in cluster.objects.list(EVENTS)}


def running(body: Object) -> bool:
    return body["status"]["phase"] == "Running"


async def test_an_exit_is_seen_before_the_phase(api: Kubectl, cluster: FakeCluster) -> None:
    loop, version = asyncio.get_running_loop(), await api.version()
    await api.create("pods", pod("p", container=env(SECONDS="0.05")))
    seen: list[tuple[float, str, str, object]] = []
    async for event in api.watch(fieldSelector="metadata.name=p", resourceVersion=version):
        kind, fields = state(event["object"])
        phase = event["object"]["status"]["phase"]
        seen.append((loop.time(), phase, kind, fields.get("reason")))
        if ended(event["object"]):
            break
    order = [(phase, kind, reason) for _, phase, kind, reason in seen]
    assert list(dict.fromkeys(order)) == [
        ("Pending", "", None),
        ("Pending", "waiting", "ContainerCreating"),
        ("Running", "running", None),
        ("Running", "terminated", "Completed"),
        ("Succeeded", "terminated", "Completed"),
    ]
    terminated = next(at for at, _, kind, _ in seen if kind == "terminated")
    # 1.2 s; the first of the two may have been read late
    assert 0.4 < (seen[-1][0] - terminated) / SCALE < 1.2 + LATE


async def test_scheduling_comes_first(api: Kubectl) -> None:
    await api.create("pods", pod("p"))
    seen = await api.follow("p", running)
    scheduled = [condition(body, "PodScheduled").get("status") for body in seen]
    assert scheduled[-1] == "True" and seen[-1]["spec"]["nodeName"] == "node-0"
    assert condition(seen[-1], "Ready")["status"] == "True" and seen[-1]["status"]["podIP"].startswith("127.")
    assert seen[-1]["status"]["startTime"]
    reasons = [item["reason"] for item in (await api.list("events", fieldSelector="involvedObject.name=p"))["items"]]
    assert {"Scheduled", "Started"} <= set(reasons)


async def test_exit_3(api: Kubectl, cluster: FakeCluster) -> None:
    last = (await play(api, cluster, "exit-3"))[-1]
    kind, fields = state(last)
    assert (last["status"]["phase"], kind, fields["reason"], fields["exitCode"]) == ("Failed", "terminated", "Error", 3)


async def test_the_program_s_own_exit_code_and_last_words(api: Kubectl) -> None:
    container = {**env(SECONDS="0", CODE="3"), "terminationMessagePolicy": "FallbackToLogsOnError"}
    await api.create("pods", pod("p", container=container))
    _, fields = state((await api.follow("p", ended))[-1])
    assert (fields["exitCode"], fields["message"]) == (3, "alive\nlast words")


async def test_oom_of_the_first_process(api: Kubectl, cluster: FakeCluster) -> None:
    last = (await play(api, cluster, "oom"))[-1]
    _, fields = state(last)
    assert (last["status"]["phase"], fields["reason"], fields["exitCode"]) == ("Failed", "OOMKilled", 137)
    assert "reason" not in last["status"]  # the pod itself says nothing


async def test_oom_of_a_child_is_exit_0_and_succeeded(api: Kubectl, cluster: FakeCluster) -> None:
    last = (await play(api, cluster, "oom-child", container=env(SECONDS="0.3")))[-1]
    _, fields = state(last)
    assert (last["status"]["phase"], fields["reason"], fields["exitCode"]) == ("Succeeded", "OOMKilled", 0)


async def test_active_deadline_comes_late(api: Kubectl, cluster: FakeCluster) -> None:
    loop = asyncio.get_running_loop()
    spec = {"image": "stubborn:1", "activeDeadlineSeconds": 4, "terminationGracePeriodSeconds": 0}
    started = loop.time()
    await api.create("pods", pod("p", **spec))
    last = (await api.follow("p", ended))[-1]
    assert (last["status"]["phase"], last["status"]["reason"]) == ("Failed", "DeadlineExceeded")
    assert last["status"]["message"] == "Pod was active on the node longer than the specified deadline"
    _, fields = state(last)
    assert (fields["reason"], fields["exitCode"]) == ("Error", 137)
    assert 7.3 < (loop.time() - started) / SCALE < 7.3 + LATE


async def test_a_deadline_may_be_told_while_the_container_runs(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("deadline-early", name="p")  # kubernetes issues 88613 and 98718
    version = await api.version()
    await api.create("pods", pod("p", image="stubborn:1"))
    told: list[tuple[str, str]] = []
    async for event in api.watch(fieldSelector="metadata.name=p", resourceVersion=version):
        told.append((event["object"]["status"]["phase"], state(event["object"])[0]))
        if told[-1] == ("Failed", "terminated"):
            break
    assert told[-2:] == [("Failed", "running"), ("Failed", "terminated")]
    status = event["object"]["status"]
    assert (status["reason"], state(event["object"])[1]["exitCode"]) == ("DeadlineExceeded", 137)


async def test_the_deadline_never_ends_a_pod_that_does_not_run(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("unschedulable", name="p")
    await api.create("pods", pod("p", activeDeadlineSeconds=1))
    await asyncio.sleep(20 * SCALE)
    assert (await api.get("pods", "p"))["status"]["phase"] == "Pending"


async def test_an_image_that_is_missing_is_pulled_for_ever(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("image-missing", name="p")
    await api.create("pods", pod("p"))
    reasons: list[str] = []

    def thrice(body: Object) -> bool:
        reason = state(body)[1].get("reason", "")
        if reason and reason != (reasons or [""])[-1]:
            reasons.append(reason)
        return len(reasons) >= 5

    last = (await api.follow("p", thrice))[-1]
    assert reasons == ["ContainerCreating", *["ErrImagePull", "ImagePullBackOff"] * 2]
    assert last["status"]["phase"] == "Pending"
    assert condition(last, "PodScheduled")["status"] == "True"
    back_off = next(item for item in (await api.list("events", fieldSelector="reason=BackOff"))["items"])
    assert back_off["type"] == "Warning" and "Back-off pulling image" in back_off["message"]


async def test_pull_policy_never(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("image-never", name="p")
    await api.create("pods", pod("p"))
    last = (await api.follow("p", lambda body: state(body)[1].get("reason") == "ErrImageNeverPull"))[-1]
    assert last["status"]["phase"] == "Pending" and state(last)[0] == "waiting"


async def test_no_room_is_told_soon_and_is_not_the_end(api: Kubectl, cluster: FakeCluster) -> None:
    wants = {"container": {"resources": {"requests": {"cpu": "40"}}}}  # the node has 64
    for name in ("first", "second"):
        await api.create("pods", pod(name, **wants))
    last = (await api.follow("second", lambda body: bool(condition(body, "PodScheduled"))))[-1]
    told = condition(last, "PodScheduled")
    assert (told["status"], told["reason"]) == ("False", "Unschedulable")
    assert told["message"].startswith("0/1 nodes are available: 1 Insufficient cpu.")
    assert last["status"]["phase"] == "Pending" and "startTime" not in last["status"]
    await api.delete("pods", "first", gracePeriodSeconds="0")
    await api.follow("second", running)


async def test_eviction(api: Kubectl, cluster: FakeCluster) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    last = (await play(api, cluster, "evicted"))[-1]
    assert (last["status"]["phase"], last["status"]["reason"]) == ("Failed", "Evicted")
    assert "ephemeral local storage usage exceeds" in last["status"]["message"]
    _, fields = state(last)
    assert (fields["reason"], fields["exitCode"]) == ("Error", 137)
    assert 8.7 < (loop.time() - started) / SCALE < 8.7 + LATE


async def test_a_bad_command_never_waits(api: Kubectl, cluster: FakeCluster) -> None:
    seen = await play(api, cluster, "start-error")
    kind, fields = state(seen[-1])
    assert (kind, fields["reason"], fields["exitCode"]) == ("terminated", "StartError", 128)
    assert "no such file or directory" in fields["message"]
    assert seen[-1]["status"]["phase"] == "Failed"
    assert {state(body)[1].get("reason") for body in seen} <= {None, "ContainerCreating", "StartError"}


async def test_a_lost_node(api: Kubectl, cluster: FakeCluster) -> None:
    loop = asyncio.get_running_loop()
    cluster.scenarios.attach("node-lost", name="p")
    await api.create("pods", pod("p", image="stubborn:1"))
    await api.create("pods", pod("neighbour"))
    await api.follow("p", running)
    started = loop.time()
    last = (await api.follow("p", lambda body: condition(body, "Ready").get("status") == "False" and running(body)))[-1]
    assert last["status"]["phase"] == "Running" and state(last)[0] == "running"
    assert 40 < (loop.time() - started) / SCALE < 47 + LATE
    (planted,) = cluster.scenarios.of("p")
    assert last["spec"]["nodeName"] == planted.node != "node-0"
    await asyncio.sleep(10 * SCALE)
    ready = condition(await api.get("nodes", planted.node), "Ready")
    assert (ready["status"], ready["reason"]) == ("Unknown", "NodeStatusUnknown")
    assert condition(await api.get("pods", "neighbour"), "Ready")["status"] == "True"
    # exec hangs: nobody answers
    path = api.path("pods", "p") + "/exec"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), api.session.ws_connect(path, params={"command": "true"}):
            pass
    # deleting it gets stuck; by force the object goes, and the container runs on
    await api.delete("pods", "p")
    await asyncio.sleep(20 * SCALE)
    stuck = await api.get("pods", "p")
    assert stuck["metadata"]["deletionTimestamp"] and stuck["status"]["phase"] == "Running"
    await api.delete("pods", "p", gracePeriodSeconds="0")
    await api.get("pods", "p", expect=404)
    await asyncio.sleep(20 * SCALE)
    assert [name for name, _, _ in cluster.kubelet.containers] == ["p", "neighbour"]
    cluster.restore_nodes()
    await eventually(lambda: len(cluster.kubelet.containers) == 1)
    assert condition(await api.get("nodes", planted.node), "Ready")["status"] == "True"


async def test_a_lost_node_s_pods_are_deleted_after_their_toleration(api: Kubectl, cluster: FakeCluster) -> None:
    soon = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    await api.create("pods", pod("p", tolerations=[{**soon, "tolerationSeconds": 5}]))
    await api.create("pods", pod("patient"))  # tolerates 300 s
    for name in ("p", "patient"):
        await api.follow(name, running)
    cluster.lose_node("node-0")
    last = (await api.follow("p", lambda body: "deletionTimestamp" in body["metadata"]))[-1]
    target = condition(last, "DisruptionTarget")
    assert (target["status"], target["reason"]) == ("True", "DeletionByTaintManager")
    assert "deletionTimestamp" not in (await api.get("pods", "patient"))["metadata"]
    cluster.restore_nodes()
    await api.until_gone("pods", "p")
    last = (await api.follow("patient", lambda body: condition(body, "Ready")["status"] == "True"))[-1]
    assert running(last)


async def test_a_delete_with_grace_and_by_force(api: Kubectl) -> None:
    for name in ("slow", "fast"):
        await api.create("pods", pod(name, image="stubborn:1"))
        await api.follow(name, running)
    answer = await api.delete("pods", "slow", gracePeriodSeconds="1")
    assert answer["metadata"]["deletionGracePeriodSeconds"] == 1
    assert 3.2 < await api.until_gone("pods", "slow") / SCALE < 3.3 + LATE
    await api.delete("pods", "fast", gracePeriodSeconds="0")
    await api.get("pods", "fast", expect=404)


async def test_the_last_state_before_a_deletion_is_told(api: Kubectl) -> None:
    await api.create("pods", pod("p"))
    await api.follow("p", running)
    await api.delete("pods", "p")
    seen = await api.follow("p", lambda _: False)
    assert [body["_event"] for body in seen][-1] == "DELETED"
    kind, fields = state(seen[-1])
    assert (kind, fields["exitCode"], seen[-1]["status"]["phase"]) == ("terminated", 143, "Failed")


async def test_slow_delete(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("slow-delete", name="p")
    await api.create("pods", pod("p"))
    await api.follow("p", running)
    await api.delete("pods", "p")
    assert 20 < await api.until_gone("pods", "p") / SCALE < 22.3 + LATE


async def test_a_finished_pod_is_deleted_at_once(api: Kubectl, cluster: FakeCluster) -> None:
    await play(api, cluster, "exit-0")
    await api.delete("pods", "p", gracePeriodSeconds="30")
    await api.get("pods", "p", expect=404)


async def test_logs_rotate_to_nothing(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("log-rotation", name="p")
    await api.create("pods", pod("p"))
    await api.follow("p", running)
    path = api.path("pods", "p") + "/log"
    status, text = await api.ask("GET", path, tailLines="1")
    assert status == 200 and text == "x" * 79 + "\n"
    await asyncio.sleep(15 * SCALE)
    assert await api.ask("GET", path) == (200, "")
    (planted,) = cluster.scenarios.of("p")
    assert cluster.kubelet.lives[planted.uid].slots[0].log is not None


async def test_logs_of_what_does_not_run_yet(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("image-never", name="p")
    await api.create("pods", pod("p"))
    await api.follow("p", lambda body: state(body)[1].get("reason") == "ErrImageNeverPull")
    status, answer = await api.ask("GET", api.path("pods", "p") + "/log")
    assert status == 400
    assert answer["message"] == 'container "main" in pod "p" is waiting to start: ErrImageNeverPull'


async def test_a_create_whose_answer_is_lost(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("create-conflict", name="p")
    with pytest.raises(aiohttp.ClientError):
        await api.create("pods", pod("p"))
    answer = await api.create("pods", pod("p"), expect=409)
    assert answer["reason"] == "AlreadyExists"
    assert [planted.struck is not None for planted in cluster.scenarios.of("p")] == [True]


async def test_planted_refusals_of_a_create_happen_once(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("throttled-create", name="a")
    cluster.scenarios.attach("quota", name="b")
    assert (await api.ask("POST", api.path("pods"), pod("a"))) == (429, "Too many requests, please try again later.\n")
    assert "exceeded quota" in (await api.create("pods", pod("b"), expect=403))["message"]
    for name in ("a", "b"):
        await api.create("pods", pod(name))
        assert [planted.struck is not None for planted in cluster.scenarios.of(name)] == [True]


async def test_missing_configuration(api: Kubectl, cluster: FakeCluster) -> None:
    source = {"secretKeyRef": {"name": "s", "key": "k"}}
    await api.create("pods", pod("p", container={"env": [{"name": "K", "valueFrom": source}]}))
    last = (await api.follow("p", lambda body: state(body)[1].get("reason") == "CreateContainerConfigError"))[-1]
    assert state(last)[1]["message"] == 'secret "s" not found'
    await api.create("secrets", {"metadata": {"name": "s"}, "stringData": {"k": "v"}})
    await api.follow("p", running)
    volume = {"name": "v", "secret": {"secretName": "t"}}
    await api.create("pods", pod("q", volumes=[volume]))
    await eventually(lambda: "FailedMount" in reasons(cluster))
    assert state(await api.get("pods", "q"))[1]["reason"] == "ContainerCreating"


async def test_a_failing_init_container_fails_the_pod(api: Kubectl) -> None:
    first = {"name": "copy", "image": "busybox:1", **env(SECONDS="0", CODE="5")}
    await api.create("pods", pod("p", initContainers=[first]))
    seen = await api.follow("p", ended)
    status = seen[-1]["status"]
    assert status["phase"] == "Failed"
    assert status["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 5
    assert state(seen[-1]) == ("waiting", {"reason": "PodInitializing"})


async def test_a_job_goes_when_its_time_is_over(api: Kubectl, cluster: FakeCluster) -> None:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": pod("x", container=env(SECONDS="0"))["spec"]}
    spec = {"ttlSecondsAfterFinished": 3, "template": template}
    await api.create("jobs", {"metadata": {"name": "j"}, "spec": spec})
    loop = asyncio.get_running_loop()
    await eventually(lambda: "succeeded" in cluster.objects.get(JOBS, ("default", "j")).body.get("status", {}))
    finished = loop.time()
    (made,) = (await api.list("pods", labelSelector="batch.kubernetes.io/job-name=j,a=b"))["items"]
    assert made["metadata"]["ownerReferences"][0]["kind"] == "Job"
    await api.until_gone("jobs", "j")
    assert 2.5 < (loop.time() - finished) / SCALE < 3 + LATE
    await api.until_gone("pods", made["metadata"]["name"])
    failing = {"spec": pod("x", container=env(SECONDS="0", CODE="1"))["spec"]}
    await api.create("jobs", {"metadata": {"name": "k"}, "spec": {"template": failing}})
    await eventually(lambda: "failed" in cluster.objects.get(JOBS, ("default", "k")).body.get("status", {}))
    status = (await api.get("jobs", "k"))["status"]
    assert [(one["type"], one["reason"]) for one in status["conditions"]] == [("Failed", "BackoffLimitExceeded")]


def test_every_fault_is_a_scenario() -> None:
    assert set(FAULTS) <= set(SCENARIOS)


async def test_random_faults_depend_on_seed_and_name_alone(cluster: FakeCluster) -> None:
    names = [f"pod-{number}" for number in range(2000)]
    cluster.scenarios.at_random(0.1, seed=1, among=["oom", "evicted"])
    first = [cluster.scenarios.choose(name, ["x"]) for name in names]
    assert [cluster.scenarios.choose(name, ["x"]) for name in reversed(names)] == first[::-1]
    struck = [scenario.name for scenario in first if scenario is not None]
    assert 150 < len(struck) < 250  # 200, and three standard deviations are 40
    assert 60 < struck.count("oom") < 140
    cluster.scenarios.clear()
    cluster.scenarios.at_random(0.1, seed=2, among=["oom", "evicted"])
    assert [cluster.scenarios.choose(name, ["x"]) for name in names] != first


async def test_rules_come_before_chance_and_can_go_by_image(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.at_random(1.0, seed=1, among=["oom"])
    cluster.scenarios.attach("exit-3", image="special:*")
    await api.create("pods", pod("a", image="special:1"))
    await api.create("pods", pod("b"))
    codes = [state((await api.follow(name, ended))[-1])[1]["exitCode"] for name in ("a", "b")]
    assert codes == [3, 137]
    assert {planted.name: planted.scenario.name for planted in cluster.scenarios.planted.values()} == {
        "a": "exit-3",
        "b": "oom",
    }
    with pytest.raises(KeyError, match="no scenario 'nonsense'"):
        cluster.scenarios.attach("nonsense")


async def test_a_pod_that_ends_first_is_not_struck(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("oom", name="p", after=100.0)
    await api.create("pods", pod("p", container=env(SECONDS="0")))
    last = (await api.follow("p", ended))[-1]
    assert last["status"]["phase"] == "Succeeded"
    assert [planted.struck for planted in cluster.scenarios.of("p")] == [None]
