"""Conversations that others recorded, as samples for SFT: rendered as the policy's own template writes them.

Every turn that trains becomes a call whose prompt is the template's rendering of what came before, with earlier
such turns restored; rows are then made by the same code as for recorded attempts. A template that strips thoughts
from history so gives several rows, each with the context that the model will see, instead of one that it never will.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from openforgerl.conversation import MOST_NESTED, nested_too_deeply
from openforgerl.errors import InputError, TemplateError
from openforgerl.protocols import Renderer
from openforgerl.trajectory import SamplePolicy, build, build_samples
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    ModelCall,
    Role,
    Rollout,
    SampleSet,
    Source,
    ThreadRole,
)


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation from a file."""

    name: str
    """File and place in it; the samples' attempt, rollout and group id."""
    conversation: Conversation
    trains: frozenset[int]
    """Indices of the assistant messages that train; the others are context."""
    clock: float
    """What a template that prints the date is told, Unix seconds: when it was recorded, or the file written."""
    notes: tuple[str, ...] = ()
    """What of the file is not in it, in words that are the same for the same kind of loss."""

    def __post_init__(self) -> None:
        for index in self.trains:
            message = self.conversation.messages[index]
            if message.role is not Role.ASSISTANT:
                raise ValueError(f"messages[{index}] is of role {message.role}; only assistant turns train")


EMPTY_TURN = "an assistant turn without text, thought or tool call does not train"


def as_imported(
    name: str,
    conversation: Conversation,
    trains: Collection[int],
    *,
    clock: float,
    notes: Collection[str] = (),
) -> Imported:
    """The conversation, in which an assistant turn that says nothing is context: its stop token alone is no lesson.

    Raises ValueError for tools whose schemas lie too deep for any template.
    """
    for tool in conversation.tools:
        if nested_too_deeply(tool.parameters):
            raise ValueError(f"tool {tool.name}: its parameters lie more than {MOST_NESTED} levels deep")
    empty = {at for at in trains if not conversation.messages[at].parts and not conversation.messages[at].tool_calls}
    told = (*notes, EMPTY_TURN) if empty else tuple(notes)
    return Imported(name=name, conversation=conversation, trains=frozenset(trains) - empty, clock=clock, notes=told)


def samples_of(imported: Imported, renderer: Renderer) -> SampleSet:
    """The samples of an imported conversation, with source `import` and without log-probs.

    Raises InputError naming the conversation when the template cannot write it, or a first message would train.
    """
    calls: list[ModelCall] = []
    restored: dict[int, ModelCall] = {}
    messages = imported.conversation.messages
    for index in sorted(imported.trains):
        if index == 0:
            raise InputError(f"{imported.name}: messages[0] is an assistant turn that trains; nothing comes before it")
        before = msgspec.structs.replace(imported.conversation, messages=messages[:index])
        try:
            prompt = renderer.render(before, restored=restored, clock=imported.clock, kwargs={})
            sampled = renderer.encode_answer(messages[index], before)
        except TemplateError as error:
            raise InputError(f"{imported.name}: messages[{index}] cannot be rendered: {error}") from error
        call = ModelCall(
            call_id=f"c{index}",
            session_id=imported.name,
            index=len(calls),
            dialect="import",
            thread="main",
            role=ThreadRole.MAIN,
            role_evidence="imported",
            parent_call_id=calls[-1].call_id if calls else None,
            status=CallStatus.COMPLETE,
            conversation=before,
            prompt=prompt,
            sampled_ids=sampled,
            weights_version=0,
            finish_reason=FinishReason.STOP,
            answer=messages[index],
            timing=CallTiming(received=0.0),
        )
        calls.append(call)
        restored[index] = call
    return build_samples(
        build(imported.name, calls), rollout=_rollout(imported.name), source=Source.IMPORT, policy=SamplePolicy()
    )


def _rollout(name: str) -> Rollout:
    return Rollout(
        rollout_id=name,
        run_id="import",
        task=name,
        task_digest="",
        harness="import",
        group_id=name,
        index=0,
        seed=0,
        purpose="import",
    )
