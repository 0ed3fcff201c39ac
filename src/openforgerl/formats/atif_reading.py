"""Conversations from ATIF documents (versions 1.0 to 1.8), whoever wrote them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.formats.atif import RAW
from openforgerl.formats.atif_schema import AtifToolCall, Content, Document, ObservationResult, Step
from openforgerl.formats.importing import Imported, as_imported
from openforgerl.types import Conversation, JsonValue, Message, Part, Reasoning, Role, Text, ToolCall, ToolSpec


def read_atif(path: Path) -> list[Imported]:
    """The conversations of an ATIF file, or of all `*.json` in a folder; sub-agents' are conversations of their own.

    An agent step trains unless it is copied context or no model call (`llm_call_count` 0). Raises InputError naming
    the file and field that cannot be taken (images and sounds among them).
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} holds no ATIF document (*.json)")
    found: list[Imported] = []
    for file in files:
        try:
            document = msgspec.json.decode(file.read_bytes(), type=Document)
            found.extend(_conversations(document, str(file), file.stat().st_mtime))
        except ValueError as error:
            raise InputError(f"{file} cannot be taken as ATIF: {error}") from error
        except RecursionError as error:
            raise InputError(f"{file}: lists and objects lie too deep in one another") from error
    return found


def _conversations(document: Document, name: str, clock: float) -> Iterator[Imported]:
    """`clock`: the date where the document has none."""
    clock = next(filter(None, (_seconds(step) for step in document.steps)), clock)
    messages: list[Message] = []
    trains: set[int] = set()
    for step in document.steps:
        if step.source == "agent":
            if step.is_copied_context is not True and step.llm_call_count != 0:
                trains.add(len(messages))
            messages.append(_agent_message(step))
        else:
            messages.append(_other_message(step))
        for result in step.observation.results if step.observation is not None else ():
            messages.append(_result_message(result, step.step_id))
    tools = tuple(_tool(form) for form in document.agent.tool_definitions or ())
    yield as_imported(name, Conversation(messages=tuple(messages), tools=tools), trains, clock=clock)
    for number, inner in enumerate(document.subagent_trajectories or ()):
        known = f"-{inner.trajectory_id}" if inner.trajectory_id else ""  # nothing keeps two from having one id
        yield from _conversations(inner, f"{name}/{number}{known}", clock)


def _seconds(step: Step) -> float | None:
    """When it was, Unix seconds; None when that is not said, or not as ISO 8601."""
    with contextlib.suppress(ValueError, OverflowError):
        moment = datetime.fromisoformat(step.timestamp or "")
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return None


def _agent_message(step: Step) -> Message:
    parts: list[Part] = []
    if step.reasoning_content:
        parts.append(Reasoning(step.reasoning_content))
    if text := _text(step.message, f"step {step.step_id}"):
        parts.append(Text(text))
    calls = tuple(_tool_call(call) for call in step.tool_calls or ())
    return Message(role=Role.ASSISTANT, parts=tuple(parts), tool_calls=calls)


def _other_message(step: Step) -> Message:
    text = _text(step.message, f"step {step.step_id}")
    parts = (Text(text),) if text else ()
    said = (step.extra or {}).get("role")
    if said == Role.TOOL.value:  # a result whose call is not in the step before: our own export's spelling
        return Message(role=Role.TOOL, parts=parts, tool_call_id=str((step.extra or {}).get("tool_call_id", "")))
    role = Role.SYSTEM if step.source == "system" else Role.USER
    return Message(role=role, parts=parts, original_role=said if isinstance(said, str) else None)


def _result_message(result: ObservationResult, step_id: int) -> Message:
    """A tool result; one that names no call is what the agent without tools reads next, from the user."""
    text = "" if result.content is None else _text(result.content, f"an observation of step {step_id}")
    parts = (Text(text),) if text else ()
    if result.source_call_id is None:
        return Message(role=Role.USER, parts=parts)
    is_error = bool((result.extra or {}).get("is_error"))
    return Message(role=Role.TOOL, parts=parts, tool_call_id=result.source_call_id, is_error=is_error)


def _tool_call(call: AtifToolCall) -> ToolCall:
    extra = call.extra or {}
    raw = extra.get(RAW)
    namespace = extra.get("namespace")
    return ToolCall(
        id=call.tool_call_id,
        name=call.function_name,
        arguments=raw if isinstance(raw, str) else msgspec.json.encode(call.arguments).decode(),
        freeform=extra.get("freeform") is True,
        namespace=namespace if isinstance(namespace, str) else None,
    )


def _tool(form: dict[str, JsonValue]) -> ToolSpec:
    function = form.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("agent.tool_definitions must be function schemas with a name")
    return ToolSpec(
        name=function["name"],
        description=str(function.get("description") or ""),
        parameters=function.get("parameters"),
        raw=form,
    )


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    other = next((part.type for part in content if part.type != "text"), None)
    if other is not None:
        raise ValueError(f"{where} holds {other}; only text can be imported")
    return "".join(part.text or "" for part in content)
