"""The scripted expert: a teacher that acts through the same proxy and harness as every other model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from openforgerl.demo.families import expert_steps
from openforgerl.engines.script import Answer, Script, ScriptedToolCall
from openforgerl.errors import InputError
from openforgerl.types import Task

CHUNK_TOKENS = 16
"""Ids per streamed piece: a teacher need not be slow."""


class Teacher:
    """Picks a session's script by the task its id names (`<purpose>-<step>-<task>-<index>-a<number>`)."""

    def __init__(self, tasks: Mapping[str, Task], harness: str) -> None:
        """`tasks` by slug (the task's part of a rollout id); `harness` decides whose tools the expert uses."""
        self._tasks = tasks
        self._harness = harness

    def __call__(self, session_id: str) -> Script:
        """The expert's steps for one session; InputError when the id names no task of ours."""
        parts = session_id.split("-")
        slug = "-".join(parts[2:-2])
        task = self._tasks.get(slug)
        if task is None:
            raise InputError(f"session {session_id!r} names no task the teacher knows")
        return script_for(Path(task.path), self._harness)


def script_for(task_dir: Path, harness: str) -> Script:
    """The expert's turns for one task, in order: one tool call a turn, then its final words."""
    expert = expert_steps(task_dir, harness)
    calls = [
        Answer(
            tool_calls=(ScriptedToolCall(name=step.tool, arguments=dict(step.arguments)),), chunk_tokens=CHUNK_TOKENS
        )
        for step in expert.steps
    ]
    return Script(answers=(*calls, Answer(text=expert.final, chunk_tokens=CHUNK_TOKENS)))
