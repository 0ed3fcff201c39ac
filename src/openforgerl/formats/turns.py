"""A row as a conversation: which assistant message is which call's answer, and which of them train in this row."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from openforgerl.conversation import same_message
from openforgerl.errors import StoreError
from openforgerl.types import Conversation, ModelCall, Role, Sample


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """An assistant message of a row."""

    index: int
    """Of the message in the row's conversation."""
    call: ModelCall | None
    """Whose sampled tokens this row holds in spans; None for turns that are context here."""
    trains: bool
    """All of the call's tokens in this row train."""


class RowTurns(msgspec.Struct, frozen=True, kw_only=True):
    """What a row says, in messages."""

    conversation: Conversation
    """The last call's conversation with its answer."""
    turns: tuple[Turn, ...]
    """Every assistant message, in order."""
    unplaced: int
    """Trained tokens of calls whose answer the row's last conversation no longer shows, or that train in part."""


def row_turns(sample: Sample, calls: Mapping[str, ModelCall]) -> RowTurns | None:
    """The conversation that ends in the row's last call; None when that call has no answer (cut before any text).

    `calls` by id. The row's id names its last call. Raises StoreError when a call of the row is not among them.
    """
    leaf_id = sample.sample_id.rpartition("/")[2]
    missing = {leaf_id, *(span.call_id for span in sample.spans)} - calls.keys()
    if missing:
        raise StoreError(
            f"sample {sample.sample_id} is made of call {min(missing)}, which the run does not hold: it is damaged "
            "(openforgerl audit says what else is)"
        )
    leaf = calls[leaf_id]
    if leaf.answer is None:
        return None
    messages = (*leaf.conversation.messages, leaf.answer)
    held: dict[str, list[bool]] = {}
    for span in sample.spans:
        held.setdefault(span.call_id, []).append(span.state == "trained")
    placed: dict[int, ModelCall] = {}
    for call_id in held:
        call = calls[call_id]
        index = len(call.conversation.messages)
        if call.answer is not None and index < len(messages) and same_message(messages[index], call.answer):
            placed[index] = call
    trained = {call.call_id for call in placed.values() if all(held[call.call_id])}
    unplaced = sum(
        span.stop - span.start for span in sample.spans if span.state == "trained" and span.call_id not in trained
    )
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        if message.role is Role.ASSISTANT:
            call = placed.get(index)
            turns.append(Turn(index=index, call=call, trains=call is not None and call.call_id in trained))
    conversation = msgspec.structs.replace(leaf.conversation, messages=messages)
    return RowTurns(conversation=conversation, turns=tuple(turns), unplaced=unplaced)
