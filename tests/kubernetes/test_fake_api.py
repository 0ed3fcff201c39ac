"""The fake API server's rules, asked over plain HTTP. Values are those that the API documents or a real one gave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, NodeSpec, ProgramContext

from .kubectl import Kubectl, config_map, kubectl, pod


async def forever(context: ProgramContext) -> int:
    await asyncio.Event().wait()
    return 0


@pytest.fixture
async def cluster() -> AsyncGenerator[FakeCluster]:
    options = ClusterOptions(
        clock=Clock(cluster=0.02, promised=0.1),
        images={"*": Image(program=forever)},
        namespaces=["other"],
        nodes=[NodeSpec(name="node-0")],
    )
    async with FakeCluster(options) as cluster:
        yield cluster


@pytest.fixture
async def api(cluster: FakeCluster) -> AsyncGenerator[Kubectl]:
    async with kubectl(cluster) as client:
        yield client


async def test_a_new_object_has_uid_version_and_time(api: Kubectl) -> None:
    first = (await api.create("configmaps", config_map("a")))["metadata"]
    second = (await api.create("configmaps", config_map("b")))["metadata"]
    assert len(first["uid"]) == 36 and first["uid"] != second["uid"]
    assert int(second["resourceVersion"]) > int(first["resourceVersion"])
    assert first["creationTimestamp"].endswith("Z") and first["namespace"] == "default"
    assert (await api.list("configmaps"))["kind"] == "ConfigMapList"


async def test_generate_name_makes_names(api: Kubectl) -> None:
    made = [await api.create("configmaps", {"metadata": {"generateName": "run-"}}) for _ in range(3)]
    names = {one["metadata"]["name"] for one in made}
    assert len(names) == 3 and all(name.startswith("run-") and len(name) == 9 for name in names)


async def test_a_duplicate_is_409_already_exists(api: Kubectl) -> None:
    await api.create("configmaps", config_map("a"))
    answer = await api.create("configmaps", config_map("a"), expect=409)
    assert answer["reason"] == "AlreadyExists" and answer["message"] == 'configmaps "a" already exists'
    assert answer["details"] == {"name": "a", "kind": "configmaps"} and answer["code"] == 409


async def test_what_is_not_there_is_404(api: Kubectl) -> None:
    answer = await api.get("pods", "x", expect=404)
    assert (answer["reason"], answer["message"]) == ("NotFound", 'pods "x" not found')
    answer = await api.get("leases", "x", expect=404)
    assert answer["message"] == 'leases.coordination.k8s.io "x" not found'
    api.namespace = "nowhere"
    answer = await api.create("configmaps", config_map("a"), expect=404)
    assert answer["message"] == 'namespaces "nowhere" not found'
    status, answer = await api.ask("GET", "/api/v1/nonsense")
    assert status == 404 and answer["message"] == "the server could not find the requested resource"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"metadata": {"name": "Upper"}}, "metadata.name"),
        ({"metadata": {"name": "a" * 254}}, "metadata.name"),
        ({"metadata": {"name": "a", "labels": {"run": "x" * 64}}}, "metadata.labels"),
        ({"spec": {"restartPolicy": "Never"}}, "spec.containers"),
        ({"spec": {"restartPolicy": "Never", "containers": [{"name": "main"}]}}, "spec.containers[0].image"),
    ],
)
async def test_an_invalid_pod_is_422_and_names_the_field(api: Kubectl, change: dict[str, Any], field: str) -> None:
    answer = await api.create("pods", {**pod("p"), **change}, expect=422)
    assert answer["reason"] == "Invalid"
    assert [cause["field"] for cause in answer["details"]["causes"]] == [field]


async def test_a_pod_gets_the_server_s_defaults(api: Kubectl) -> None:
    made = (await api.create("pods", pod("p", container={"resources": {"limits": {"memory": "1Gi"}}})))["spec"]
    container = made["containers"][0]
    assert container["imagePullPolicy"] == "IfNotPresent"  # a tag that is not :latest
    assert container["terminationMessagePath"] == "/dev/termination-log"
    assert container["resources"]["requests"] == {"memory": "1Gi"}  # a limit is the request where none is given
    assert {one["key"]: one["tolerationSeconds"] for one in made["tolerations"]} == {
        "node.kubernetes.io/not-ready": 300,
        "node.kubernetes.io/unreachable": 300,
    }
    assert "volumes" not in made  # automountServiceAccountToken: false
    body = pod("q", image="busybox")
    del body["spec"]["automountServiceAccountToken"]
    made = (await api.create("pods", body))["spec"]
    assert made["containers"][0]["imagePullPolicy"] == "Always"
    mount = made["containers"][0]["volumeMounts"][0]
    assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("run=1", ["a", "b"]),
        ("run==1,env!=x", ["b"]),
        ("env!=x", ["b", "c"]),  # what lacks the label is unequal
        ("run in (2, 3)", ["c"]),
        ("run notin (1)", ["c"]),
        ("env", ["a", "b"]),
        ("!env", ["c"]),
        ("run in (1),env=x", ["a"]),
    ],
)
async def test_label_selectors(api: Kubectl, selector: str, found: list[str]) -> None:
    for name, labels in {"a": {"run": "1", "env": "x"}, "b": {"run": "1", "env": "y"}, "c": {"run": "2"}}.items():
        await api.create("configmaps", config_map(name, labels=labels))
    assert await api.names("configmaps", labelSelector=selector) == found


async def test_field_selectors(api: Kubectl) -> None:
    for name in ("a", "b"):
        await api.create("pods", pod(name))
    assert await api.names("pods", fieldSelector="metadata.name=a") == ["a"]
    await api.follow("a", lambda body: body["status"]["phase"] == "Running")
    await api.follow("b", lambda body: body["status"]["phase"] == "Running")
    assert await api.names("pods", fieldSelector="status.phase!=Running") == []
    assert await api.names("pods", fieldSelector="spec.nodeName=node-0,status.phase=Running") == ["a", "b"]
    status, answer = await api.ask("GET", api.path("pods"), fieldSelector="spec.hostname=a")
    assert status == 400 and answer["message"] == "field label not supported: spec.hostname"
    status, answer = await api.ask("GET", api.path("pods"), labelSelector="a b")
    assert status == 400


async def test_lists_come_in_pages(api: Kubectl, cluster: FakeCluster) -> None:
    for number in range(5):
        await api.create("configmaps", config_map(f"c{number}"))
    first = await api.list("configmaps", limit="2")
    assert [one["metadata"]["name"] for one in first["items"]] == ["c0", "c1"]
    assert first["metadata"]["remainingItemCount"] == 3
    token = first["metadata"]["continue"]
    second = await api.list("configmaps", limit="4", **{"continue": token})
    assert [one["metadata"]["name"] for one in second["items"]] == ["c2", "c3", "c4"]
    assert "continue" not in second["metadata"]
    await api.create("configmaps", config_map("later"))
    cluster.compact()
    status, answer = await api.ask("GET", api.path("configmaps"), **{"continue": token})
    assert (status, answer["reason"]) == (410, "Expired")


async def test_an_update_from_an_old_version_is_a_conflict(api: Kubectl) -> None:
    made = await api.create("leases", {"metadata": {"name": "run"}, "spec": {"holderIdentity": "me"}})
    stolen = {**made, "spec": {"holderIdentity": "you"}}
    status, after = await api.ask("PUT", api.path("leases", "run"), stolen)
    assert status == 200 and after["spec"]["holderIdentity"] == "you"
    status, answer = await api.ask("PUT", api.path("leases", "run"), {**made, "spec": {"holderIdentity": "me"}})
    assert (status, answer["reason"]) == (409, "Conflict")
    assert "the object has been modified; please apply your changes to the latest version" in answer["message"]
    status, same = await api.ask("PUT", api.path("leases", "run"), after)
    assert same["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]  # nothing was changed


async def test_patches(api: Kubectl) -> None:
    await api.create("configmaps", config_map("a", {"x": "1", "y": "2"}))
    path = api.path("configmaps", "a")
    merge = {"data": {"x": None, "z": "3"}}
    status, after = await api.ask("PATCH", path, merge, content="application/merge-patch+json")
    assert status == 200 and after["data"] == {"y": "2", "z": "3"}
    steps = [{"op": "test", "path": "/data/y", "value": "2"}, {"op": "replace", "path": "/data/y", "value": "9"}]
    status, after = await api.ask("PATCH", path, steps, content="application/json-patch+json")
    assert status == 200 and after["data"]["y"] == "9"
    assert (await api.ask("PATCH", path, steps, content="application/json-patch+json"))[0] == 422
    strategic = {"metadata": {"finalizers": ["a/b"]}}
    for _ in range(2):
        status, after = await api.ask("PATCH", path, strategic, content="application/strategic-merge-patch+json")
        assert after["metadata"]["finalizers"] == ["a/b"]
    assert (await api.ask("PATCH", path, merge, content="application/json"))[0] == 415
    status, _ = await api.ask(
        "PATCH", path, {"metadata": {"resourceVersion": "1"}}, content="application/merge-patch+json"
    )
    assert status == 409


async def test_status_is_changed_only_by_its_own_path(api: Kubectl) -> None:
    await api.create("jobs", {"metadata": {"name": "j"}, "spec": {"parallelism": 0}})
    merge = {"status": {"failed": 2}, "spec": {"parallelism": 5}}
    _, after = await api.ask("PATCH", api.path("jobs", "j") + "/status", merge, content="application/merge-patch+json")
    assert after["status"]["failed"] == 2 and after["spec"] == {"parallelism": 0}


async def test_a_pod_s_spec_is_fixed(api: Kubectl) -> None:
    await api.create("pods", pod("p"))
    merge = {"spec": {"nodeName": "elsewhere"}}
    status, answer = await api.ask("PATCH", api.path("pods", "p"), merge, content="application/merge-patch+json")
    assert (status, answer["reason"]) == (422, "Invalid")
    merge = {"metadata": {"labels": {"adopted": "yes"}}}
    status, after = await api.ask("PATCH", api.path("pods", "p"), merge, content="application/merge-patch+json")
    assert status == 200 and after["metadata"]["labels"] == {"app": "x", "adopted": "yes"}


async def test_dry_run_changes_nothing(api: Kubectl) -> None:
    await api.create("configmaps", config_map("a"), dryRun="All")
    assert await api.names("configmaps") == []
    await api.create("configmaps", config_map("A"), expect=422, dryRun="All")
    await api.create("configmaps", config_map("a"))
    await api.delete("configmaps", "a", dryRun="All")
    assert await api.names("configmaps") == ["a"]


async def test_a_quota_is_403_even_for_a_duplicate(api: Kubectl) -> None:
    hard = {"pods": "2", "requests.memory": "1Gi"}
    await api.create("resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": hard}})
    resources = {"resources": {"requests": {"memory": "400Mi"}}}
    answer = await api.create("pods", pod("p0"), expect=403)
    assert "must specify requests.memory for: main" in answer["message"]
    for name in ("p0", "p1"):
        await api.create("pods", pod(name, container=resources))
    answer = await api.create("pods", pod("p0", container=resources), expect=403)
    assert answer["reason"] == "Forbidden"
    assert answer["message"].startswith('pods "p0" is forbidden: exceeded quota: q, requested: pods=1')
    assert "used: pods=2" in answer["message"] and "limited: pods=2" in answer["message"]
    assert (await api.get("resourcequotas", "q"))["status"]["used"]["pods"] == "2"
    await api.delete("pods", "p0", gracePeriodSeconds="0")
    await api.create("pods", pod("p2", container=resources))


async def test_preconditions_keep_a_successor_safe(api: Kubectl) -> None:
    old = await api.create("configmaps", config_map("a"))
    await api.delete("configmaps", "a")
    await api.create("configmaps", config_map("a"))
    answer = await api.delete("configmaps", "a", {"preconditions": {"uid": old["metadata"]["uid"]}}, expect=409)
    assert answer["reason"] == "Conflict" and "Precondition failed: UID" in answer["message"]
    assert await api.names("configmaps") == ["a"]


async def test_a_finalizer_holds_an_object(api: Kubectl) -> None:
    await api.create("configmaps", config_map("a", finalizers=["x/y"]))
    dying = await api.delete("configmaps", "a")
    assert dying["metadata"]["deletionTimestamp"] and dying["metadata"]["finalizers"] == ["x/y"]
    assert (await api.get("configmaps", "a"))["metadata"]["deletionTimestamp"]
    merge = {"metadata": {"finalizers": None}}
    await api.ask("PATCH", api.path("configmaps", "a"), merge, content="application/merge-patch+json")
    await api.get("configmaps", "a", expect=404)


def owned_by(owner: dict[str, Any]) -> dict[str, Any]:
    named = {"apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"]}
    return {"ownerReferences": [{**named, "uid": owner["metadata"]["uid"]}]}


async def test_what_an_owner_leaves_behind_is_collected(api: Kubectl, cluster: FakeCluster) -> None:
    owner = await api.create("configmaps", config_map("run"))
    for name in ("p0", "p1"):
        await api.create("pods", pod(name, metadata=owned_by(owner)))
        await api.follow(name, lambda body: body["status"]["phase"] == "Running")
    await api.create("secrets", {"metadata": {"name": "s", **owned_by(owner)}})
    await api.create("pods", pod("stranger"))
    await api.delete("configmaps", "run")
    for plural, name in (("pods", "p0"), ("pods", "p1"), ("secrets", "s")):
        await api.until_gone(plural, name)
    assert await api.names("pods") == ["stranger"]
    # and what names an owner that was never there does not stay
    ghost = {"metadata": {"name": "ghost", "uid": "00000000-0000-0000-0000-000000000000"}}
    await api.create("configmaps", config_map("orphan", **owned_by(ghost)))
    await api.until_gone("configmaps", "orphan")


async def test_foreground_waits_and_orphan_leaves(api: Kubectl) -> None:
    owner = await api.create("configmaps", config_map("run"))
    await api.create("pods", pod("p", metadata=owned_by(owner)))
    await api.follow("p", lambda body: body["status"]["phase"] == "Running")
    dying = await api.delete("configmaps", "run", propagationPolicy="Foreground")
    assert dying["metadata"]["finalizers"] == ["foregroundDeletion"]
    await api.until_gone("configmaps", "run")
    assert await api.names("pods") == []
    owner = await api.create("configmaps", config_map("run"))
    await api.create("configmaps", config_map("kept", **owned_by(owner)))
    await api.delete("configmaps", "run", {"propagationPolicy": "Orphan"})
    await api.until_gone("configmaps", "run")
    await asyncio.sleep(0.1)
    assert (await api.get("configmaps", "kept"))["metadata"]["ownerReferences"] == []


async def test_a_namespace_takes_its_content_with_it(api: Kubectl) -> None:
    api.namespace = "other"
    await api.create("configmaps", config_map("a"))
    await api.delete("namespaces", "other")
    await api.create("configmaps", config_map("b"), expect=403)
    await api.until_gone("namespaces", "other")


async def test_delete_collection_takes_a_selector(api: Kubectl) -> None:
    for name, run in (("a", "1"), ("b", "1"), ("c", "2")):
        await api.create("pods", pod(name, labels={"run": run}))
    status, answer = await api.ask("DELETE", api.path("pods"), labelSelector="run=1", gracePeriodSeconds="0")
    assert status == 200 and [one["metadata"]["name"] for one in answer["items"]] == ["a", "b"]
    assert await api.names("pods") == ["c"]


async def test_tokens_may_do_what_their_rules_say(api: Kubectl, cluster: FakeCluster) -> None:
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["mine"], "verbs": ["get"]},
    ]
    token = cluster.access.add("system:serviceaccount:default:runner", rules, namespace="default")
    await api.create("configmaps", config_map("mine"))
    await api.create("configmaps", config_map("other"))
    async with kubectl(cluster, token) as runner:
        await runner.create("pods", pod("p"))
        assert await runner.names("pods") == ["p"]
        await runner.get("configmaps", "mine")
        answer = await runner.get("configmaps", "other", expect=403)
        assert answer["message"] == (
            'configmaps "other" is forbidden: User "system:serviceaccount:default:runner" cannot get resource '
            '"configmaps" in API group "" in the namespace "default"'
        )
        await runner.get("pods", "p", expect=403)
        await runner.delete("pods", "p", expect=403)
        assert (await runner.ask("GET", runner.path("pods", "p") + "/log"))[0] == 403
        runner.namespace = "other"
        await runner.create("pods", pod("p"), expect=403)
        runner.namespace = "default"
        for verb, allowed in (("create", True), ("delete", False)):
            attributes = {"namespace": "default", "verb": verb, "resource": "pods"}
            path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            status, review = await runner.ask("POST", path, {"spec": {"resourceAttributes": attributes}})
            assert status == 201 and review["status"]["allowed"] is allowed
        assert (await runner.ask("GET", "/version"))[1]["gitVersion"] == "v1.36.2"
    async with kubectl(cluster, "wrong") as stranger:
        status, answer = await stranger.ask("GET", stranger.path("pods"))
        assert (status, answer["reason"]) == (401, "Unauthorized")
        assert await stranger.ask("GET", "/readyz") == (200, "ok")


async def test_throttling_is_text_with_retry_after_and_spares_masters(api: Kubectl, cluster: FakeCluster) -> None:
    everything = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    token = cluster.access.add("someone", everything)
    cluster.faults.throttle_rate = 1.0
    await api.list("pods")
    async with kubectl(cluster, token) as someone, someone.session.get(someone.path("pods")) as response:
        assert response.status == 429 and response.headers["Retry-After"] == "1"
        assert response.content_type == "text/plain"
        assert await response.text() == "Too many requests, please try again later.\n"
    cluster.faults.throttle_rate, cluster.faults.most_in_flight, cluster.faults.latency = 0.0, 2, 0.0
    async with kubectl(cluster, token) as someone:
        answers = await asyncio.gather(*(someone.ask("POST", someone.path("pods"), pod(f"p{n}")) for n in range(30)))
    assert {status for status, _ in answers} <= {201, 429}


async def test_network_policies_can_be_checked(api: Kubectl, cluster: FakeCluster) -> None:
    ports = [{"name": "data", "containerPort": 8000}]
    await api.create("pods", pod("rollout", labels={"part": "rollout"}))
    await api.create("pods", pod("proxy", labels={"part": "proxy"}, container={"ports": ports}))
    await api.create("pods", pod("bystander"))
    home, away = api.namespace, "other"
    api.namespace = away
    await api.create("pods", pod("proxy", labels={"part": "proxy"}))
    api.namespace = home

    def reachable(source: str, target: tuple[str, str] | str, port: int = 8000) -> bool:
        return cluster.reachable((home, source), target, port)

    async def policy(name: str, **spec: Any) -> None:
        await api.create("networkpolicies", {"metadata": {"name": name}, "spec": spec})

    assert reachable("rollout", (home, "bystander")) and reachable("rollout", "203.0.113.1")  # nothing is said yet
    await policy("deny", podSelector={}, policyTypes=["Ingress", "Egress"])
    assert not reachable("rollout", (home, "proxy")) and not reachable("rollout", "203.0.113.1")
    rollouts = {"matchLabels": {"part": "rollout"}}
    proxies = {"matchExpressions": [{"key": "part", "operator": "In", "values": ["proxy"]}]}
    out = {"to": [{"podSelector": proxies}], "ports": [{"port": 8000}]}
    await policy("out", podSelector=rollouts, policyTypes=["Egress"], egress=[out])
    assert not reachable("rollout", (home, "proxy"))  # the proxy's side is still closed
    into = {"from": [{"podSelector": rollouts}], "ports": [{"port": "data"}]}
    await policy("in", podSelector=proxies, ingress=[into])
    assert reachable("rollout", (home, "proxy"))
    assert not reachable("rollout", (home, "proxy"), 8001)
    assert not reachable("rollout", (away, "proxy"))  # a podSelector alone means the policy's own namespace
    assert not reachable("bystander", (home, "proxy")) and not reachable("rollout", (home, "bystander"))
    block = {"to": [{"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.9/32"]}}]}
    anywhere = {"to": [{"namespaceSelector": {}, "podSelector": proxies}]}
    await policy("wide", podSelector=rollouts, policyTypes=["Egress"], egress=[block, anywhere])
    assert reachable("rollout", "203.0.113.1", 443) and not reachable("rollout", "203.0.113.9", 443)
    assert reachable("rollout", (away, "proxy"))


async def test_the_calls_are_counted(api: Kubectl, cluster: FakeCluster) -> None:
    await api.create("pods", pod("p"))
    await api.list("pods")
    await api.ask("GET", api.path("pods", "p") + "/log")
    await api.delete("pods", "p", gracePeriodSeconds="0")
    await api.get("pods", "p", expect=404)
    assert cluster.counts.of() == {
        "create pods": 1,
        "delete pods": 1,
        "get pods": 1,
        "get pods/log": 1,
        "list pods": 1,
    }
    assert cluster.counts.answers[404] == 1
