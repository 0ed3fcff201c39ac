"""ATIF 1.8, the Agent Trajectory Interchange Format, as data.

Source: the pydantic models of harbor 0.26 (`harbor/models/trajectories/`), which refuse unknown fields; a test holds
our documents against their rules. Older versions (1.0 to 1.7) are subsets.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from openforgerl.types import JsonValue

VERSION = "ATIF-v1.8"
VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))


class ImageSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an image or sound is: a path or URL."""

    media_type: str
    path: str
    duration_sec: float | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Text, or an image or sound by reference."""

    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: ImageSource | None = None


Content = str | list[ContentPart]


class AtifToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call; arguments must be an object."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, JsonValue]
    extra: dict[str, JsonValue] | None = None


class ObservationResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one tool call of the same step returned."""

    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[dict[str, JsonValue]] | None = None
    extra: dict[str, JsonValue] | None = None


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment answered to a step."""

    results: list[ObservationResult]


class Metrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one model call. `logprobs` parallel to `completion_token_ids`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    extra: dict[str, JsonValue] | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message; an agent's with what the environment answered."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: Content
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: dict[str, JsonValue] | None = None


class Agent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The agent system."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, JsonValue]] | None = None
    extra: dict[str, JsonValue] | None = None


class FinalMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums over the steps."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None
    extra: dict[str, JsonValue] | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One ATIF trajectory. `steps` are numbered from 1 and never empty."""

    schema_version: str
    agent: Agent
    steps: list[Step]
    session_id: str | None = None
    trajectory_id: str | None = None
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: dict[str, JsonValue] | None = None
    subagent_trajectories: list[Document] | None = None

    def __post_init__(self) -> None:
        if self.schema_version not in VERSIONS:
            raise ValueError(f"schema_version is {self.schema_version!r}; known: {VERSIONS[0]} to {VERSION}")
        if [step.step_id for step in self.steps] != list(range(1, len(self.steps) + 1)) or not self.steps:
            raise ValueError("steps must be there, with step_id 1, 2, 3, ...")
