"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from openforgerl.testing.fake_kubernetes import statuses
from openforgerl.testing.fake_kubernetes.kinds import Object, Resource

Selector = Callable[[Object], bool]

_SET = re.compile(r"^(!?)([^\s=!,()]+)$|^([^\s=!,()]+)\s+(in|notin)\s*\(([^()]*)\)$")
_EQUAL = re.compile(r"^([^\s=!,()]+)\s*(==|=|!=)\s*([^\s=!,()]*)$")


def _terms(text: str) -> list[str]:
    """Split at the commas that stand outside parentheses."""
    return [term.strip() for term in re.split(r",(?![^()]*\))", text) if term.strip()]


def by_labels(text: str) -> Selector:
    """`a=b,c!=d,e in (f,g),h notin (i),j,!k`. Raises Refusal (400) for anything else."""
    tests = [_label_test(term) for term in _terms(text)]

    def matches(body: Object) -> bool:
        labels: dict[str, str] = body["metadata"].get("labels") or {}
        return all(test(labels) for test in tests)

    return matches


def _label_test(term: str) -> Callable[[dict[str, str]], bool]:
    if equal := _EQUAL.match(term):
        key, operator, value = equal.groups()
        # as in Kubernetes: what lacks the label is unequal to every value
        return lambda labels: (labels.get(key) == value) != (operator == "!=")
    found = _SET.match(term)
    if found is None:
        raise statuses.bad_request(f"unable to parse requirement: {term!r} is no label selector")
    absent, bare, key, operator, listed = found.groups()
    if bare is not None:
        return lambda labels: (bare in labels) != bool(absent)
    values = {value.strip() for value in listed.split(",")}
    return lambda labels: (labels.get(key) in values) != (operator == "notin")


def by_fields(resource: Resource, text: str) -> Selector:
    """`metadata.name=x,status.phase!=Running`. Raises Refusal (400) for a field that cannot be selected by."""
    tests: list[tuple[list[str], str, bool]] = []
    for term in _terms(text):
        equal = _EQUAL.match(term)
        if equal is None:
            raise statuses.bad_request(f"invalid selector: {term!r}; can't understand it")
        path, operator, value = equal.groups()
        if not resource.check_field(path):
            raise statuses.bad_request(f"field label not supported: {path}")
        tests.append((path.split("."), value, operator == "!="))

    def matches(body: Object) -> bool:
        return all((_at(body, path) == value) != differs for path, value, differs in tests)

    return matches


def _at(body: Object, path: list[str]) -> str:
    value: Any = body
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def both(labels: str, fields: str, resource: Resource) -> Selector | None:
    """The selector of a request's `labelSelector` and `fieldSelector`; None when it takes everything."""
    tests = ([by_labels(labels)] if labels else []) + ([by_fields(resource, fields)] if fields else [])
    return (lambda body: all(test(body) for test in tests)) if tests else None
