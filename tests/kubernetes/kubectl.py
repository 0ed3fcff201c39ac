"""A client of a few lines, so that the fake is asked by what was not written for it: plain HTTP and JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from openforgerl.testing.fake_kubernetes import FakeCluster

Object = dict[str, Any]


def pod(name: str, *command: str, image: str = "busybox:1", **spec: Any) -> Object:
    """A bare pod with one container `main`; `container` adds to that, everything else to the spec."""
    container = {"name": "main", "image": image, **spec.pop("container", {})}
    container |= {"command": list(command)} if command else {}
    return {
        "metadata": {"name": name, "labels": spec.pop("labels", {"app": "x"}), **spec.pop("metadata", {})},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [container],
            **spec,
        },
    }


def config_map(name: str, data: dict[str, str] | None = None, **metadata: Any) -> Object:
    return {"metadata": {"name": name, **metadata}, "data": data or {}}


class Kubectl:
    """One namespace of a cluster."""

    def __init__(self, session: aiohttp.ClientSession, namespace: str) -> None:
        self.session = session
        self.namespace = namespace

    def path(self, plural: str, name: str = "") -> str:
        roots = {
            "leases": "/apis/coordination.k8s.io/v1",
            "networkpolicies": "/apis/networking.k8s.io/v1",
            "jobs": "/apis/batch/v1",
            "sandboxclaims": "/apis/extensions.agents.x-k8s.io/v1beta1",
            "sandboxtemplates": "/apis/extensions.agents.x-k8s.io/v1beta1",
            "sandboxwarmpools": "/apis/extensions.agents.x-k8s.io/v1beta1",
        }
        where = "" if plural in ("nodes", "namespaces") else f"/namespaces/{self.namespace}"
        return f"{roots.get(plural, '/api/v1')}{where}/{plural}" + (f"/{name}" if name else "")

    async def ask(
        self, method: str, path: str, body: Any = None, *, content: str = "application/json", **query: str
    ) -> tuple[int, Any]:
        """(status, body), the body decoded when it is JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content} if data else {}
        async with self.session.request(method, path, data=data, params=query, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def create(self, plural: str, body: Object, expect: int = 201, **query: str) -> Object:
        status, answer = await self.ask("POST", self.path(plural), body, **query)
        assert status == expect, answer
        return answer

    async def get(self, plural: str, name: str, expect: int = 200) -> Object:
        status, answer = await self.ask("GET", self.path(plural, name))
        assert status == expect, answer
        return answer

    async def list(self, plural: str, **query: str) -> Object:
        status, answer = await self.ask("GET", self.path(plural), **query)
        assert status == 200, answer
        return answer

    async def names(self, plural: str, **query: str) -> list[str]:
        return [item["metadata"]["name"] for item in (await self.list(plural, **query))["items"]]

    async def delete(
        self, plural: str, name: str, body: Object | None = None, expect: int = 200, **query: str
    ) -> Object:
        status, answer = await self.ask("DELETE", self.path(plural, name), body, **query)
        assert status == expect, answer
        return answer

    async def version(self, plural: str = "pods") -> str:
        return (await self.list(plural))["metadata"]["resourceVersion"]

    async def watch(self, plural: str = "pods", **query: str) -> AsyncGenerator[Object]:
        """Events until the stream ends."""
        params = {"watch": "true", **query}
        timeout = aiohttp.ClientTimeout(total=None)
        async with self.session.get(self.path(plural), params=params, timeout=timeout) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                yield json.loads(line)

    async def follow(self, name: str, until: Callable[[Object], bool], timeout: float = 10.0) -> list[Object]:
        """The pod's states as a watch shows them, up to the first for which `until` holds; DELETED ends it too."""
        seen: list[Object] = []
        async with asyncio.timeout(timeout):
            async for event in self.watch(fieldSelector=f"metadata.name={name}"):
                assert event["type"] != "ERROR", event
                seen.append(event["object"] | {"_event": event["type"]})
                if event["type"] == "DELETED" or until(event["object"]):
                    return seen
        raise AssertionError(f"the watch of {name} ended")

    async def until_gone(self, plural: str, name: str, timeout: float = 10.0) -> float:
        """Seconds until it answers 404."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.timeout(timeout):
            while (await self.ask("GET", self.path(plural, name)))[0] != 404:  # noqa: ASYNC110 - no watch: 404 is meant
                await asyncio.sleep(0.01)
        return loop.time() - started


@asynccontextmanager
async def kubectl(cluster: FakeCluster, token: str = "", namespace: str = "default") -> AsyncGenerator[Kubectl]:
    headers = {"Authorization": f"Bearer {token or cluster.token}"}
    async with aiohttp.ClientSession(cluster.url, headers=headers) as session:
        yield Kubectl(session, namespace)


async def eventually(holds: Callable[[], bool], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not holds():  # noqa: ASYNC110 - it is a condition of another's state
            await asyncio.sleep(0.01)


def ended(body: Object) -> bool:
    return body["status"]["phase"] in ("Succeeded", "Failed")


def state(body: Object) -> tuple[str, Object]:
    """(`waiting`, its fields) of the pod's first container; (``, {}) before the kubelet has it."""
    statuses = body["status"].get("containerStatuses")
    return next(iter(statuses[0]["state"].items())) if statuses else ("", {})


def condition(body: Object, kind: str) -> Object:
    return next((one for one in body["status"].get("conditions", []) if one["type"] == kind), {})
