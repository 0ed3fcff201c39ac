"""The backend against the fake cluster: pods that run, and every way in which they do not."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import InputError, StageError
from openforgerl.sandboxes import cgroups
from openforgerl.sandboxes.kubernetes.cluster import POD
from openforgerl.testing.fake_kubernetes import FakeCluster, NodeSpec
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, PODS, QUOTAS, RESOURCES
from openforgerl.types import Origin, SandboxLimits, SandboxSpec, Stage

LEASES = next(resource for resource in RESOURCES if resource.plural == "leases")

SPEC = SandboxSpec(run_id="run-1")


def objects(fake: FakeCluster) -> dict[str, int]:
    """How many pods, ConfigMaps and Leases there are."""
    return {kind.plural: len(fake.objects.list(kind)) for kind in (CONFIG_MAPS, LEASES, PODS)}


NOTHING = {"configmaps": 0, "leases": 0, "pods": 0}


async def test_a_pod_that_runs_real_programs(fake: FakeCluster, backend: Any, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"given\n")
    spec = SandboxSpec(run_id="run-1", files={"/workspace/input": str(tmp_path / "input")}, env={"COLOUR": "blue"})
    async with backend(image="system:1") as sandboxes:
        async with sandboxes.create(spec, "t-r0-a1") as sandbox:
            script = "cat input; echo $COLOUR; touch /usr/x; cat /proc/1/environ; env | grep -c TOKEN"
            exit = await sandbox.exec(["/bin/sh", "-c", script], env={}, timeout=20)
            assert exit.stdout == b"given\nblue\n0\n"
            assert exit.stderr.count(b"Read-only file system") == 1
            assert exit.stderr.count(b"Permission denied") == 1  # the credential is in init's first environment
            data = os.urandom(5 << 20)
            await sandbox.write("/workspace/out/data", data, mode=0o755)
            assert await sandbox.read("/workspace/out/data", limit=6 << 20) == data
            await sandbox.exec(["/bin/sh", "-c", "sleep 100 & ln -s /etc/passwd link"], env={}, timeout=20)
            await sandbox.kill_agent()
            await sandbox.export(["/workspace"], tmp_path / "out", limit=1 << 24)
            assert (tmp_path / "out/workspace/out/data").read_bytes() == data
            assert sandbox.report["export_skipped"] == [["/workspace/link", "neither a regular file nor a directory"]]
            assert sandbox.report["capabilities"] == "0000000000000000"
            assert sandbox.report["no_new_privileges"] is True
            assert [ref.attempt_id for ref in await sandboxes.list("run-1")] == ["t-r0-a1"]
            assert sandbox.report["node"] in ("node-0", "node-1")
        assert await sandboxes.list("run-1") == []
    await fake.settled()
    assert objects(fake) == NOTHING
    calls = fake.counts.calls
    assert (calls["create", "pods"], calls["delete", "pods"], calls["watch", "pods"]) == (1, 1, 1)
    assert not any(resource == "pods/exec" for _, resource in calls)


ENDS = [
    # scenario, where the pod breaks, kind, origin, retryable
    ("exit-0", "init_ended", Origin.INFRASTRUCTURE, True),
    ("exit-3", "init_ended", Origin.INFRASTRUCTURE, True),
    ("oom", "oom", Origin.INFRASTRUCTURE, True),
    ("deadline", "deadline", Origin.INFRASTRUCTURE, True),
    ("evicted", "disk_limit", Origin.BUDGET, True),
    ("node-lost", "node_lost", Origin.INFRASTRUCTURE, True),
]
NEVER_RUN = [
    ("image-missing", "image_pull", True),
    ("image-never", "image_absent", True),
    ("unschedulable", "unschedulable", True),
    ("start-error", "start_error", True),
]


@pytest.mark.parametrize(("scenario", "kind", "origin", "retryable"), ENDS, ids=[row[0] for row in ENDS])
async def test_a_pod_that_breaks_while_its_program_runs(
    fake: FakeCluster, backend: Any, scenario: str, kind: str, origin: Origin, retryable: bool
) -> None:
    fake.scenarios.attach(scenario, after=20.0)  # 0.4 s after its start
    async with backend(image="system:1") as sandboxes:
        with pytest.raises(StageError) as failed:
            async with sandboxes.create(SPEC, "t-r0-a1") as sandbox:
                await sandbox.exec(["/bin/sleep", "60"], env={}, timeout=60)
        error = failed.value
        assert (error.stage, error.kind, error.origin, error.retryable) == (Stage.SANDBOX, kind, origin, retryable)
        assert error.evidence["pod"] and error.evidence["node"]
    fake.restore_nodes()
    await fake.settled()
    assert objects(fake) == NOTHING


@pytest.mark.parametrize(("scenario", "kind", "retryable"), NEVER_RUN, ids=[row[0] for row in NEVER_RUN])
async def test_a_pod_that_never_runs(
    fake: FakeCluster, backend: Any, scenario: str, kind: str, retryable: bool
) -> None:
    fake.scenarios.attach(scenario)
    async with backend(schedule_timeout=1.0, pull_timeout=1.0) as sandboxes:
        with pytest.raises(StageError) as failed:
            async with sandboxes.create(SPEC, "t-r0-a1"):
                raise AssertionError("it cannot have started")
        assert (failed.value.kind, failed.value.retryable) == (kind, retryable)
        assert failed.value.origin is Origin.INFRASTRUCTURE
    await fake.settled()
    assert objects(fake) == NOTHING


@pytest.mark.parametrize(
    "scenario",
    ["slow-pull", "slow-delete", "create-conflict", "throttled-create", "quota", "lost-events", "late-events"],
)
async def test_what_is_only_slow_or_odd_harms_nothing(fake: FakeCluster, backend: Any, scenario: str) -> None:
    fake.scenarios.attach(scenario)
    async with backend() as sandboxes, sandboxes.create(SPEC, "t-r0-a1") as sandbox:
        assert (await sandbox.exec(["echo", "x"], env={}, timeout=10)).stdout == b"x"
    await fake.settled()
    assert objects(fake) == NOTHING
    # a name that was taken, or an answer that was lost, makes no second pod
    assert len({uid for uid, planted in fake.scenarios.planted.items()}) == 1


async def test_an_oom_of_a_child_is_seen_from_inside(fake: FakeCluster, backend: Any) -> None:
    """On cgroup v1 the pod goes on, and says OOMKilled with exit code 0 when it ends much later."""
    found = cgroups.detect()
    if found is None or found.memory is None:
        without = pytest.fail if os.geteuid() == 0 else pytest.skip
        without("no cgroup with a memory controller is writable here")
    spec = SandboxSpec(run_id="run-1", limits=SandboxLimits(memory_mb=64))
    async with backend(image="system:1") as sandboxes, sandboxes.create(spec, "t-r0-a1") as sandbox:
        eater = ["/usr/bin/python3", "-c", "x = bytearray(400 << 20); print(len(x))"]
        exit = await sandbox.exec(eater, env={}, timeout=30)
        assert exit.signal == 9


async def test_pods_go_to_the_nodes_that_were_chosen(fake: FakeCluster, backend: Any) -> None:
    fake.nodes.add(NodeSpec(name="agents-0", labels={"pool": "agents"}))
    async with backend(node_selector={"pool": "agents"}, runtime_class="gvisor", priority_class="low") as sandboxes:
        made = [sandboxes.create(SPEC, f"t-r{number}-a1") for number in range(4)]
        living = await asyncio.gather(*(one.__aenter__() for one in made))
        assert {one.report["node"] for one in living} == {"agents-0"}
        assert {one.report["runtime_class"] for one in living} == {"gvisor"}
        specs = [stored.body["spec"] for stored in fake.objects.list(PODS)]
        assert {(spec["runtimeClassName"], spec["priorityClassName"]) for spec in specs} == {("gvisor", "low")}
        for one in made:
            await one.__aexit__(None, None, None)
    async with backend(node_selector={"pool": "none"}, schedule_timeout=0.5) as sandboxes:
        with pytest.raises(StageError, match="didn't match Pod's node affinity/selector") as failed:
            async with sandboxes.create(SPEC, "t-r0-a1"):
                raise AssertionError("it cannot have started")
    assert failed.value.kind == "unschedulable"


async def test_a_full_quota_is_waited_for(fake: FakeCluster, backend: Any) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "2"}}}
    fake.registry.create(QUOTAS, "rollouts", quota)
    async with backend() as sandboxes:

        async def one(number: int) -> bytes:
            async with sandboxes.create(SPEC, f"t-r{number}-a1") as sandbox:
                return (await sandbox.exec(["echo", str(number)], env={}, timeout=10)).stdout

        assert await asyncio.gather(*(one(number) for number in range(6))) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert fake.counts.answers[403] > 0


async def test_a_quota_that_stays_full_is_an_infrastructure_failure(fake: FakeCluster, backend: Any) -> None:
    fake.registry.create(QUOTAS, "rollouts", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}})
    async with backend(quota_timeout=0.5) as sandboxes:
        with pytest.raises(StageError, match="exceeded quota") as failed:
            async with sandboxes.create(SPEC, "t-r0-a1"):
                raise AssertionError("it cannot have started")
    assert (failed.value.kind, failed.value.retryable) == ("quota", True)


async def test_missing_rights_are_not_waited_for(fake: FakeCluster, backend: Any) -> None:
    token = fake.access.add("nobody", namespace="rollouts")
    started = time.monotonic()
    async with backend(token=token) as sandboxes:
        with pytest.raises(StageError, match="cannot create resource") as failed:
            async with sandboxes.create(SPEC, "t-r0-a1"):
                raise AssertionError("it cannot have started")
    assert (failed.value.kind, failed.value.retryable) == ("api_refused", False)
    assert time.monotonic() - started < 5


async def test_a_predecessor_of_the_same_name_is_removed_first(fake: FakeCluster, backend: Any) -> None:
    async with backend() as dead, dead.create(SPEC, "t-r0-a1") as first:
        uid = first.ref.detail["uid"]
        async with backend() as sandboxes, sandboxes.create(SPEC, "t-r0-a1") as second:
            assert second.ref.detail["pod"] == first.ref.detail["pod"]
            assert second.ref.detail["uid"] != uid
            assert (await second.exec(["echo", "x"], env={}, timeout=10)).stdout == b"x"
    await fake.settled()
    assert objects(fake) == NOTHING


async def test_one_attempt_id_has_one_sandbox_at_a_time(backend: Any) -> None:
    async with backend() as sandboxes, sandboxes.create(SPEC, "t-r0-a1"):
        with pytest.raises(InputError, match="one sandbox at a time"):
            async with sandboxes.create(SPEC, "t-r0-a1"):
                raise AssertionError("it cannot have started")


async def test_a_pod_that_somebody_else_deletes(fake: FakeCluster, backend: Any) -> None:
    async with backend() as sandboxes:
        with pytest.raises(StageError, match=r"not by us|ended") as failed:
            async with sandboxes.create(SPEC, "t-r0-a1") as sandbox:
                cluster = await sandboxes._open()
                await cluster.delete(POD, sandbox.ref.detail["pod"], uid="", grace=0)
                await sandbox.exec(["sleep", "x"], env={}, timeout=30)
                await asyncio.sleep(1)
                await sandbox.exec(["sleep", "x"], env={}, timeout=30)
        assert failed.value.retryable


async def test_reap_leaves_nothing_of_a_run_and_all_of_others(fake: FakeCluster, backend: Any) -> None:
    async with backend() as sandboxes:
        one = sandboxes.create(SPEC, "t-r0-a1")
        other = sandboxes.create(SandboxSpec(run_id="run-2"), "t-r0-a1")
        await one.__aenter__()
        kept = await other.__aenter__()
        assert await sandboxes.reap("run-1") == 1
        assert await sandboxes.list("run-1") == []
        assert [ref.run_id for ref in await sandboxes.list("run-2")] == ["run-2"]
        assert (await kept.exec(["echo", "x"], env={}, timeout=10)).stdout == b"x"
        assert objects(fake) == {"configmaps": 1, "leases": 1, "pods": 1}
        await one.__aexit__(None, None, None)
        await other.__aexit__(None, None, None)
    await fake.settled()
    assert objects(fake) == NOTHING
