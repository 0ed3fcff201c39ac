"""Reads KubeRay's RayJob, from a checkout of its source: names, types and bounds, no descriptions.

    python scripts/read_kuberay.py CHECKOUT v1.7.0 > tests/kubernetes/schemas/kuberay.json

The manifests in deploy/ray are held to this file. Pods and Services inside are not in it: they are Kubernetes' own
types, and tests read those elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

_OURS = "x-kind"
"""Where Kubernetes' own type stands in the tree, its name under this key."""
_KEPT = ("type", "required", "enum", "minimum", "maximum", "minItems", "maxLength", "pattern", "default")
_KEPT_FLAGS = ("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")


def main() -> None:
    """Print the schemas of the checkout named first, at the tag named second."""
    checkout, tag = Path(sys.argv[1]), sys.argv[2]
    found: dict[str, Any] = {"source": "github.com/ray-project/kuberay ray-operator/config/crd/bases", "tag": tag}
    found["commit"] = _git(checkout, "rev-parse", f"{tag}^{{commit}}")
    text = _git(checkout, "show", f"{tag}:ray-operator/config/crd/bases/ray.io_rayjobs.yaml")
    version = next(one for one in yaml.safe_load(text)["spec"]["versions"] if one["name"] == "v1")
    found["RayJob"] = trimmed(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    print(json.dumps(found, indent=1))


def trimmed(schema: dict[str, Any]) -> dict[str, Any]:
    """What a validator needs of a schema."""
    if kind := _foreign(schema):
        return {_OURS: kind}
    kept = {key: schema[key] for key in (*_KEPT, *_KEPT_FLAGS) if key in schema}
    if "properties" in schema:
        kept["properties"] = {name: trimmed(one) for name, one in schema["properties"].items() if name != "status"}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            kept[key] = trimmed(schema[key])
    if rules := schema.get("x-kubernetes-validations"):
        kept["rules"] = [one["rule"] for one in rules]
    return kept


def _foreign(schema: dict[str, Any]) -> str:
    """Name of the Kubernetes type that a schema is, by its fields."""
    fields = schema.get("properties", {})
    inner = fields.get("spec", {}).get("properties", {})
    if "containers" in inner:
        return "PodTemplateSpec"
    if "clusterIP" in inner:
        return "Service"
    if {"claims", "limits", "requests"} <= fields.keys():
        return "ResourceRequirements"
    if {"allowPrivilegeEscalation", "capabilities"} <= fields.keys():
        return "SecurityContext"
    if {"name", "valueFrom"} <= fields.keys():
        return "EnvVar"
    if {"configMapRef", "secretRef"} <= fields.keys():
        return "EnvFromSource"
    if {"mountPath", "subPath"} <= fields.keys():
        return "VolumeMount"
    return ""


def _git(checkout: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", checkout, *words], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
