"""Attempts that claim pods of an agent-sandbox pool, with its controllers played by the fake cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import yaml

from openforgerl.errors import ConfigError, StageError
from openforgerl.sandboxes import SandboxOptions
from openforgerl.sandboxes.kubernetes import manifests
from openforgerl.sandboxes.kubernetes.access import find_access
from openforgerl.sandboxes.kubernetes.claims import CLAIM, CLAIM_DIRECTORY, RUN_LABEL, TEMPLATE, warm_pool
from openforgerl.sandboxes.kubernetes.claims import POOL as POOL_KIND
from openforgerl.sandboxes.kubernetes.cluster import CONFIG_MAP, POD
from openforgerl.sandboxes.kubernetes.diagnosis import examine
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.sandboxes.kubernetes.manifests import Boarding
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.testing.fake_kubernetes import FakeCluster, warmpools
from openforgerl.testing.fake_kubernetes.kinds import (
    CLAIMS,
    CONFIG_MAPS,
    PODS,
    POLICIES,
    SANDBOXES,
    TEMPLATES,
    WARM_POOLS,
)
from openforgerl.types import SandboxSpec

NAMESPACE, POOL = "rollouts", "warm"
_spec = importlib.util.spec_from_file_location("attacks_on_rewards", Path(__file__).with_name("test_attacks.py"))
assert _spec is not None and _spec.loader is not None
attacks: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(attacks)

SPEC = SandboxSpec(run_id="run-1", endpoint=("127.0.0.1", 8080), endpoint_host="127.0.0.1")
OPTIONS: dict[str, Any] = {"image": "system:1", "grace": 1, "lost_node_timeout": 0.5}


def rules_of(folder: str) -> list[dict[str, Any]]:
    """The rules of the Role in a folder of `deploy/`."""
    text = (Path(__file__).parents[2] / "deploy" / "kubernetes" / folder / "rbac.yaml").read_text()
    return [rule for one in yaml.safe_load_all(text) if one["kind"] == "Role" for rule in one["rules"]]


def apply(fake: FakeCluster, replicas: int, **changes: Any) -> None:
    """What `openforgerl images warm-pool` prints, applied."""
    options = KubernetesOptions(**OPTIONS)
    boarding = Boarding(attempt_id="warm-a0", nonce="0", arguments=(), env={}, init_map="init")
    manifest = manifests.pod(SPEC, options, boarding, {"metadata": {"name": "none", "uid": "none"}})
    bundle, template, pool = warm_pool(manifest, manifests.init_bundle(), POOL, replicas)
    template["spec"] |= changes
    for kind, body in ((CONFIG_MAPS, bundle), (TEMPLATES, template), (WARM_POOLS, pool)):
        fake.registry.create(kind, NAMESPACE, body)


async def ready(fake: FakeCluster, count: int) -> None:
    async with asyncio.timeout(20):
        while sum(pod.body["status"].get("phase") == "Running" for pod in fake.objects.list(PODS)) < count:
            await fake.objects.news(PODS).wait()


def idle(fake: FakeCluster) -> set[str]:
    """Names of the pool's pods that nobody has claimed."""
    return {pod.key[1] for pod in fake.objects.list(PODS) if RUN_LABEL not in pod.body["metadata"]["labels"]}


@pytest.fixture
async def warm(fake: FakeCluster, backend: Any) -> AsyncGenerator[Any]:
    """`warm()`: a backend that claims. At the end nothing is left but the pool."""

    def opened(**options: Any) -> Any:
        return backend(warm_pool=POOL, **OPTIONS, **options)

    yield opened
    await asyncio.sleep(0.2)
    assert fake.objects.list(CLAIMS) == []


@pytest.mark.sandbox
async def test_an_attempt_gets_a_pod_that_runs_already(fake: FakeCluster, warm: Any) -> None:
    apply(fake, 2)
    await ready(fake, 2)
    before = idle(fake)
    async with warm() as sandboxes:
        async with sandboxes.create(SPEC, "t-r0-a1") as sandbox:
            (given,) = before - idle(fake)
            (claim,) = fake.objects.list(CLAIMS)
            assert claim.body["status"]["sandbox"]["name"] == given
            assert sandbox.ref.detail["pod"] == claim.key[1]
            exit = await sandbox.exec(["/bin/sh", "-c", "echo hello; touch x && echo ok"], env={}, timeout=20)
            assert exit.stdout == b"hello\nok\n"
            assert sandbox.report["capabilities"] == "0000000000000000"
            assert [ref.attempt_id for ref in await sandboxes.list("run-1")] == ["t-r0-a1"]
            await ready(fake, 3)  # the pool is filled up again
        assert given not in {pod.key[1] for pod in fake.objects.list(PODS)}
        assert await sandboxes.list("run-1") == []
    assert fake.counts.calls["create", "pods"] == 0  # by us


@pytest.mark.sandbox
async def test_the_credential_that_an_agent_can_read_is_dead(fake: FakeCluster, warm: Any) -> None:
    apply(fake, 1)
    await ready(fake, 1)
    async with warm() as sandboxes, sandboxes.create(SPEC, "t-r0-a1") as sandbox:
        text = f"cat {CLAIM_DIRECTORY}/token; echo; cat {CLAIM_DIRECTORY}/dial; cat /proc/1/environ"
        exit = await sandbox.exec(["/bin/sh", "-c", text], env={}, timeout=20)
        token = exit.stdout.decode().split()[0]
        assert token.startswith("0.") and exit.stderr.count(b"Permission denied") == 1
        reader, writer = await asyncio.open_connection("127.0.0.1", sandboxes._gateway.port)
        words = f"GET /v1/pods/{sandbox.ref.detail['pod']} HTTP/1.1\r\nUpgrade: openforgerl-sandbox\r\n"
        writer.write(f"{words}Authorization: Bearer {token}\r\n\r\n".encode())
        assert b"403" in await reader.readline()
        writer.close()
        assert (await sandbox.exec(["true"], env={}, timeout=20)).code == 0


@pytest.mark.sandbox
async def test_a_pod_that_is_made_anew_for_a_claim_gets_in_no_more(fake: FakeCluster, warm: Any) -> None:
    """agent-sandbox replaces a pod that is gone while its sandbox is there."""
    apply(fake, 1)
    await ready(fake, 1)
    async with warm() as sandboxes:
        with pytest.raises(StageError) as failed:
            async with sandboxes.create(SPEC, "t-r0-a1") as sandbox:
                running = asyncio.create_task(sandbox.exec(["/bin/sleep", "60"], env={}, timeout=60))
                await asyncio.sleep(0.2)
                (claim,) = fake.objects.list(CLAIMS)
                fake.registry.delete(PODS, (NAMESPACE, claim.body["status"]["sandbox"]["name"]))
                await running
        assert failed.value.retryable and failed.value.kind in ("deleted", "killed")
        assert fake.objects.list(CLAIMS) == []
    await fake.settled() if not fake.kubelet.lives else None


@pytest.mark.sandbox
async def test_a_claimed_pod_on_a_lost_node_is_removed_by_force(fake: FakeCluster, warm: Any) -> None:
    fake.scenarios.attach("node-lost", name=f"{POOL}-*", after=100.0)  # 2 s after its start
    apply(fake, 1)
    await ready(fake, 1)
    async with warm() as sandboxes:
        with pytest.raises(StageError) as failed:
            async with sandboxes.create(SPEC, "t-r0-a1") as sandbox:
                await sandbox.exec(["/bin/sleep", "60"], env={}, timeout=60)
        assert failed.value.kind == "node_lost"
        assert fake.objects.list(CLAIMS) == []
        async with asyncio.timeout(10):  # its sandbox may have made another pod, which goes with it
            while await sandboxes.list("run-1"):
                await fake.objects.news(PODS).wait()
    fake.restore_nodes()


async def test_a_claim_that_is_refused_says_why(fake: FakeCluster, warm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a controller whose operator has allowed other domains of labels than the default one."""
    monkeypatch.setattr(warmpools, "ALLOWED_DOMAINS", ("example.com",))
    apply(fake, 0)
    async with warm(schedule_timeout=1.0) as sandboxes:
        with pytest.raises(StageError, match="not in the allowlist") as failed:
            async with sandboxes.create(SPEC, "t-r0-a1"):
                raise AssertionError("it has no pod")
    assert (failed.value.kind, failed.value.retryable) == ("unschedulable", True)


@pytest.mark.sandbox
async def test_an_empty_pool_gives_a_new_pod(fake: FakeCluster, warm: Any) -> None:
    apply(fake, 0)
    async with warm() as sandboxes, sandboxes.create(SPEC, "t-r0-a1") as sandbox:
        assert (await sandbox.exec(["true"], env={}, timeout=20)).code == 0
        (claim,) = fake.objects.list(CLAIMS)
        assert claim.body["status"]["sandbox"]["name"] == claim.key[1]


@pytest.mark.sandbox
async def test_what_does_not_fit_is_made_as_ever(
    fake: FakeCluster, warm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A verifier's pod, which may reach less, and one with another limit, which is said once."""
    apply(fake, 1)
    await ready(fake, 1)
    other = SandboxSpec(run_id="run-1", endpoint=SPEC.endpoint, env={}, workdir="/elsewhere")
    caplog.set_level(logging.WARNING)
    async with warm() as sandboxes:
        for spec, attempt in ((SandboxSpec(run_id="run-1"), "t-r0-a1-verify"), (other, "t-r0-a2"), (other, "t-r0-a3")):
            async with sandboxes.create(spec, attempt) as sandbox:
                assert (await sandbox.exec(["true"], env={}, timeout=20)).code == 0
                assert fake.objects.list(CLAIMS) == [] and len(await sandboxes.list("run-1")) == 1
        assert await sandboxes.list("run-1") == []
    assert len([one for one in caplog.messages if "does not fit" in one]) == 1
    assert len(idle(fake)) == 1


@pytest.mark.sandbox
async def test_a_restarted_process_adopts_and_reaps_claims(fake: FakeCluster, warm: Any) -> None:
    apply(fake, 2)
    await ready(fake, 2)
    async with warm() as dying:
        first, second = dying.create(SPEC, "t-r0-a1"), dying.create(SPEC, "t-r1-a1")
        kept, _ = await first.__aenter__(), await second.__aenter__()
        await dying._gateway.close()
        for sandbox in (kept, _):
            sandbox._channel._writer.transport.abort()
        async with warm() as heir:
            assert {ref.attempt_id for ref in await heir.list("run-1")} == {"t-r0-a1", "t-r1-a1"}
            assert await heir.reap_others("run-1", ["t-r0-a1"]) == 1
            assert [ref.attempt_id for ref in await heir.list("run-1")] == ["t-r0-a1"]
            async with heir.adopt(kept.ref, SPEC) as sandbox:
                assert (await sandbox.exec(["echo", "again"], env={}, timeout=20)).stdout == b"again\n"
            assert await heir.list("run-1") == []


@pytest.mark.sandbox
async def test_the_roles_are_what_a_run_uses_and_no_more(fake: FakeCluster, warm: Any) -> None:
    """Those of `base` and `warm-pool`; of the latter every verb is used. A delete with another uid changes nothing."""
    rules = [rule for folder in ("base", "warm-pool") for rule in rules_of(folder)]
    token = fake.access.add("orchestrator", rules, namespace=NAMESPACE)
    apply(fake, 1)
    await ready(fake, 1)
    async with warm(token=token) as sandboxes:
        async with sandboxes.create(SPEC, "t-r0-a1") as sandbox:
            cluster, name = await sandboxes._connect(), str(sandbox.ref.detail["pod"])
            assert not await cluster.delete(POD, name, uid="another", grace=1)
            assert (await cluster.get(POD, name))["status"]["phase"] == "Running"
            assert (await sandbox.exec(["true"], env={}, timeout=20)).code == 0
        left = sandboxes.create(SPEC, "t-r0-a2")
        await left.__aenter__()
        assert await sandboxes.reap("run-1") == 1
        await left.__aexit__(None, None, None)
    used = {(resource, verb) for verb, resource in fake.counts.calls}
    granted = {(label, verb) for rule in rules_of("warm-pool") for label in rule["resources"] for verb in rule["verbs"]}
    assert granted <= used and 403 not in fake.counts.answers


@pytest.mark.sandbox
async def test_the_runs_end_takes_claims_with_it(fake: FakeCluster, warm: Any) -> None:
    """Whoever deletes the run's ConfigMap, as a reaper that knows nothing of pools does."""
    apply(fake, 1)
    await ready(fake, 1)
    async with warm() as dead:
        await (opened := dead.create(SPEC, "t-r0-a1")).__aenter__()
        (run,) = [one for one in fake.objects.list(CONFIG_MAPS) if one.key[1].startswith("ofrl-run-")]
        fake.registry.delete(CONFIG_MAPS, run.key)
        async with asyncio.timeout(20):
            while fake.objects.list(CLAIMS) or len(fake.objects.list(SANDBOXES)) > 1:
                await fake.objects.news(SANDBOXES).wait()
        await opened.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("applied", "changes", "words"),
    [
        (False, {}, "cannot be read"),
        (True, {"networkPolicyManagement": "Managed"}, "networkPolicyManagement: Unmanaged"),
    ],
)
async def test_a_pool_that_cannot_be_used_is_named(
    fake: FakeCluster, warm: Any, applied: bool, changes: dict[str, Any], words: str
) -> None:
    if applied:
        apply(fake, 0, **changes)
    async with warm() as sandboxes:
        with pytest.raises(ConfigError, match=words):
            async with sandboxes.create(SPEC, "t-r0-a1"):
                raise AssertionError("it cannot be claimed")
    assert fake.objects.list(POLICIES) == []


async def test_doctor_looks_at_the_pool(fake: FakeCluster, tmp_path: Path) -> None:
    kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace=NAMESPACE)
    settings = KubernetesOptions(kubeconfig=str(kubeconfig), warm_pool=POOL, **OPTIONS)
    options = SandboxOptions(kubernetes=settings)

    async def found() -> tuple[bool, str]:
        (check,) = [check async for check in examine(options) if check.check == "warm pool"]
        return check.ok, check.fix

    ok, fix = await found()
    assert not ok and "cannot be read" in fix
    apply(fake, 0)
    assert await found() == (True, "")


@pytest.mark.sandbox
async def test_from_the_printed_pool_to_a_graded_attempt(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands: the pool that is printed for a task is applied, and an evaluation of the task claims its pod."""
    monkeypatch.setenv("KUBECONFIG", str(served))
    settings = [*attacks.SETTINGS, f"sandbox.kubernetes.warm_pool={POOL}"]
    (tmp_path / "pool").mkdir()
    words = [str(Path(sys.executable).with_name("openforgerl")), "images", "warm-pool", "--replicas", "1"]
    words += [str(attacks.attacks.write_task(tmp_path / "pool"))]
    chosen = [*settings, "harness.name=command", 'harness.command.argv=["true"]']
    words += [word for one in chosen for word in ("-s", one)]
    printed = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    out, _ = await printed.communicate()
    cluster = HttpCluster(find_access(str(served), "", {}), NAMESPACE)
    kinds = {kind.kind: kind for kind in (CONFIG_MAP, TEMPLATE, POOL_KIND)}
    try:
        for item in json.loads(out)["items"]:
            await cluster.create(kinds[item["kind"]], item)

        async def pods() -> set[str]:
            found = (await cluster.list(POD)).items
            return {one["metadata"]["name"] for one in found if one["status"].get("phase") == "Running"}

        for _ in range(200):
            if before := await pods():
                break
            await asyncio.sleep(0.1)
        (root := tmp_path / "run").mkdir()
        result = await asyncio.to_thread(
            attacks.attacks.run_program, root, attacks.attacks.HONEST, "kubernetes", *settings
        )
        assert (result["pass_at_1"]["value"], result["failed"]) == (1.0, 0)
        for _ in range(200):
            if (after := await pods()) and not after & before:
                break
            await asyncio.sleep(0.1)
        assert len(before) == len(after) == 1 and before != after  # it was used, and another has come
        assert (await cluster.list(CLAIM)).items == []
    finally:
        await cluster.close()
