"""NetworkPolicies as iptables rules of the place through which all traffic between pods goes. Pure.

What Kubernetes says of them is kept: they only add up; who is selected by none may do all; both ends must allow;
answers to what was allowed pass; and a pod always reaches its own node, and its node reaches it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from openforgerl.testing.fake_kubernetes import policies
from openforgerl.testing.fake_kubernetes.kinds import Object
from openforgerl.testing.fake_kubernetes.objects import Objects

HEAD = (
    "*filter",
    ":INPUT DROP [0:0]",
    ":FORWARD ACCEPT [0:0]",
    ":OUTPUT ACCEPT [0:0]",
    "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
)


@dataclass(frozen=True, slots=True)
class Member:
    """A pod of the network, as it was last seen, and its address."""

    pod: Object
    address: str


def ruleset(objects: Objects, members: Mapping[str, Member], node: str) -> str:
    """What `iptables-restore` takes. `members`: pod uid → who is there. `node`: the address of all nodes."""
    chains: list[str] = []
    lines = [f"-A FORWARD -{end} {node} -j ACCEPT" for end in "sd"]
    for number, member in enumerate(members.values()):
        for way, end in (("Egress", "s"), ("Ingress", "d")):
            rules = policies.rules_of(objects, member.pod, way)
            if rules is None:
                continue
            chain = f"{way}-{number}"
            chains.append(f":{chain} - [0:0]")
            lines.append(f"-A FORWARD -{end} {member.address} -j {chain}")
            for rule in rules:
                lines += [f"-A {chain} {match} -j RETURN" for match in _matches(objects, members, member, way, rule)]
            lines.append(f"-A {chain} -j DROP")
    return "\n".join((*HEAD[:4], *chains, HEAD[4], *lines, "COMMIT", ""))


def _matches(objects: Objects, members: Mapping[str, Member], member: Member, way: str, rule: Object) -> Iterator[str]:
    """One match for each peer and port that the rule allows."""
    peers: list[Object] = rule.get("to" if way == "Egress" else "from") or []
    ports: list[Object] = rule.get("ports") or []
    for network, peer in _peers(objects, members, member, peers):
        where = f"-{'d' if way == 'Egress' else 's'} {network}" if network else ""
        if not ports:
            yield where
        for port in ports:
            target = peer if way == "Egress" else member
            for door in _doors(port, target, members):
                yield f"{where} {door}".strip()


def _peers(
    objects: Objects, members: Mapping[str, Member], member: Member, peers: list[Object]
) -> Iterator[tuple[str, Member | None]]:
    """(network, the pod that it is); the network is empty for everybody."""
    if not peers:
        yield "", None
    home: str = member.pod["metadata"]["namespace"]
    for entry in peers:
        if "ipBlock" in entry:
            for network in _without(entry["ipBlock"]["cidr"], entry["ipBlock"].get("except") or []):
                yield network, None
            continue
        for other in members.values():
            if policies.is_peer(objects, entry, other.pod, home):
                yield f"{other.address}/32", other


def _doors(port: Object, target: Member | None, members: Mapping[str, Member]) -> Iterator[str]:
    """A port of a rule as matches. A name has a number in each pod; of addresses outside it has none."""
    protocol = str(port.get("protocol", "TCP")).lower()
    wanted = port.get("port")
    if wanted is None:
        yield f"-p {protocol}"
    elif isinstance(wanted, int):
        yield f"-p {protocol} --dport {wanted}:{port.get('endPort', wanted)}"
    else:
        for member in [target] if target is not None else members.values():
            number = policies.named_port(member.pod, wanted)
            if number > 0:
                where = "" if target is not None else f"-d {member.address}/32 "
                yield f"{where}-p {protocol} --dport {number}"


def _without(block: str, holes: list[str]) -> list[str]:
    """The networks that are left of `block` without `holes`. IPv6 has none here."""
    whole = ipaddress.ip_network(block)
    if whole.version != 4:
        return []
    left = [whole]
    for hole in map(ipaddress.ip_network, holes):
        rest: list[ipaddress.IPv4Network] = []
        for network in left:
            if hole.version == 4 and hole.subnet_of(network):
                rest += network.address_exclude(hole)
            elif hole.version != 4 or not network.subnet_of(hole):
                rest.append(network)
        left = rest
    return [str(network) for network in left]
