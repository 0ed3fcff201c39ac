"""What NetworkPolicies say. `enforcing.py` makes rules of them where pods have a network of their own."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

from openforgerl.testing.fake_kubernetes.kinds import NAMESPACES, POLICIES, Object
from openforgerl.testing.fake_kubernetes.objects import Objects


def allowed(objects: Objects, source: Object, target: Object | str, port: int, protocol: str = "TCP") -> bool:
    """Whether policies let `source` (a pod) reach `port` of `target` (a pod, or an address outside the cluster).

    Policies only add up: who is selected by none may do all, who is selected by some may do what one of them allows.
    """
    if not _passes(objects, source, "Egress", target, (port, protocol)):
        return False
    return isinstance(target, str) or _passes(objects, target, "Ingress", source, (port, protocol))


def rules_of(objects: Objects, pod: Object, way: str) -> list[Object] | None:
    """The `Ingress` or `Egress` rules of every policy that selects `pod`; None when none does: all is allowed."""
    rules, selected = list[Object](), False
    for policy in objects.list(POLICIES, pod["metadata"]["namespace"]):
        spec = policy.body["spec"]
        types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
        if way in types and matches(spec.get("podSelector") or {}, pod):
            selected = True
            rules += spec.get(way.lower()) or []
    return rules if selected else None


def _passes(objects: Objects, pod: Object, way: str, peer: Object | str, door: tuple[int, str]) -> bool:
    rules = rules_of(objects, pod, way)
    if rules is None:
        return True
    namespace = pod["metadata"]["namespace"]
    # ports are always the target's
    target = peer if way == "Egress" else pod
    peers = "to" if way == "Egress" else "from"
    return any(
        _takes_port(rule.get("ports") or [], target, door)
        and _takes_peer(objects, rule.get(peers) or [], peer, namespace)
        for rule in rules
    )


def _takes_port(ports: Iterable[Object], target: Object | str, door: tuple[int, str]) -> bool:
    port, protocol = door
    listed = list(ports)
    for entry in listed:
        wanted: Any = entry.get("port")
        if isinstance(wanted, str) and not isinstance(target, str):
            wanted = named_port(target, wanted)
        ends = entry.get("endPort", wanted)
        inside = wanted is None or (isinstance(wanted, int) and wanted <= port <= ends)
        if inside and entry.get("protocol", "TCP") == protocol:
            return True
    return not listed


def named_port(pod: Object, name: str) -> int:
    """The number of a container's named port; -1, which nothing matches, when there is none."""
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or []:
            if port.get("name") == name:
                return port["containerPort"]
    return -1


def _takes_peer(objects: Objects, peers: Iterable[Object], peer: Object | str, namespace: str) -> bool:
    listed = list(peers)
    return not listed or any(is_peer(objects, entry, peer, namespace) for entry in listed)


def is_peer(objects: Objects, entry: Object, peer: Object | str, namespace: str) -> bool:
    """Whether a rule's `entry` means `peer` (a pod, or an address outside). `namespace`: the policy's."""
    if "ipBlock" in entry:
        address = peer if isinstance(peer, str) else (peer.get("status") or {}).get("podIP", "")
        return bool(address) and _in_block(entry["ipBlock"], address)
    if isinstance(peer, str):
        return False
    return matches(entry.get("podSelector") or {}, peer) and _in_namespace(objects, entry, peer, namespace)


def _in_block(block: Object, address: str) -> bool:
    found = ipaddress.ip_address(address)
    return found in ipaddress.ip_network(block["cidr"]) and not any(
        found in ipaddress.ip_network(hole) for hole in block.get("except") or []
    )


def _in_namespace(objects: Objects, entry: Object, peer: Object, namespace: str) -> bool:
    home = peer["metadata"]["namespace"]
    if "namespaceSelector" not in entry:
        return home == namespace
    stored = objects.find(NAMESPACES, ("", home))
    return stored is not None and matches(entry["namespaceSelector"] or {}, stored.body)


def matches(selector: Object, body: Object) -> bool:
    """A `LabelSelector`; the empty one takes everything. Raises ValueError for an operator that there is not."""
    labels: dict[str, str] = body["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_expression(one, labels) for one in selector.get("matchExpressions") or [])


def _expression(expression: Object, labels: dict[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case other:
            raise ValueError(f"matchExpressions: operator {other!r} is none of In, NotIn, Exists, DoesNotExist")
