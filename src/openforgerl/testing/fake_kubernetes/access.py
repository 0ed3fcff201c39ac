"""Who may do what: bearer tokens, each with the rules of its roles."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openforgerl.testing.fake_kubernetes import statuses
from openforgerl.testing.fake_kubernetes.kinds import Object, Target

MASTERS = "system:masters"


@dataclass(frozen=True, slots=True)
class User:
    """Somebody with a token. `rules` as in a Role, `namespace` where they hold (empty: everywhere)."""

    name: str
    rules: tuple[dict[str, Any], ...] = ()
    namespace: str = ""
    groups: tuple[str, ...] = ("system:authenticated",)

    @property
    def master(self) -> bool:
        """May do everything and is never throttled."""
        return MASTERS in self.groups

    def may(self, verb: str, group: str, label: str, namespace: str, name: str = "") -> bool:
        """Whether some rule allows `verb` on `label` (`pods`, `pods/log`)."""
        if self.master:
            return True
        if self.namespace and namespace != self.namespace:
            return False
        return any(_allows(rule, verb, group, label, name) for rule in self.rules)


def _allows(rule: dict[str, Any], verb: str, group: str, label: str, name: str) -> bool:
    def has(field: str, value: str) -> bool:
        listed = rule.get(field) or []
        return value in listed or "*" in listed

    names = rule.get("resourceNames") or []
    return has("verbs", verb) and has("apiGroups", group) and has("resources", label) and (not names or name in names)


@dataclass(slots=True)
class Access:
    """The tokens of a cluster."""

    users: dict[str, User] = field(default_factory=dict[str, User])

    def add(self, name: str, rules: Sequence[dict[str, Any]] = (), *, namespace: str = "", master: bool = False) -> str:
        """A new token for `name`. `rules`: those of a Role, and of `namespace` only when it is given."""
        token = secrets.token_urlsafe(24)
        groups = (MASTERS, "system:authenticated") if master else ("system:authenticated",)
        self.users[token] = User(name, tuple(rules), namespace, groups)
        return token

    def authenticate(self, header: str | None) -> User:
        """The user of an Authorization header. Raises Refusal (401)."""
        kind, _, token = (header or "").partition(" ")
        user = self.users.get(token.strip()) if kind.lower() == "bearer" else None
        if user is None:
            raise statuses.unauthorized()
        return user


def authorize(user: User, verb: str, target: Target) -> None:
    """Raises Refusal (403) in the words of RBAC."""
    resource = target.resource
    if resource.plural == "selfsubjectaccessreviews":
        return  # everybody may ask what they may do
    namespace = target.name if resource.plural == "namespaces" else target.namespace
    if user.may(verb, resource.group, target.label, namespace if resource.namespaced else "", target.name):
        return
    where = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    why = f'User "{user.name}" cannot {verb} resource "{target.label}" in API group "{resource.group}" {where}'
    raise statuses.forbidden(resource.plural, resource.group, target.name, why)


def review(user: User, body: Object) -> Object:
    """The answer to a SelfSubjectAccessReview."""
    asked: dict[str, Any] = body.get("spec", {}).get("resourceAttributes") or {}
    label = asked.get("resource", "")
    if asked.get("subresource"):
        label += f"/{asked['subresource']}"
    allowed = user.may(
        asked.get("verb", ""), asked.get("group", ""), label, asked.get("namespace", ""), asked.get("name", "")
    )
    return {
        "kind": "SelfSubjectAccessReview",
        "apiVersion": "authorization.k8s.io/v1",
        "metadata": {},
        "spec": body.get("spec", {}),
        "status": {"allowed": allowed} | ({} if allowed else {"reason": "no rule allows it"}),
    }
