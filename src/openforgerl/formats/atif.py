"""ATIF documents from recorded attempts, one for each row, and conversations from ATIF documents.

A row is one conversation as the model saw it, so it is one document: `session_id` is the attempt, `trajectory_id` the
sample, and a row whose thread goes on in another one (after a compaction, say) names that file in
`continued_trajectory_ref`. A turn that trains in this row has its exact ids and log-probs in `metrics`; one that
trains elsewhere, or was never sampled, is `is_copied_context`, which ATIF keeps out of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from openforgerl.conversation import parse_arguments
from openforgerl.formats.atif_schema import (
    VERSION,
    Agent,
    AtifToolCall,
    Content,
    ContentPart,
    Document,
    FinalMetrics,
    ImageSource,
    Metrics,
    Observation,
    ObservationResult,
    Step,
)
from openforgerl.formats.files import PartialOutput
from openforgerl.formats.records import AttemptRecord, Decode, Report, Tally
from openforgerl.formats.turns import RowTurns, Turn, row_turns
from openforgerl.rendering.renderer import tool_form
from openforgerl.types import Image, JsonValue, Message, ModelCall, Role, Sample, Text, ToolCall

RAW = "arguments_raw"
"""`extra` key: a tool call's arguments as sampled, where the object alone would not give them back."""


class AtifDocuments:
    """Writes `atif`: a folder with one file per row, `<attempt>-<number>.json`."""

    def __init__(self, out: Path, decode: Decode | None = None) -> None:
        self._partial = PartialOutput(out, folder=True)
        self._tally = Tally()

    def add(self, record: AttemptRecord) -> None:
        """One document per row that has an answer."""
        calls = {call.call_id: call for call in record.calls}
        rows: list[tuple[Sample, RowTurns]] = []
        for sample in record.samples.samples:
            found = row_turns(sample, calls)
            if found is None:
                self._tally.lost("rows that end in a call without an answer")
                self._tally.lost("sampled tokens of such rows", sample.span_tokens)
                continue
            rows.append((sample, found))
        names = {sample.sample_id: f"{record.attempt.attempt_id}-{at}.json" for at, (sample, _) in enumerate(rows)}
        for at, (sample, found) in enumerate(rows):
            leaf = calls[sample.sample_id.rpartition("/")[2]]
            later = (row for row, _ in rows[at + 1 :] if _thread(row, calls) == leaf.thread)
            following = next((names[row.sample_id] for row in later), None)
            document = _document(record, sample, found, leaf, following)
            (self._partial.path / names[sample.sample_id]).write_bytes(msgspec.json.encode(document))
            self._count(sample, found)
        in_rows = {span.call_id for sample in record.samples.samples for span in sample.spans}
        self._tally.lost("calls that are in no row (retries, aborted)", len(calls.keys() - in_rows))

    def close(self) -> Report:
        """Give the folder its name."""
        self._partial.finish()
        return self._tally.report()

    def abandon(self) -> None:
        """Remove the unfinished folder."""
        self._partial.remove()

    def _count(self, sample: Sample, found: RowTurns) -> None:
        self._tally.row(sample)
        placed = {turn.call.call_id for turn in found.turns if turn.call is not None}
        unplaced = sum(span.stop - span.start for span in sample.spans if span.call_id not in placed)
        self._tally.lost("sampled tokens of turns that the history does not show", unplaced)
        for message in found.conversation.messages:
            images = sum(isinstance(part, Image) for part in message.parts)
            self._tally.lost("image bytes (kept by sha256)", images)
            bad = sum(not isinstance(parse_arguments(call.arguments), dict) for call in message.tool_calls)
            self._tally.lost(f"arguments that are no object (their text is in extra.{RAW})", bad)


def _thread(sample: Sample, calls: Mapping[str, ModelCall]) -> str:
    return calls[sample.sample_id.rpartition("/")[2]].thread


def _document(
    record: AttemptRecord, sample: Sample, found: RowTurns, leaf: ModelCall, following: str | None
) -> Document:
    steps = _steps(found, sample)
    metrics = [step.metrics for step in steps if step.metrics is not None]
    tools = [tool_form(tool) for tool in found.conversation.tools]
    verdict = record.verdict
    return Document(
        schema_version=VERSION,
        session_id=record.attempt.attempt_id,
        trajectory_id=sample.sample_id,
        agent=Agent(
            name=record.rollout.harness,
            version=str(record.attempt.harness.get("version", "unknown")),
            tool_definitions=tools or None,
        ),
        steps=steps,
        continued_trajectory_ref=following,
        final_metrics=FinalMetrics(
            total_prompt_tokens=sum(entry.prompt_tokens or 0 for entry in metrics),
            total_completion_tokens=sum(entry.completion_tokens or 0 for entry in metrics),
            total_steps=len(steps),
        ),
        extra={
            "task": record.rollout.task,
            "rollout_id": record.rollout.rollout_id,
            "group_id": record.rollout.group_id,
            "purpose": record.rollout.purpose,
            "step": record.rollout.step,
            "thread": leaf.thread,
            "role": leaf.role.value,
            "template_digest": sample.template_digest,
            "verdict": msgspec.to_builtins(verdict),
            "totals": msgspec.to_builtins(record.samples.totals),
        },
    )


def _steps(found: RowTurns, sample: Sample) -> list[Step]:
    turns = {turn.index: turn for turn in found.turns}
    steps: list[Step] = []
    for index, message in enumerate(found.conversation.messages):
        if message.role is Role.TOOL and _observed(steps, message):
            continue
        if message.role is Role.ASSISTANT:
            steps.append(_agent_step(len(steps) + 1, message, turns[index], sample))
            continue
        extra: dict[str, JsonValue] = {}
        if message.original_role or message.role is Role.TOOL:
            extra["role"] = message.original_role or message.role.value
        if message.tool_call_id is not None:
            extra["tool_call_id"] = message.tool_call_id
        source = "system" if message.role is Role.SYSTEM else "user"
        steps.append(Step(step_id=len(steps) + 1, source=source, message=_content(message), extra=extra or None))
    return steps


def _observed(steps: list[Step], message: Message) -> bool:
    """Put a tool result into the step that made its call: only the last one can be meant. Whether that worked."""
    last = steps[-1] if steps else None
    if last is None or not any(call.tool_call_id == message.tool_call_id for call in last.tool_calls or ()):
        return False
    result = ObservationResult(
        source_call_id=message.tool_call_id,
        content=_content(message),
        extra={"is_error": True} if message.is_error else None,
    )
    results = [*(last.observation.results if last.observation else ()), result]
    steps[-1] = msgspec.structs.replace(last, observation=Observation(results=results))
    return True


def _agent_step(number: int, message: Message, turn: Turn, sample: Sample) -> Step:
    call = turn.call
    return Step(
        step_id=number,
        source="agent",
        message=_content(message),
        reasoning_content=message.reasoning or None,
        tool_calls=[_tool_call(made) for made in message.tool_calls] or None,
        timestamp=None if call is None else datetime.fromtimestamp(call.timing.received, UTC).isoformat(),
        metrics=None if call is None else _metrics(call),
        is_copied_context=None if turn.trains else True,
        llm_call_count=None if call is None else 1,
        extra=None if call is None else _fate(call, sample),
    )


def _metrics(call: ModelCall) -> Metrics:
    return Metrics(
        prompt_tokens=len(call.prompt.ids),
        completion_tokens=len(call.sampled_ids),
        prompt_token_ids=call.prompt.ids,
        completion_token_ids=call.sampled_ids,
        logprobs=call.logprobs,
    )


def _fate(call: ModelCall, sample: Sample) -> dict[str, JsonValue]:
    spans = [msgspec.to_builtins(span) for span in sample.spans if span.call_id == call.call_id]
    finish = None if call.finish_reason is None else call.finish_reason.value
    return {"call_id": call.call_id, "status": call.status.value, "finish_reason": finish, "spans": spans}


def _tool_call(call: ToolCall) -> AtifToolCall:
    parsed = parse_arguments(call.arguments)
    arguments: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
    extra: dict[str, JsonValue] = {}
    if not isinstance(parsed, dict) or msgspec.json.encode(arguments).decode() != call.arguments:
        extra[RAW] = call.arguments
    if call.freeform:
        extra["freeform"] = True
    if call.namespace:
        extra["namespace"] = call.namespace
    return AtifToolCall(tool_call_id=call.id, function_name=call.name, arguments=arguments, extra=extra or None)


def _content(message: Message) -> Content:
    """Text as one string; a list of parts only where there are images."""
    if not any(isinstance(part, Image) for part in message.parts):
        return message.text
    parts: list[ContentPart] = []
    for part in message.parts:
        if isinstance(part, Image):
            source = ImageSource(media_type=part.media_type, path=f"sha256:{part.sha256}")
            parts.append(ContentPart(type="image", source=source))
        elif isinstance(part, Text):
            parts.append(ContentPart(type="text", text=part.text))
    return parts
