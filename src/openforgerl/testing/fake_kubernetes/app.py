"""The HTTP side of the API server."""

from __future__ import annotations

import asyncio
import base64
import binascii
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from openforgerl.testing.fake_kubernetes import access, execing, kinds, patches, selectors, statuses
from openforgerl.testing.fake_kubernetes.access import Access, User
from openforgerl.testing.fake_kubernetes.faults import Faults
from openforgerl.testing.fake_kubernetes.kinds import PODS, Object, Resource, Target
from openforgerl.testing.fake_kubernetes.kubelet import Kubelet
from openforgerl.testing.fake_kubernetes.objects import Stored
from openforgerl.testing.fake_kubernetes.registry import DeleteOptions, Registry
from openforgerl.testing.fake_kubernetes.scenarios import Scenarios
from openforgerl.testing.fake_kubernetes.watching import Watch, Watching

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.2", "platform": "linux/amd64"}
_TRUE = ("1", "t", "true")


def says_yes(request: web.Request, name: str) -> bool:
    """Whether a flag of the query is set, in any of the ways that clients write it."""
    return request.query.get(name, "").lower() in _TRUE


def verb_of(request: web.Request, target: Target) -> str:
    """The RBAC verb of a request. Raises Refusal (405)."""
    match request.method:
        case "GET" if target.name:
            return "get"
        case "GET":
            return "watch" if says_yes(request, "watch") else "list"
        case "POST":
            return "create"
        case "PUT" if target.name:
            return "update"
        case "PATCH" if target.name:
            return "patch"
        case "DELETE":
            return "delete" if target.name else "deletecollection"
        case _:
            raise statuses.method_not_allowed()


@dataclass(slots=True)
class Counts:
    """What the API server was asked and what it answered."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """(verb, resource), as RBAC names them: `("create", "pods")`, `("get", "pods/log")`. Refused calls count too."""
    answers: Counter[int] = field(default_factory=Counter[int])
    """Status code → how many."""

    def of(self, *resources: str) -> dict[str, int]:
        """`verb resource` → calls, of all resources or of those named; for a report."""
        return {
            f"{verb} {label}": count
            for (verb, label), count in sorted(self.calls.items())
            if not resources or label in resources
        }


@dataclass(slots=True)
class ApiServer:
    """Answers every request. `app` makes a new aiohttp application around the same data."""

    registry: Registry
    watching: Watching
    kubelet: Kubelet
    access: Access
    scenarios: Scenarios
    faults: Faults
    counts: Counts = field(default_factory=Counts)
    _in_flight: int = 0

    def app(self) -> web.Application:
        """An application to serve."""
        app = web.Application(client_max_size=3 << 20)
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One request, with its refusals as the API words them."""
        if self.faults.latency:
            await asyncio.sleep(self.faults.latency)
        try:
            response = await self._answer(request)
        except statuses.Refusal as refusal:
            response = _refused(refusal)
        self.counts.answers[response.status] += 1
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path.rstrip("/") in ("/readyz", "/livez", "/healthz"):
            return web.Response(text="ok")
        if path.rstrip("/") == "/version":
            return _json_answer(VERSION)
        user = self.access.authenticate(request.headers.get("Authorization"))
        target = kinds.parse(path)
        if target is None:
            return _discovery(path)
        verb = verb_of(request, target)
        self.counts.calls[verb, target.label] += 1
        streams = verb == "watch" or target.subresource in ("exec", "log")
        if not user.master and self._throttles(streams):
            raise statuses.throttled(self.faults.retry_after)
        if self.faults.strikes(self.faults.error_rate):
            raise statuses.Refusal(500, "InternalError", "Internal error occurred: etcdserver: request timed out")
        access.authorize(user, verb, target)
        if target.subresource == "exec":
            # since 1.35 a websocket, which is a GET, needs the right to create as well
            access.authorize(user, "create", target)
        self._in_flight += not streams
        try:
            return await self._dispatch(request, user, verb, target)
        finally:
            self._in_flight -= not streams

    def _throttles(self, streams: bool) -> bool:
        most = self.faults.most_in_flight
        return (bool(most) and not streams and self._in_flight >= most) or self.faults.strikes(
            self.faults.throttle_rate
        )

    async def _dispatch(self, request: web.Request, user: User, verb: str, target: Target) -> web.StreamResponse:
        resource, key = target.resource, (target.namespace, target.name)
        if resource is PODS and verb in ("get", "create") and target.subresource in ("exec", "log"):
            serve = execing.execute if target.subresource == "exec" else execing.read_log
            return await serve(request, self.kubelet, key)
        if target.subresource not in ("", "status"):
            raise statuses.no_such_path()
        dry_run = "All" in request.query.getall("dryRun", [])
        match verb:
            case "get":
                return _object(self.registry.shown(resource, self.registry.objects.get(resource, key)))
            case "list":
                return self._list(request, target)
            case "watch":
                return await self._watch(request, target)
            case "create":
                return await self._create(request, user, target, dry_run)
            case "update":
                body = await _body(request)
                return _object(
                    self.registry.update(resource, key, body, subresource=target.subresource, dry_run=dry_run)
                )
            case "patch":
                return await self._patch(request, target, dry_run)
            case "delete":
                return await self._delete(request, target, dry_run)
            case _:
                return await self._delete_collection(request, target, dry_run)

    async def _create(self, request: web.Request, user: User, target: Target, dry_run: bool) -> web.StreamResponse:
        resource, body = target.resource, await _body(request)
        if resource.plural == "selfsubjectaccessreviews":
            return _json_answer(access.review(user, body), status=201)
        if target.name:
            raise statuses.method_not_allowed()
        refused = self._planted_refusal(target, body) if resource is PODS and not dry_run else ""
        stored = self.registry.create(resource, target.namespace, body, dry_run=dry_run)
        if refused == "lost-answer":
            if request.transport is not None:
                request.transport.abort()  # created, and nobody was told
            return web.Response(status=201)
        return _object(stored, status=201)

    def _planted_refusal(self, target: Target, body: Object) -> str:
        """A scenario's part in the creation of a pod. Raises Refusal (403, 429)."""
        name = (body.get("metadata") or {}).get("name", "")
        images = [str(one.get("image", "")) for one in (body.get("spec") or {}).get("containers") or []]
        refused = self.scenarios.refuse_create(target.namespace, name, images)
        if refused == "throttled":
            raise statuses.throttled(self.faults.retry_after)
        if refused == "quota":
            why = "exceeded quota: planted, requested: pods=1, used: pods=1, limited: pods=1"
            raise statuses.forbidden("pods", "", name, why)
        return refused

    async def _patch(self, request: web.Request, target: Target, dry_run: bool) -> web.StreamResponse:
        patch: Any = await _json(request)
        key = (target.namespace, target.name)
        kind = request.content_type
        absent = self.registry.objects.find(target.resource, key) is None
        if kind == patches.APPLY and absent and not target.subresource:
            return _object(self.registry.create(target.resource, target.namespace, patch, dry_run=dry_run), status=201)
        return _object(
            self.registry.patch(target.resource, key, patch, kind, subresource=target.subresource, dry_run=dry_run)
        )

    async def _delete(self, request: web.Request, target: Target, dry_run: bool) -> web.StreamResponse:
        options, key = await _delete_options(request), (target.namespace, target.name)
        resource = target.resource
        stored = self.registry.delete(resource, key, options, dry_run=dry_run or "All" in options.dry_run)
        if resource is PODS or stored.body["metadata"].get("deletionTimestamp"):
            return _object(stored)
        details = {"name": target.name, "kind": resource.plural, "uid": stored.uid}
        return _json_answer(statuses.success(**details | ({"group": resource.group} if resource.group else {})))

    async def _delete_collection(self, request: web.Request, target: Target, dry_run: bool) -> web.StreamResponse:
        options, found = await _delete_options(request), self._found(request, target)
        for stored in found:
            self.registry.delete(target.resource, stored.key, options, dry_run=dry_run or "All" in options.dry_run)
        version = str(self.registry.objects.version)
        return web.Response(body=_listed(target.resource, found, version), content_type="application/json")

    def _found(self, request: web.Request, target: Target) -> list[Stored]:
        query, resource = request.query, target.resource
        selector = selectors.both(query.get("labelSelector", ""), query.get("fieldSelector", ""), resource)
        objects = self.registry.objects.list(resource, target.namespace)
        return [stored for stored in objects if selector is None or selector(stored.body)]

    def _list(self, request: web.Request, target: Target) -> web.StreamResponse:
        objects, query = self.registry.objects, request.query
        asked, found = _version(request), self._found(request, target)
        if asked is not None and asked > objects.version:
            raise statuses.version_too_large(asked, objects.version)
        version, remains, token = objects.version, 0, ""
        if given := query.get("continue"):
            version, after = _page(given)
            if version < objects.floor(target.resource):
                message = "The provided continue parameter is too old to display a consistent list result."
                raise statuses.Refusal(410, "Expired", message)
            found = [stored for stored in found if stored.key > after]
        limit = int(query.get("limit") or 0)
        if limit and len(found) > limit:
            remains = len(found) - limit
            found = found[:limit]
            token = base64.urlsafe_b64encode(msgspec.json.encode([version, *found[-1].key])).decode()
        shown = [self.registry.shown(target.resource, stored) for stored in found]
        return web.Response(
            body=_listed(target.resource, shown, str(version), token=token, remains=remains),
            content_type="application/json",
        )

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        query, resource = request.query, target.resource
        initial = says_yes(request, "sendInitialEvents")
        version = _version(request)
        watch = Watch(
            resource=resource,
            namespace=target.namespace,
            selector=selectors.both(query.get("labelSelector", ""), query.get("fieldSelector", ""), resource),
            version=0 if initial else version,
            bookmarks=says_yes(request, "allowWatchBookmarks"),
            initial=initial,
            seconds=float(query.get("timeoutSeconds") or random.uniform(1800, 3600)),
        )
        refusal = self.watching.refuse(watch)
        if refusal is not None and self.faults.gone_as == "status":
            raise refusal
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        with suppress(ConnectionResetError):  # the client has left
            async with aclosing(self.watching.stream(watch)) as lines:
                async for line in lines:
                    await response.write(line)
        return response


def _json_answer(body: Object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """As the API server has it: `application/json` and no charset, for which clients look."""
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


def _object(stored: Stored, status: int = 200) -> web.Response:
    return web.Response(body=stored.encoded, status=status, content_type="application/json")


def _listed(resource: Resource, found: list[Stored], version: str, *, token: str = "", remains: int = 0) -> bytes:
    metadata: Object = {"resourceVersion": version}
    if token:
        metadata |= {"continue": token, "remainingItemCount": remains}
    head = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": metadata}
    return msgspec.json.encode(head)[:-1] + b',"items":[' + b",".join(one.encoded for one in found) + b"]}"


def _refused(refusal: statuses.Refusal) -> web.Response:
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    if refusal.text is not None:
        return web.Response(text=refusal.text, status=refusal.code, headers=headers, content_type="text/plain")
    return _json_answer(refusal.body(), status=refusal.code, headers=headers)


def _discovery(path: str) -> web.Response:
    parts = [part for part in path.split("/") if part]
    if parts == ["api"]:
        return _json_answer({"kind": "APIVersions", "versions": ["v1"]})
    if parts == ["apis"]:
        return _json_answer(kinds.groups())
    if parts == ["api", "v1"]:
        return _json_answer(kinds.discovery("", "v1"))
    if len(parts) == 3 and parts[0] == "apis" and kinds.discovery(parts[1], parts[2])["resources"]:
        return _json_answer(kinds.discovery(parts[1], parts[2]))
    raise statuses.no_such_path()


async def _json(request: web.Request) -> Any:
    if "protobuf" in request.content_type:
        raise statuses.Refusal(415, "UnsupportedMediaType", "this fake cluster reads JSON only, not protobuf")
    try:
        return msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise statuses.bad_request(f"the object provided is unrecognized: {error}") from error


async def _body(request: web.Request) -> Object:
    body = await _json(request)
    if not isinstance(body, dict):
        raise statuses.bad_request("the object provided is unrecognized: it must be a JSON object")
    return body


async def _delete_options(request: web.Request) -> DeleteOptions:
    data = await request.read()
    try:
        options = msgspec.json.decode(data, type=DeleteOptions) if data else DeleteOptions()
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise statuses.bad_request(f"the object provided is unrecognized: {error}") from error
    query = request.query
    changes: dict[str, Any] = {}
    if "gracePeriodSeconds" in query:
        changes["grace_period_seconds"] = int(query["gracePeriodSeconds"])
    if "propagationPolicy" in query:
        changes["propagation_policy"] = query["propagationPolicy"]
    return msgspec.structs.replace(options, **changes)


def _version(request: web.Request) -> int | None:
    given = request.query.get("resourceVersion", "")
    if not given:
        return None
    if not given.isdigit():
        raise statuses.bad_request(f'Invalid value: "{given}": resourceVersion must be an unsigned integer')
    return int(given)


def _page(token: str) -> tuple[int, tuple[str, str]]:
    try:
        version, namespace, name = msgspec.json.decode(base64.urlsafe_b64decode(token), type=tuple[int, str, str])
    except (binascii.Error, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise statuses.bad_request(f"continue key is not valid: {error}") from error
    return version, (namespace, name)
