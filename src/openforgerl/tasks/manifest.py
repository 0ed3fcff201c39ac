"""`task.toml` of a Harbor task, schema 1.0 to 1.4, read leniently: what it means and what is odd about it.

Source: the Harbor task format (PyPI `harbor` 0.26). Legacy spellings are understood and reported; a key that
nobody knows is reported with a suggestion; what this project cannot give a task is an error, because running
it anyway would grade something else.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from openforgerl.tasks.section import Finding, Findings, Section
from openforgerl.types import JsonValue

SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*/?[A-Za-z0-9_-])*[A-Za-z0-9._-]*")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_MEGABYTES = {"K": 1 / 1024, "": 1 / 1024**2, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `task.toml` says. Timeouts in seconds, sizes in MiB; None = not said."""

    name: str | None = None
    metadata: dict[str, JsonValue] = {}
    agent_timeout: float | None = None
    verifier_timeout: float | None = None
    verifier_env: dict[str, str] = {}
    artifacts: tuple[str, ...] = ()
    reward_range: tuple[float, float] = (0.0, 1.0)
    pass_threshold: float | None = None
    image: str | None = None
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    env: dict[str, str] = {}


def read_manifest(table: dict[str, Any]) -> tuple[Manifest, list[Finding]]:
    """The manifest of a decoded `task.toml` and everything odd about it, errors included."""
    findings = Findings()
    top = Section("", table, findings)
    _version(top, findings)
    task = top.section("task")
    name = task.text("name")
    if name is not None and not _NAME.fullmatch(name):
        findings.error("task.name", f"{name!r} must be letters, digits, '.', '_', '-', with at most single slashes")
    task.known("version", "authors", "keywords", "description")
    task.done()
    verifier = top.section("verifier")
    reward_range, threshold = _reward(verifier, findings)
    agent = top.section("agent")
    values: dict[str, Any] = {
        "name": name,
        "metadata": top.table("metadata"),
        "agent_timeout": _timeout(agent, findings),
        "verifier_timeout": _timeout(verifier, findings),
        "verifier_env": _env(verifier, findings),
        "artifacts": _artifacts(top, findings),
        "reward_range": reward_range,
        "pass_threshold": threshold,
        **_environment(top.section("environment"), findings),
    }
    _agent(agent, findings)
    _verifier(verifier, findings)
    top.section("solution").known("env")
    if top.take("steps"):
        findings.error("steps", "multi-step tasks are not supported; split it into tasks of one step")
    top.known("multi_step_reward_strategy", "source", "min_reward")
    top.done()
    return Manifest(**values), list(findings)


def _version(top: Section, findings: Findings) -> None:
    version = top.take("schema_version", legacy=("version",))
    if version is None:
        findings.warning("schema_version", 'is missing; write schema_version = "1.4"')
    elif str(version) not in SCHEMA_VERSIONS:
        findings.warning("schema_version", f"{version!r} is not one of {', '.join(SCHEMA_VERSIONS)}; read as 1.4")


def _timeout(section: Section, findings: Findings) -> float | None:
    value = section.number("timeout_sec", legacy=("timeout",))
    if value is not None and not value > 0:
        findings.error(f"{section.name}.timeout_sec", f"must be above 0 seconds; got {value!r}")
        return None
    return value


def _agent(agent: Section, findings: Findings) -> None:
    agent.known("user", "network_mode", "allowed_hosts")
    if agent.has("user"):
        findings.warning("agent.user", "is ignored: the agent always runs as an unprivileged user")
    _network(agent, findings)
    agent.done()


def _verifier(verifier: Section, findings: Findings) -> None:
    mode = verifier.text("environment_mode")
    if mode not in (None, "shared"):
        findings.error("verifier.environment_mode", f"{mode!r} is not supported; accepted: shared")
    if verifier.take("environment"):
        findings.error("verifier.environment", "an environment of the verifier's own is not supported")
    if verifier.take("collect"):
        findings.error("verifier.collect", "is not supported; name what grading needs in `artifacts`")
    if verifier.has("user"):
        findings.warning("verifier.user", "is ignored: the verifier runs in a fresh sandbox as its own user")
    verifier.known("user")
    verifier.done()


def _reward(verifier: Section, findings: Findings) -> tuple[tuple[float, float], float | None]:
    declared = verifier.take("reward_range")
    threshold = verifier.number("pass_threshold")
    bounds = (0.0, 1.0)
    if declared is not None:
        numbers = [value for value in declared if _finite(value)] if isinstance(declared, list) else []
        if len(numbers) == 2 and len(declared) == 2 and numbers[0] < numbers[1]:
            bounds = (float(numbers[0]), float(numbers[1]))
        else:
            findings.error("verifier.reward_range", f"must be two finite numbers, low before high; got {declared!r}")
    if threshold is not None and not bounds[0] <= threshold <= bounds[1]:
        findings.error("verifier.pass_threshold", f"must lie in the reward range {list(bounds)}; got {threshold!r}")
    return bounds, threshold


def _environment(section: Section, findings: Findings) -> dict[str, Any]:
    operating_system = section.text("os")
    if operating_system not in (None, "linux"):
        findings.error("environment.os", f"{operating_system!r} is not supported; accepted: linux")
    for key in ("gpus", "tpu", "mcp_servers", "healthcheck"):
        if section.take(key):
            findings.error(f"environment.{key}", "no sandbox backend gives this yet; leave it out")
    if section.has("skills_dir"):
        findings.warning("environment.skills_dir", "is ignored: no harness here reads it")
    section.known("skills_dir", "build_timeout_sec", "network_mode", "allowed_hosts", "allow_internet")
    workdir = section.text("workdir")
    if workdir is not None and not workdir.startswith("/"):
        findings.error("environment.workdir", f"must be an absolute path inside the sandbox; got {workdir!r}")
    _network(section, findings)
    values = {
        "image": section.text("docker_image"),
        "workdir": workdir,
        "cpus": section.number("cpus", legacy=("cpu",)),
        "memory_mb": _size(section, "memory_mb", "memory", findings),
        "storage_mb": _size(section, "storage_mb", "storage", findings),
        "env": _env(section, findings),
    }
    section.done()
    return values


def _network(section: Section, findings: Findings) -> None:
    mode = section.text("network_mode")
    if section.take("allow_internet") is True or mode in ("public", "allowlist"):
        findings.warning(f"{section.name}.network_mode", "a sandbox reaches the model and nothing else: no-network")
    elif mode not in (None, "no-network"):
        findings.warning(f"{section.name}.network_mode", f"{mode!r} is not one of public, no-network, allowlist")


def _size(section: Section, key: str, legacy: str, findings: Findings) -> int | None:
    value = section.take(key, legacy=(legacy,))
    if value is None:
        return None
    megabytes: float | None = None
    if _finite(value):
        megabytes = float(value)
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        megabytes = float(match[1]) * _MEGABYTES[match[2].upper()]
    if megabytes is None or megabytes < 1:
        findings.error(f"{section.name}.{key}", f'must be a size in MiB of at least 1 (or "2G"); got {value!r}')
        return None
    return math.ceil(megabytes)


def _env(section: Section, findings: Findings) -> dict[str, str]:
    result: dict[str, str] = {}
    for name, value in section.table("env").items():
        where = f"{section.name}.env.{name}"
        if not isinstance(value, str):
            findings.error(where, f"must be a string; got {value!r}")
            continue
        bare = [match[1] for match in _VARIABLE.finditer(value) if match[2] is None]
        if bare:
            findings.error(
                where, f"${{{bare[0]}}} needs a default (${{{bare[0]}:-value}}): host variables stay outside"
            )
        result[name] = _VARIABLE.sub(lambda match: match[2] or "", value)
    return result


def _artifacts(top: Section, findings: Findings) -> tuple[str, ...]:
    declared = top.take("artifacts") or []
    paths: list[str] = []
    for index, item in enumerate(declared if isinstance(declared, list) else [declared]):
        path = item.get("source") if isinstance(item, dict) else item
        if isinstance(path, str) and path.startswith("/") and ".." not in path.split("/"):
            paths.append(path)
        else:
            findings.error(f"artifacts[{index}]", f"must be an absolute path inside the sandbox; got {item!r}")
    return tuple(paths)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
