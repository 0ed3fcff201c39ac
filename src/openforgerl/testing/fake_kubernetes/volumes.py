"""Volumes as real folders, and a container's environment."""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from openforgerl.testing.fake_kubernetes.admission import quantity
from openforgerl.testing.fake_kubernetes.containers import Mount
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, SECRETS, Object, Resource
from openforgerl.testing.fake_kubernetes.objects import Objects

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class MountFailed(Exception):
    """A volume cannot be made (yet): the pod stays in ContainerCreating."""


class ConfigMissing(Exception):
    """The environment names a Secret or ConfigMap that is not there: CreateContainerConfigError."""


class Volumes:
    """The volumes of one pod, below `folder`. `images`: what an image volume's reference stands for."""

    def __init__(self, objects: Objects, pod: Object, folder: Path, images: Mapping[str, Path]) -> None:
        self._objects = objects
        self._pod = pod
        self._namespace = pod["metadata"]["namespace"]
        self._folder = folder
        self._images = images
        self._places: dict[str, Path] = {}

    def make(self) -> None:
        """Make them all. Raises MountFailed."""
        for volume in self._pod["spec"].get("volumes") or []:
            self._places[volume["name"]] = self._make(volume)

    def refresh(self, pod: Object) -> None:
        """Show the present labels and annotations in the volumes of the downward API that are made."""
        self._pod = {**self._pod, "metadata": pod["metadata"]}
        for volume in self._pod["spec"].get("volumes") or []:
            if "downwardAPI" in volume and volume["name"] in self._places:
                self._downward(self._places[volume["name"]], volume["downwardAPI"])

    def _make(self, volume: dict[str, Any]) -> Path:
        place = self._folder / volume["name"]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "image" in volume:
            reference = volume["image"]["reference"]
            if reference not in self._images:
                raise MountFailed(f'failed to pull image "{reference}" for volume "{volume["name"]}"')
            return self._images[reference]
        place.mkdir(parents=True, exist_ok=True)
        if "secret" in volume:
            self._fill(place, volume["secret"], SECRETS, volume["secret"]["secretName"])
        elif "configMap" in volume:
            self._fill(place, volume["configMap"], CONFIG_MAPS, volume["configMap"]["name"])
        elif "projected" in volume:
            for source in volume["projected"].get("sources") or []:
                self._project(place, source, volume["projected"].get("defaultMode", 0o644))
        elif "downwardAPI" in volume:
            self._downward(place, volume["downwardAPI"])
        elif "emptyDir" in volume:
            place.chmod(0o777)
        else:
            raise MountFailed(f'volume "{volume["name"]}": the fake kubelet has no {sorted(set(volume) - {"name"})}')
        return place

    def _project(self, place: Path, source: dict[str, Any], mode: int) -> None:
        if "secret" in source:
            self._fill(place, {"defaultMode": mode, **source["secret"]}, SECRETS, source["secret"]["name"])
        elif "configMap" in source:
            self._fill(place, {"defaultMode": mode, **source["configMap"]}, CONFIG_MAPS, source["configMap"]["name"])
        elif "downwardAPI" in source:
            self._downward(place, source["downwardAPI"])
        elif "serviceAccountToken" in source:
            token = f"fake-token-of-{self._pod['spec']['serviceAccountName']}"
            _write(place / source["serviceAccountToken"]["path"], token.encode(), mode)

    def _fill(self, place: Path, source: dict[str, Any], resource: Resource, name: str) -> None:
        stored = self._objects.find(resource, (self._namespace, name))
        if stored is None:
            if source.get("optional"):
                return
            raise MountFailed(f'MountVolume.SetUp failed for volume: {resource.kind.lower()} "{name}" not found')
        data, mode = contents(stored.body), source.get("defaultMode", 0o644)
        items: list[dict[str, Any]] = source.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            if item["key"] not in data:
                raise MountFailed(f"references non-existent {resource.kind.lower()} key: {item['key']}")
            _write(place / item["path"], data[item["key"]], item.get("mode", mode))

    def _downward(self, place: Path, source: dict[str, Any]) -> None:
        for item in source.get("items") or []:
            text = field(self._pod, item["fieldRef"]["fieldPath"])
            _write(place / item["path"], text.encode(), source.get("defaultMode", 0o644))

    def mounts(self, container: dict[str, Any]) -> list[Mount]:
        """Those of one container, outer before inner. Raises MountFailed for a subPath that leads out."""
        found: list[Mount] = []
        for mount in container.get("volumeMounts") or []:
            source = self._places[mount["name"]]
            if sub := mount.get("subPath"):
                if ".." in PurePosixPath(sub).parts or sub.startswith("/"):
                    raise MountFailed(f"subPath {sub!r} must be a relative path without '..'")
                source = source / sub
                if not source.exists():
                    source.mkdir(parents=True)
                    source.chmod(0o777)
            volume = self._volume(mount["name"])
            # whatever the mount says, the kubelet mounts the others read-only
            writable = not mount.get("readOnly") and ("emptyDir" in volume or "hostPath" in volume)
            empty: dict[str, Any] = volume.get("emptyDir") or {}
            found.append(
                Mount(
                    mount["mountPath"].rstrip("/") or "/",
                    source,
                    not (writable and os.access(source, os.W_OK)),
                    memory=empty.get("medium") == "Memory" and not sub and self._users(mount["name"]) == 1,
                    size=int(quantity(empty.get("sizeLimit", 0))),
                )
            )
        return sorted(found, key=lambda one: one.path.count("/"))

    def _volume(self, name: str) -> dict[str, Any]:
        return next(one for one in self._pod["spec"]["volumes"] if one["name"] == name)

    def _users(self, name: str) -> int:
        """How many containers mount a volume."""
        spec = self._pod["spec"]
        containers = [*(spec.get("initContainers") or []), *spec["containers"]]
        return sum(
            any(mount["name"] == name for mount in container.get("volumeMounts") or []) for container in containers
        )

    def overfull(self) -> str:
        """Why the pod must be evicted for what lies in its emptyDirs on disk; empty when it need not."""
        total = 0
        for name, place in self._places.items():
            empty = self._volume(name).get("emptyDir")
            if empty is None:
                continue
            used = size(place)
            limit = empty.get("sizeLimit")
            if limit is not None and used > quantity(limit):
                return f'Usage of EmptyDir volume "{name}" exceeds the limit "{limit}". '
            total += used
        limits = [
            (one["resources"].get("limits") or {}).get("ephemeral-storage") for one in self._pod["spec"]["containers"]
        ]
        if limits and None not in limits and total > sum(quantity(limit) for limit in limits):
            return f"Pod ephemeral local storage usage exceeds the total limit of containers {limits[0]}. "
        return ""


def size(folder: Path) -> int:
    """Bytes in the files below a folder. What vanishes meanwhile counts nothing."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(top, name)).st_size
    return total


def _write(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def contents(body: Object) -> dict[str, bytes]:
    """Key → bytes of a Secret or ConfigMap."""
    if body["kind"] == "Secret":
        return {key: base64.b64decode(value) for key, value in (body.get("data") or {}).items()}
    data = {key: value.encode() for key, value in (body.get("data") or {}).items()}
    return data | {key: base64.b64decode(value) for key, value in (body.get("binaryData") or {}).items()}


def field(pod: Object, path: str) -> str:
    """A `fieldRef` of the downward API. Raises ConfigMissing for one that there is not."""
    metadata = pod["metadata"]
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
        return (metadata.get(found[1]) or {}).get(found[2], "")
    known = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "status.podIP": pod.get("status", {}).get("podIP", ""),
        "status.hostIP": pod.get("status", {}).get("hostIP", ""),
    }
    if path not in known:
        raise ConfigMissing(f"fieldPath {path!r} is not supported")
    return known[path]


def environment(objects: Objects, pod: Object, container: dict[str, Any]) -> dict[str, str]:
    """The variables of a container. Raises ConfigMissing."""
    namespace = pod["metadata"]["namespace"]
    env: dict[str, str] = {"HOSTNAME": pod["metadata"]["name"][:63]}
    for source in container.get("envFrom") or []:
        for key, resource in (("secretRef", SECRETS), ("configMapRef", CONFIG_MAPS)):
            if key in source:
                data = _data(objects, resource, namespace, source[key])
                env |= {source.get("prefix", "") + name: value.decode() for name, value in data.items()}
    for variable in container.get("env") or []:
        source = variable.get("valueFrom")
        if source is None:
            env[variable["name"]] = expand(variable.get("value") or "", env)
        elif "fieldRef" in source:
            env[variable["name"]] = field(pod, source["fieldRef"]["fieldPath"])
        else:
            key, resource = ("secretKeyRef", SECRETS) if "secretKeyRef" in source else ("configMapKeyRef", CONFIG_MAPS)
            if key not in source:
                raise ConfigMissing(f"env {variable['name']}: the fake kubelet has no {sorted(source)}")
            data, wanted = _data(objects, resource, namespace, source[key]), source[key]["key"]
            if wanted in data:
                env[variable["name"]] = data[wanted].decode()
            elif not source[key].get("optional"):
                raise ConfigMissing(f"couldn't find key {wanted} in {resource.kind} {namespace}/{source[key]['name']}")
    return env


def _data(objects: Objects, resource: Resource, namespace: str, source: dict[str, Any]) -> dict[str, bytes]:
    stored = objects.find(resource, (namespace, source["name"]))
    if stored is None and not source.get("optional"):
        raise ConfigMissing(f'{resource.kind.lower()} "{source["name"]}" not found')
    return contents(stored.body) if stored is not None else {}


def expand(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` in commands, arguments and values; what is not known stays, `$$` is a dollar."""
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]), text)
