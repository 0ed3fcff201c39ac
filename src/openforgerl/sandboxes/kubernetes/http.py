"""The door to the API server: `cluster.Cluster` over plain JSON requests (decision note 7)."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp

from openforgerl.sandboxes.kubernetes.access import Access
from openforgerl.sandboxes.kubernetes.cluster import POD, ClusterError, Event, Kind, Listing, Object

log = logging.getLogger(__name__)

_CALL_TIMEOUT = 30.0
_PAGE = 500
_LINE_LIMIT = 4 << 20
"""Longest line of a watch, in bytes; etcd holds no object above 1.5 MB."""


class HttpCluster:
    """`Cluster`. Requests that may succeed later are repeated `tries` times, as the server's Retry-After asks."""

    def __init__(
        self, access: Access, namespace: str = "", *, at_once: int = 40, tries: int = 6, first_pause: float = 0.25
    ) -> None:
        self._access = access
        self._namespace = namespace or access.namespace
        self._tries = tries
        self._first_pause = first_pause
        self._places = asyncio.Semaphore(at_once)
        self._session: aiohttp.ClientSession | None = None
        self._first: HttpCluster | None = None

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def server(self) -> str:
        return self._access.server

    def beside(self, namespace: str) -> HttpCluster:
        """Shares session, places and access; `close` of it does nothing."""
        other = HttpCluster(self._access, namespace, tries=self._tries, first_pause=self._first_pause)
        other._places = self._places
        other._first = self._first or self
        return other

    async def version(self) -> str:
        """`gitVersion`."""
        answer = await self._call("GET", "/version")
        return str(answer["gitVersion"])

    async def create(self, kind: Kind, manifest: Object, *, dry_run: bool = False) -> Object:
        """POST. A repeat after a lost answer says AlreadyExists; whose object that is, the caller must see."""
        query = {"dryRun": "All"} if dry_run else {}
        return await self._call("POST", self._path(kind), query=query, body=_whole(kind, manifest))

    async def get(self, kind: Kind, name: str) -> Object:
        """GET."""
        return await self._call("GET", self._path(kind, name))

    async def list(self, kind: Kind, *, labels: str = "", fields: str = "") -> Listing:
        """All pages of a list, in one version."""
        query = {"limit": str(_PAGE)} | _given(labelSelector=labels, fieldSelector=fields)
        items: list[Object] = []
        while True:
            page = await self._call("GET", self._path(kind), query=query)
            items += page.get("items") or ()
            metadata: Object = page["metadata"]
            if not metadata.get("continue"):
                return Listing(items, str(metadata["resourceVersion"]))
            query = {**query, "continue": str(metadata["continue"])}

    async def watch(self, kind: Kind, *, labels: str, resource_version: str, seconds: float) -> AsyncGenerator[Event]:
        """Lines of a watch. The read timeout is ours and longer than the server's: a dead connection is noticed."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(max(1, round(seconds))),
        } | _given(labelSelector=labels)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CALL_TIMEOUT, sock_read=seconds + 15)
        try:
            request = self._open().get(
                self._access.server + self._path(kind), params=query, headers=await self._headers(), timeout=timeout
            )
            async with request as response:
                if response.status != 200:
                    raise await _refusal(response)
                async with aclosing(_lines(response.content)) as lines:
                    async for line in lines:
                        yield _event(line)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ClusterError(f"the watch of {kind.plural} broke: {error or type(error).__name__}") from error

    async def patch(self, kind: Kind, name: str, change: Object) -> Object:
        """JSON merge patch."""
        content = "application/merge-patch+json"
        return await self._call("PATCH", self._path(kind, name), body=change, content=content)

    async def delete(self, kind: Kind, name: str, *, uid: str, grace: int | None = None) -> bool:
        """DELETE with the uid as a precondition, so that a successor of the same name is safe."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        options |= {} if grace is None else {"gracePeriodSeconds": grace}
        options |= {"preconditions": {"uid": uid}} if uid else {}
        try:
            await self._call("DELETE", self._path(kind, name), body=options)
        except ClusterError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def delete_all(self, kind: Kind, *, labels: str, grace: int | None = None) -> None:
        """DELETE of a collection. An empty selector would mean the whole namespace and is refused."""
        if not labels:
            raise ValueError("delete_all needs a label selector")
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        options |= {} if grace is None else {"gracePeriodSeconds": grace}
        await self._call("DELETE", self._path(kind), query={"labelSelector": labels}, body=options)

    async def log_tail(self, pod: str, *, container: str, bytes_: int) -> str:
        """Last bytes of a log, or what the server answers in their place."""
        query = {"container": container, "tailLines": "80", "limitBytes": str(bytes_)}
        try:
            answer = await self._call("GET", self._path(POD, pod) + "/log", query=query, text=True)
        except ClusterError as error:
            return f"(no log: {error})"
        return str(answer["text"])[-bytes_:]

    async def may(self, verb: str, kind: Kind, *, subresource: str = "") -> bool:
        """SelfSubjectAccessReview, which every user may create."""
        asked = {"namespace": self.namespace, "verb": verb, "group": kind.group, "resource": kind.plural}
        asked |= _given(subresource=subresource)
        body: Object = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = await self._call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=body)
        return bool(answer.get("status", {}).get("allowed"))

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
        text: bool = False,
    ) -> Object:
        doubtful = False
        for attempt in range(self._tries):
            try:
                async with self._places:
                    return await self._once(method, path, query or {}, body, content, text)
            except ClusterError as error:
                error.doubtful = doubtful
                doubtful = doubtful or error.status == 0 or error.status >= 500
                if not error.passing or error.expired or attempt == self._tries - 1:
                    raise
                pause = self._pause(attempt, error)
                log.info("%s %s: %s; again in %.1f s", method, path, error, pause)
            await asyncio.sleep(pause)
        raise AssertionError("unreachable: the last try raises")

    async def _once(
        self, method: str, path: str, query: dict[str, str], body: Object | None, content: str, text: bool
    ) -> Object:
        headers = await self._headers()
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), content
        url, timeout = self._access.server + path, aiohttp.ClientTimeout(total=_CALL_TIMEOUT)
        try:
            request = self._open().request(method, url, params=query, data=data, headers=headers, timeout=timeout)
            async with request as response:
                if response.status >= 300:
                    raise await _refusal(response)
                answer: Object = {"text": await response.text(errors="replace")} if text else await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ClusterError(f"no answer to {method} {path}: {error or type(error).__name__}") from error

    def _pause(self, attempt: int, error: ClusterError) -> float:
        """Exponential with full jitter, and never sooner than the server asked."""
        backoff = random.uniform(0.0, min(30.0, self._first_pause * 2**attempt))
        return backoff + (error.retry_after or 0.0)

    async def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "openforgerl"}
        if (token := await self._access.token()) is not None:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _open(self) -> aiohttp.ClientSession:
        if self._first is not None:
            return self._first._open()
        if self._session is None:
            tls = True if self._access.tls is None else self._access.tls
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=tls, limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session

    def _path(self, kind: Kind, name: str = "") -> str:
        return f"{kind.root}/namespaces/{self.namespace}/{kind.plural}{'/' + name if name else ''}"


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Lines of any length up to a bound: aiohttp's own `readline` gives up at 64 KiB, and pods may be larger."""
    buffer = bytearray()
    async for chunk in content.iter_any():
        buffer += chunk
        *whole, rest = buffer.split(b"\n")
        for line in whole:
            if line.strip():
                yield bytes(line)
        buffer = bytearray(rest)
        if len(buffer) > _LINE_LIMIT:
            raise ClusterError(f"a line of the watch is longer than {_LINE_LIMIT} bytes")


def _event(line: bytes) -> Event:
    try:
        parsed: dict[str, Any] = json.loads(line)
        kind, found = str(parsed["type"]), parsed["object"]
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"the watch sent what is no event: {line[:200]!r}") from error
    if kind == "ERROR":  # a refusal inside an answer that had already begun with 200
        raise ClusterError(
            str(found.get("message")), status=int(found.get("code") or 500), reason=str(found.get("reason") or "")
        )
    return Event(kind, found)


async def _refusal(response: aiohttp.ClientResponse) -> ClusterError:
    """A Status object, or whatever text there is: throttling answers in plain text."""
    text = await response.text(errors="replace")
    try:
        status: Object = json.loads(text)
        message, reason = str(status.get("message") or text), str(status.get("reason") or "")
    except (ValueError, AttributeError):
        message, reason = text.strip() or str(response.reason), ""
    after = response.headers.get("Retry-After", "")
    return ClusterError(
        f"{message[:1000]} (HTTP {response.status})",
        status=response.status,
        reason=reason,
        retry_after=float(after) if after.isdigit() else None,
    )


def _whole(kind: Kind, manifest: Object) -> Object:
    return {"apiVersion": kind.api_version, "kind": kind.kind, **manifest}


def _given(**query: str) -> dict[str, str]:
    return {name: value for name, value in query.items() if value}
