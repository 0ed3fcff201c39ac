"""What is to be done, the plan to do it, and one execution of the plan."""

from __future__ import annotations

import msgspec

from openforgerl.types.messages import JsonValue
from openforgerl.types.outcomes import Outcome


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task happens (Harbor `[environment]`)."""

    workdir: str = "/workspace"
    image: str | None = None
    """A ready image; None when `environment/Dockerfile` describes it."""
    dockerfile: str | None = None
    """Text of `environment/Dockerfile`."""
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    env: dict[str, str] = {}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Instruction, environment, artifacts, verifier; identified by what it contains."""

    name: str
    digest: str
    """sha256 over the sorted (relative path, mode bits that matter, bytes) of the task directory."""
    path: str
    """The directory it was read from."""
    instruction: str
    environment: Environment = Environment()
    agent_timeout: float = 900.0
    """Seconds of wall clock for the harness."""
    verifier_timeout: float = 600.0
    """Seconds of wall clock for the verifier."""
    verifier_env: dict[str, str] = {}
    artifacts: tuple[str, ...] = ()
    """Paths inside the sandbox that grading carries over, beyond the work directory."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    pass_threshold: float = 1.0
    """`passed` = reward ≥ this."""
    metadata: dict[str, JsonValue] = {}
    """Harbor `[metadata]`: family, split, ..."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One place in the plan."""

    rollout_id: str
    """Stable over restarts: derived from run, purpose, step, task and index."""
    run_id: str
    task: str
    """Task name."""
    task_digest: str
    harness: str
    """Registry name of the harness."""
    group_id: str
    """Rollouts with the same group_id form one GRPO group."""
    index: int
    """Place inside the group."""
    seed: int
    purpose: str
    """`teacher`, `train`, `eval:<stage>`, `try`."""
    step: int = 0
    """Optimizer step it was collected for; 0 outside RL."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of a rollout. Finished = its outcome row is committed.

    The outcome of a rollout is that of its last attempt.
    """

    attempt_id: str
    """`<rollout_id>-a<number>`; also the session id and the sandbox's name."""
    rollout_id: str
    number: int
    started_at: float
    finished_at: float | None = None
    outcome: Outcome | None = None
    weights_version: int = 0
    sandbox: dict[str, JsonValue] = {}
    """The sandbox's ref and report: backend, pid, namespaces, limits in force."""
    harness: dict[str, JsonValue] = {}
    """The harness's report: argv, package digest, exit code, output tails."""
    provenance: dict[str, JsonValue] = {}
    """What made it: versions, node, engine, seed, and digests of task, config and chat template."""
    timings: dict[str, float] = {}
    """Seconds per stage, and `queue`: the wait for a place before it."""
