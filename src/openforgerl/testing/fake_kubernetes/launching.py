"""What a container's spec means: its command, its environment, its user, its mounts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openforgerl.testing.fake_kubernetes.admission import quantity
from openforgerl.testing.fake_kubernetes.containers import ContainerLog, Image, Launch
from openforgerl.testing.fake_kubernetes.kinds import Object
from openforgerl.testing.fake_kubernetes.objects import Objects
from openforgerl.testing.fake_kubernetes.podstatus import Slot
from openforgerl.testing.fake_kubernetes.processes import PATH
from openforgerl.testing.fake_kubernetes.volumes import ConfigMissing, Volumes, environment, expand


@dataclass(frozen=True, slots=True)
class Site:
    """Where a pod's containers are started: `folder` is the pod's own on this machine."""

    pod: Object
    objects: Objects
    volumes: Volumes
    folder: Path
    rotate_at: int
    network: str = ""
    host_uid: int = 0
    """As in `Launch`."""


def launch_of(slot: Slot, image: Image, site: Site) -> Launch:
    """What the runtime is to start. Raises ConfigMissing or MountFailed: CreateContainerConfigError."""
    spec, pod = slot.spec, site.pod
    env = {"PATH": PATH, **environment(site.objects, pod, spec)}
    words = [*(spec.get("command") or image.entrypoint), *(spec.get("args") or [])]
    security: Object = {**(pod["spec"].get("securityContext") or {}), **(spec.get("securityContext") or {})}
    uid = int(security.get("runAsUser", 0))
    if security.get("runAsNonRoot") and uid == 0:
        raise ConfigMissing("container has runAsNonRoot and image will run as root")
    own = site.folder / f"container-{slot.name}"
    own.mkdir(parents=True, exist_ok=True)
    return Launch(
        pod=pod,
        name=slot.name,
        image=image,
        argv=[expand(word, env) for word in words] or ["/bin/sh"],
        env=env,
        workdir=spec.get("workingDir") or "/",
        mounts=site.volumes.mounts(spec),
        log=ContainerLog(site.rotate_at),
        termination_file=own / "termination-log",
        termination_path=spec["terminationMessagePath"],
        uid=uid,
        gid=int(security.get("runAsGroup", uid)),
        read_only=bool(security.get("readOnlyRootFilesystem")),
        privileged=bool(security.get("privileged")),
        memory=int(quantity((spec["resources"].get("limits") or {}).get("memory", 0))),
        hostname=pod["spec"].get("hostname") or pod["metadata"]["name"][:63],
        network=site.network,
        host_uid=site.host_uid,
    )


def last_words(slot: Slot, folder: Path, code: int) -> str:
    """The termination message: the file's, or else the log's last lines if the container failed and wants that."""
    file = folder / f"container-{slot.name}" / "termination-log"
    said = file.read_bytes()[:4096].decode(errors="replace") if file.exists() else ""
    if said or code == 0 or slot.spec["terminationMessagePolicy"] != "FallbackToLogsOnError":
        return said
    return slot.log.tail() if slot.log is not None else ""
