"""A run over several namespaces: a quota that is full in one sends pods to the next, and nothing is left in any."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from openforgerl.errors import ConfigError, InputError, StageError
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.sandboxes.kubernetes.reaping import reap_expired
from openforgerl.testing.fake_kubernetes import FakeCluster
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, NAMESPACES, PODS, QUOTAS, RESOURCES
from openforgerl.types import SandboxSpec

LEASES = next(resource for resource in RESOURCES if resource.plural == "leases")
SPEC = SandboxSpec(run_id="run-1")


@pytest.fixture
def two(fake: FakeCluster) -> FakeCluster:
    """Room for two pods in `rollouts` and for three in `overflow`."""
    fake.registry.create(NAMESPACES, "", {"metadata": {"name": "overflow"}, "status": {"phase": "Active"}})
    for namespace, most in (("rollouts", "2"), ("overflow", "3")):
        quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": most}}}
        fake.registry.create(QUOTAS, namespace, quota)
    return fake


def where(fake: FakeCluster, kind: Any = PODS) -> dict[str, int]:
    return dict(Counter(stored.key[0] for stored in fake.objects.list(kind)))


def left(fake: FakeCluster) -> list[dict[str, int]]:
    return [where(fake, kind) for kind in (PODS, CONFIG_MAPS, LEASES)]


async def says(sandbox: Any, word: str) -> bytes:
    said: bytes = (await sandbox.exec(["echo", word], env={}, timeout=20)).stdout.strip()
    return said


async def test_a_full_quota_sends_pods_to_the_next_namespace(two: FakeCluster, backend: Any) -> None:
    async with backend(more_namespaces=("overflow",)) as sandboxes:
        made = [sandboxes.create(SPEC, f"t-r{number}-a1") for number in range(5)]
        living = await asyncio.gather(*(one.__aenter__() for one in made))
        assert where(two) == {"rollouts": 2, "overflow": 3}
        assert await asyncio.gather(*(says(one, "x") for one in living)) == [b"x"] * 5
        assert Counter(one.ref.detail["namespace"] for one in living) == {"rollouts": 2, "overflow": 3}
        assert len(await sandboxes.list("run-1")) == 5
        sixth = sandboxes.create(SPEC, "t-r5-a1")
        waiting = asyncio.create_task(sixth.__aenter__())
        await asyncio.sleep(1.0)
        assert not waiting.done()  # both are full: it waits until there is room in one of them
        leaving = next(number for number, one in enumerate(living) if one.ref.detail["namespace"] == "rollouts")
        await made[leaving].__aexit__(None, None, None)
        assert await says(await waiting, "y") == b"y"
        assert where(two) == {"rollouts": 2, "overflow": 3}
        with pytest.raises(InputError, match="one sandbox at a time"):  # whatever namespace it would be made in
            async with sandboxes.create(SPEC, "t-r5-a1"):
                raise AssertionError("it cannot have started")
        await sixth.__aexit__(None, None, None)
        for number, one in enumerate(made):
            if number != leaving:
                await one.__aexit__(None, None, None)
    await two.settled()
    assert left(two) == [{}, {}, {}]


async def test_a_namespace_that_is_not_needed_costs_nothing(two: FakeCluster, backend: Any) -> None:
    async with backend(more_namespaces=("overflow",)) as sandboxes, sandboxes.create(SPEC, "t-r0-a1") as sandbox:
        assert await says(sandbox, "x") == b"x"
        assert where(two, CONFIG_MAPS) == where(two, LEASES) == {"rollouts": 1}
    calls = two.counts.calls
    assert [calls[verb, "pods"] for verb in ("create", "list", "watch", "delete")] == [1, 1, 1, 1]


async def test_quotas_that_are_full_everywhere_are_named(two: FakeCluster, backend: Any) -> None:
    async with backend(more_namespaces=("overflow",), quota_timeout=1.0) as sandboxes:
        made = [sandboxes.create(SPEC, f"t-r{number}-a1") for number in range(5)]
        await asyncio.gather(*(one.__aenter__() for one in made))
        with pytest.raises(StageError, match="exceeded quota") as failed:
            async with sandboxes.create(SPEC, "t-r5-a1"):
                raise AssertionError("it cannot have started")
        assert (failed.value.kind, failed.value.retryable) == ("quota", True)
        for one in made:
            await one.__aexit__(None, None, None)


async def test_a_restarted_run_finds_its_pods_in_all_namespaces(two: FakeCluster, backend: Any) -> None:
    async with backend(more_namespaces=("overflow",), lease_seconds=1) as dead:
        made = [dead.create(SPEC, f"t-r{number}-a1") for number in range(5)]
        refs = [(await one.__aenter__()).ref for one in made]
        kept = {str(ref.detail["namespace"]): ref for ref in refs}  # one in each
        await dead._gateway.close()
        for task in asyncio.all_tasks():
            if "_renew" in repr(task.get_coro()):
                task.cancel()
        async with backend(more_namespaces=("overflow",), lease_seconds=1) as heir:
            for one in refs:
                assert one in await heir.list("run-1")
            assert await heir.reap_others("run-1", {ref.attempt_id for ref in kept.values()}) == 3
            assert where(two) == {"rollouts": 1, "overflow": 1}
            await asyncio.sleep(1.5)  # beyond the dead one's leases: the heir renews them before it adopts
            lines = await reap_expired(heir._all, {}, time.time(), False)
            assert len(lines) == 2 and all("left alone" in line for line in lines)
            assert ["rollouts" in lines[0], "overflow" in lines[1]] == [True, True]
            for one in made:
                one.gen.ag_frame.f_locals["sandbox"]._channel._writer.transport.abort()
            for ref in kept.values():
                async with heir.adopt(ref, SPEC) as sandbox:
                    assert await says(sandbox, "x") == b"x"
            assert await heir.reap("run-1") == 0
            assert left(two) == [{}, {}, {}]
        for one in made:
            await one.__aexit__(None, None, None)


async def test_a_pod_in_a_namespace_that_is_named_no_longer_is_not_adopted(two: FakeCluster, backend: Any) -> None:
    two.registry.create(QUOTAS, "rollouts", {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    async with backend(more_namespaces=("overflow",)) as dead, dead.create(SPEC, "t-r0-a1") as sandbox:
        assert sandbox.ref.detail["namespace"] == "overflow"
        async with backend() as heir:
            with pytest.raises(StageError, match="names no longer") as failed:
                async with heir.adopt(sandbox.ref, SPEC):
                    raise AssertionError("it cannot be known")
            assert failed.value.kind == "not_adopted"


async def test_missing_rights_in_the_next_namespace_are_said(two: FakeCluster, backend: Any) -> None:
    rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    token = two.access.add("orchestrator", [rule], namespace="rollouts")
    async with backend(token=token, more_namespaces=("overflow",)) as sandboxes:
        made = [sandboxes.create(SPEC, f"t-r{number}-a1") for number in range(2)]
        await asyncio.gather(*(one.__aenter__() for one in made))
        with pytest.raises(StageError, match="in namespace overflow") as failed:
            async with sandboxes.create(SPEC, "t-r2-a1"):
                raise AssertionError("it cannot have started")
        assert (failed.value.kind, failed.value.retryable) == ("api_refused", False)
        for one in made:
            await one.__aexit__(None, None, None)


@pytest.mark.parametrize("more", [(), ("overflow",)], ids=["one-namespace", "two"])
async def test_a_pod_whose_creation_was_not_answered_fills_the_quota_itself(
    two: FakeCluster, backend: Any, more: tuple[str, ...]
) -> None:
    """A server looks at quotas before it sees that the name is taken: the repeated request is told 403, not 409."""
    two.registry.create(QUOTAS, "rollouts", {"metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}})
    two.scenarios.attach("create-conflict")
    async with (
        backend(more_namespaces=more, quota_timeout=5.0) as sandboxes,
        asyncio.timeout(4),
        sandboxes.create(SPEC, "t-r0-a1") as sandbox,
    ):
        assert await says(sandbox, "x") == b"x"
        assert where(two) == {"rollouts": 1}
    assert two.counts.answers[403] == 1


@pytest.mark.parametrize(
    ("namespace", "more"), [("", ("a", "a")), ("a", ("a",)), ("a", ("",))], ids=["twice", "the-default", "nameless"]
)
def test_namespaces_are_named_once(namespace: str, more: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="more_namespaces"):
        KubernetesOptions(namespace=namespace, more_namespaces=more)


async def test_the_contexts_own_namespace_is_no_further_one(backend: Any) -> None:
    with pytest.raises(ConfigError, match="more_namespaces names rollouts"):
        async with backend(more_namespaces=("rollouts",)):
            raise AssertionError("it cannot have opened")
