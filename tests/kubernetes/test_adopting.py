"""Sandboxes that a killed orchestrator was about to remove: what becomes of them is that kill's doing, not a fault."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from openforgerl.errors import StageError
from openforgerl.sandboxes.kubernetes.backend import KubernetesSandboxes
from openforgerl.sandboxes.kubernetes.cluster import POD
from openforgerl.sandboxes.sandbox import LiveSandbox
from openforgerl.testing.fake_kubernetes import FakeCluster
from openforgerl.testing.fake_kubernetes.kinds import PODS
from openforgerl.types import Origin, SandboxRef, SandboxSpec

SPEC = SandboxSpec(run_id="run-1")


async def begun(dying: KubernetesSandboxes) -> LiveSandbox:
    """A sandbox whose process will do nothing more for it."""
    opened = dying.create(SPEC, "t-r0-a1")
    sandbox = await opened.__aenter__()
    dying.kept = opened  # type: ignore[attr-defined]  # collected, it would close what it has opened
    return sandbox


async def refused(heir: KubernetesSandboxes, ref: SandboxRef) -> StageError:
    with pytest.raises(StageError) as failed:
        async with heir.adopt(ref, SPEC):
            raise AssertionError("it cannot be taken over")
    return failed.value


async def phase(fake: FakeCluster, wanted: str) -> None:
    """Until the only pod has that phase."""
    async with asyncio.timeout(20):
        while fake.objects.list(PODS)[0].body["status"]["phase"] != wanted:
            await fake.objects.news(PODS).wait()


async def test_an_init_that_was_sent_away_already(fake: FakeCluster, backend: Any) -> None:
    """The attempt was over and not yet committed: the door was closed, the pod not yet deleted."""
    async with backend() as dying:
        sandbox = await begun(dying)
        assert dying._gateway is not None
        dying._gateway.forget(str(sandbox.ref.detail["pod"]))
        sandbox._channel._writer.transport.abort()  # type: ignore[attr-defined]
        await phase(fake, "Succeeded")
        async with backend() as heir:
            error = await refused(heir, sandbox.ref)
            assert (error.kind, error.origin, error.retryable) == ("not_adopted", Origin.INFRASTRUCTURE, True)
            assert "sent away" in error.message and error.__cause__ is not None
        assert fake.objects.list(PODS) == []


async def test_a_pod_whose_deletion_had_begun(fake: FakeCluster, backend: Any) -> None:
    async with backend(grace=2) as dying:
        sandbox = await begun(dying)
        cluster = await dying._connect()
        name, uid = str(sandbox.ref.detail["pod"]), str(sandbox.ref.detail["uid"])
        await cluster.delete(POD, name, uid=uid, grace=2)
        async with backend(grace=2) as heir:
            error = await refused(heir, sandbox.ref)
            assert error.kind == "not_adopted" and "deleted" in error.message
        assert fake.objects.list(PODS) == []


async def test_what_broke_while_nobody_looked_keeps_its_name(fake: FakeCluster, backend: Any) -> None:
    fake.scenarios.attach("oom", after=20.0)  # 0.4 s after its start
    async with backend() as dying:
        sandbox = await begun(dying)
        await phase(fake, "Failed")
        async with backend() as heir:
            assert (await refused(heir, sandbox.ref)).kind == "oom"
