"""A network of the pods' own: each has a network namespace and an address, and what it may reach is enforced.

With it comes a uid of this machine for each pod, as a kubelet with user namespaces gives it one (`hostUsers: false`):
what the kernel counts and allows per uid is then the pod's own too.

```
  pod ─ veth ─┐
  pod ─ veth ─┤ fabric: a namespace that routes, with iptables rules made of the NetworkPolicies (enforcing.py)
              ├─ veth ─ this machine: the node's address, and those of pods that are coroutines
  outside ────┘
```

Needs root, and the programs ip, iptables, nsenter, setpriv and unshare. This machine's own routing and rules are left
alone, but for one interface with a route to the pods' addresses, of a range kept for benchmarks (RFC 2544). IPv4 only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.testing.fake_kubernetes.collecting import Spawn
from openforgerl.testing.fake_kubernetes.enforcing import Member, ruleset
from openforgerl.testing.fake_kubernetes.kinds import NAMESPACES, PODS, POLICIES, Object, Resource
from openforgerl.testing.fake_kubernetes.objects import Change, Objects

_RANGE = ipaddress.IPv4Network("198.18.0.0/15")
_SHARES = list(_RANGE.subnets(new_prefix=20))
"""One for each cluster on this machine, with 4,000 pods."""
_NAMES = Path("/run/netns")
_OURS = re.compile(r"fake-k8s-(\d+)-\d+-\w+")
_FIRST_UID = 1_500_000_000
_NEXT_HOP = "169.254.1.1"
"""The fabric's address on every link to it."""
_NO_IPV6 = "for name in all default; do echo 1 > /proc/sys/net/ipv6/conf/$name/disable_ipv6; done 2>/dev/null; "
_TRIAL = (
    "ip link add name one type veth peer name two && "
    "iptables -A FORWARD -m conntrack --ctstate ESTABLISHED -j ACCEPT && iptables-restore --version"
)


def lacking() -> str:
    """Why pods cannot have a network of their own on this machine; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces with addresses of their own need root"
    missing = [
        name for name in ("ip", "iptables", "iptables-restore", "nsenter", "setpriv", "unshare") if not _find(name)
    ]
    if missing:
        return f"these programs are not here: {', '.join(missing)} (Debian: iproute2, iptables, util-linux)"
    words = [_find("unshare"), "--net", "sh", "-c", _TRIAL]
    tried = subprocess.run(words, capture_output=True, text=True, env=_environment(), check=False)
    said = (tried.stderr or tried.stdout).strip().splitlines()
    return f"this kernel refuses: {said[-1] if said else tried.returncode}" if tried.returncode else ""


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def _find(program: str) -> str:
    return shutil.which(program, path=_environment()["PATH"]) or ""


@dataclass(slots=True)
class PodNetwork:
    """`open`, then `attach` for each pod before its containers start, `detach` after they are dead, `close`."""

    objects: Objects
    spawn: Spawn
    _share: ipaddress.IPv4Network = _SHARES[0]
    _interface: str = ""
    _members: dict[str, Member] = field(default_factory=dict[str, Member])
    _spaces: dict[str, str] = field(default_factory=dict[str, str])
    """Pod uid, or an address outside → name of its network namespace."""
    _count: int = 0
    _wanted: int = 0
    """Version of the rules that objects and members call for."""
    _applied: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _applying: asyncio.Task[None] | None = None

    @property
    def node(self) -> str:
        """The address of every node: this machine's."""
        return str(self._share[1])

    def address(self, number: int) -> str:
        """Of the pod with that number, from 1."""
        return str(self._share[1 + number % (self._share.num_addresses - 3)])

    def place(self, uid: str) -> str:
        """Path of a pod's network namespace; empty for a pod that lives in this machine's."""
        name = self._spaces.get(uid, "")
        return str(_NAMES / name) if name else ""

    def identity(self, uid: str) -> tuple[str, int]:
        """A pod's network namespace, and the uid of this machine that its containers' users are and nobody else is."""
        place, member = self.place(uid), self._members.get(uid)
        number = int(ipaddress.IPv4Address(member.address)) - int(_RANGE[0]) if member is not None else 0
        return place, _FIRST_UID + number if place else 0

    @property
    def _fabric(self) -> str:
        return self._name("fabric")

    def _name(self, end: str) -> str:
        return f"fake-k8s-{os.getpid()}-{_SHARES.index(self._share)}-{end}"

    async def open(self) -> None:
        """Make the fabric and its link to this machine. Raises InputError where that is impossible."""
        if why := await asyncio.to_thread(lacking):
            raise InputError(f"the fake cluster's pods cannot have a network of their own: {why}")
        await self._sweep()
        for number, self._share in enumerate(_SHARES):
            self._interface = f"fake-k8s-{number}"
            with contextlib.suppress(InputError):
                await _run(
                    "ip", "link", "add", "name", self._interface, "type", "veth", "peer", "name", f"fake-k8s-{number}p"
                )
                break
        else:
            raise InputError(f"all {len(_SHARES)} shares of {_RANGE} are taken: `ip link` shows by which fake clusters")
        await _run("ip", "netns", "add", self._fabric)
        await _run("ip", "link", "set", f"{self._interface}p", "netns", self._fabric, "name", "machine")
        inside = "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter; "
        await self._within(
            self._fabric,
            inside + _NO_IPV6,
            "link set lo up",
            f"addr add {_NEXT_HOP}/32 dev machine",
            "link set machine up",
            f"route add {self.node}/32 dev machine",
        )
        await _run("ip", "addr", "add", f"{self.node}/32", "dev", self._interface)
        await _run("ip", "link", "set", self._interface, "up")
        await _run(
            *("ip", "route", "add", str(self._share), "via", _NEXT_HOP, "dev", self._interface),
            *("onlink", "src", self.node),
        )
        self._change()
        self._applying = self.spawn(self._apply())
        await self.enforced()

    async def close(self) -> None:
        """Remove it all; what still runs in a namespace keeps it until it ends."""
        if self._applying is not None:
            self._applying.cancel()
            await asyncio.wait([self._applying])
        for name in [*self._spaces.values(), self._fabric]:
            if name and (_NAMES / name).exists():
                await _run("ip", "netns", "delete", name)
        if self._interface and Path("/sys/class/net", self._interface).exists():
            with contextlib.suppress(InputError):  # it may go with the fabric's end, a moment later
                await _run("ip", "link", "delete", self._interface)

    async def attach(self, uid: str, pod: Object, address: str, *, here: bool) -> None:
        """Give a pod its place. `here`: its programs are coroutines, so its address is one of this machine's.

        When this returns, the policies hold for it.
        """
        if here:
            self._spaces[uid] = ""
            await _run("ip", "addr", "add", f"{address}/32", "dev", self._interface)
            await self._within(self._fabric, "", f"route add {address}/32 dev machine")
        else:
            await self._connect(uid, address)
        self._members[uid] = Member(pod, address)
        self._change()
        await self.enforced()

    async def outside(self, address: str) -> str:
        """An address that is of no pod and of no node, as of the internet; path of its network namespace."""
        await self._connect(address, address)
        return self.place(address)

    async def detach(self, uid: str) -> None:
        """The pod's containers are dead."""
        member, name = self._members.pop(uid, None), self._spaces.pop(uid, "")
        if name:
            await _run("ip", "netns", "delete", name)
        elif member is not None:
            await _run("ip", "addr", "delete", f"{member.address}/32", "dev", self._interface)
            await self._within(self._fabric, "", f"route delete {member.address}/32 dev machine")
        self._change()

    def noticed(self, resource: Resource, change: Change) -> None:
        """What the network plugin's own watch brings."""
        uid = change.now.uid
        if resource is PODS and change.kind == "MODIFIED" and uid in self._members:
            before, now = self._members[uid].pod["metadata"], change.now.body["metadata"]
            if before.get("labels") != now.get("labels"):
                self._members[uid] = Member(change.now.body, self._members[uid].address)
                self._change()
        elif resource in (POLICIES, NAMESPACES):
            self._change()

    def _change(self) -> None:
        self._wanted += 1
        self._shout()

    def _shout(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def enforced(self) -> None:
        """Until what is enforced is what the objects say now."""
        wanted = self._wanted
        await self._until(lambda: self._applied >= wanted)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._news.wait()

    async def _apply(self) -> None:
        while True:
            await self._until(lambda: self._applied < self._wanted)
            version = self._wanted
            rules = ruleset(self.objects, self._members, self.node)
            await _run("nsenter", f"--net={_NAMES / self._fabric}", _find("iptables-restore"), given=rules)
            self._applied = version
            self._shout()

    async def _connect(self, key: str, address: str) -> None:
        self._count += 1
        name, link = self._name(str(self._count)), f"v{self._count}"
        await _run("ip", "netns", "add", name)
        self._spaces[key] = name
        await self._within(
            self._fabric,
            "",
            f"link add name {link} type veth peer name eth0 netns {name}",
            f"addr add {_NEXT_HOP}/32 dev {link}",
            f"link set {link} up",
            f"route add {address}/32 dev {link}",
        )
        await self._within(
            name,
            _NO_IPV6,
            "link set lo up",
            f"addr add {address}/32 dev eth0",
            "link set eth0 up",
            f"route add {_NEXT_HOP}/32 dev eth0 scope link",
            f"route add default via {_NEXT_HOP} dev eth0",
        )

    async def _within(self, name: str, script: str, *commands: str) -> None:
        """Run a shell script in a namespace, then commands of `ip`."""
        words = ("nsenter", f"--net={_NAMES / name}", "sh", "-c", script + "exec ip -batch -")
        await _run(*words, given="\n".join(commands) + "\n")

    async def _sweep(self) -> None:
        """Remove what clusters of dead processes have left."""
        for path in list(_NAMES.iterdir()) if _NAMES.exists() else []:
            found = _OURS.fullmatch(path.name)
            if found is not None and not Path("/proc", found[1]).exists():
                await _run("ip", "netns", "delete", path.name)


async def _run(*words: str, given: str = "") -> None:
    """Raises InputError with what the program said."""
    process = await asyncio.create_subprocess_exec(
        _find(words[0]),
        *words[1:],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=_environment(),
    )
    said, _ = await process.communicate(given.encode())
    if process.returncode:
        raise InputError(f"the fake cluster's network: {' '.join(words)}: {said.decode(errors='replace').strip()}")
