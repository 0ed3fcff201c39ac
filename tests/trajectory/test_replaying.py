"""Which call of a new session stands for which of the record, and what is a difference between their requests."""

from __future__ import annotations

import msgspec
import pytest

from openforgerl.trajectory.replaying import Record, compare_sessions, request_difference
from openforgerl.types import Conversation, Message, ModelCall, Prompt, Role, Text, ThreadRole, ToolCall

from .world import World, play


def renamed(call: ModelCall, **fields: object) -> ModelCall:
    return msgspec.structs.replace(call, call_id=f"new-{call.call_id}", **fields)


def turn(call_id: str, seen: str = "a.txt", arguments: str = "{}") -> Conversation:
    made = ToolCall(id=call_id, name="bash", arguments=arguments)
    return Conversation(
        messages=(
            Message(role=Role.USER, parts=(Text("go"),)),
            Message(role=Role.ASSISTANT, tool_calls=(made,)),
            Message(role=Role.TOOL, tool_call_id=call_id, parts=(Text(seen),)),
        )
    )


def test_calls_are_matched_by_their_place_in_their_thread() -> None:
    """Two sub-agents whose ids a harness draws anew, answered in another order."""
    world = play(2, [World.turn, World.spawn, World.spawn])
    ours = {"subagent:a1": "subagent:77", "subagent:a2": "subagent:88"}
    assert {call.thread for call in world.calls} == {"main", *ours}
    record = Record(world.calls)
    for call in world.calls:
        found = record.next(renamed(call, thread=ours.get(call.thread, call.thread)))
        assert found is not None and found.call_id == call.call_id
    assert record.next(renamed(world.calls[0])) is None  # main is used up
    assert record.next(renamed(world.calls[0], thread="subagent:99", role=ThreadRole.SUBAGENT)) is None


def test_a_thread_keeps_its_name_where_it_can() -> None:
    world = play(2, [World.spawn, World.spawn])
    first, second = (call for call in world.calls if call.role is ThreadRole.SUBAGENT)
    record = Record(world.calls)
    later, earlier = record.next(renamed(second)), record.next(renamed(first))
    assert later == second and earlier == first


def test_ids_of_tool_calls_are_no_difference_but_what_they_answer_is() -> None:
    assert request_difference(turn("call_1"), turn("toolu_9")) is None
    found = request_difference(turn("call_1"), turn("toolu_9", seen="b.txt"))
    assert found is not None
    assert (found.cause, found.where, found.before, found.now) == (
        "observation_edited",
        "messages[2]",
        "a.txt",
        "b.txt",
    )
    crossed = turn("x")
    crossed = msgspec.structs.replace(
        crossed, messages=(*crossed.messages[:2], msgspec.structs.replace(crossed.messages[2], tool_call_id="y"))
    )
    assert request_difference(turn("x"), crossed) is not None


def test_more_and_fewer_messages_are_differences() -> None:
    short = Conversation(messages=turn("x").messages[:1])
    longer, shorter = request_difference(short, turn("x")), request_difference(turn("x"), short)
    assert longer is not None and (longer.cause, longer.where) == ("history_edited", "messages[1]")
    assert shorter is not None and (shorter.cause, shorter.where) == ("history_edited", "messages[1]")


def test_a_session_against_itself_and_with_planted_faults() -> None:
    world = play(3, [World.turn, World.aborted_turn, World.title])
    again = [renamed(call) for call in world.calls]
    same = compare_sessions(world.calls, again)
    assert not same.diverged
    assert [call.state for call in same.calls] == ["same"] * len(world.calls)
    other_ids = [*again[:-1], renamed(world.calls[-1], prompt=Prompt(ids=(1, 2)))]
    assert compare_sessions(world.calls, other_ids).calls[-1].other_ids
    fewer = compare_sessions(world.calls, again[:-1])
    assert fewer.diverged and fewer.not_asked == (world.calls[-1].call_id,)
    more = compare_sessions(world.calls[:2], again[:3])
    assert more.diverged and more.calls[2].state == "not_in_record"
    changed = msgspec.structs.replace(again[1].conversation, tools=())
    cut = compare_sessions(world.calls, [again[0], msgspec.structs.replace(again[1], conversation=changed), *again[2:]])
    assert [call.state for call in cut.calls][:3] == ["same", "diverged", "same"]
    assert cut.calls[1].difference is not None and cut.calls[1].difference.cause == "tools_changed"


@pytest.mark.parametrize(("fork", "states"), [(0, ["live"] * 3), (2, ["same", "same", "live"]), (9, ["same"] * 3)])
def test_after_a_fork_nothing_is_compared_or_missed(fork: int, states: list[str]) -> None:
    world = play(3, [World.turn, World.turn, World.turn])
    found = compare_sessions(world.calls, [renamed(call) for call in world.calls[:3]], fork=fork)
    assert [call.state for call in found.calls] == states
    assert found.diverged == (fork == 9)  # call 3 was to be asked for again


@pytest.mark.parametrize(
    ("changes", "where", "before", "now"),
    [
        ({"sampling_asked": {"temperature": 0.1}}, "temperature", "", "0.1"),
        ({"sampling_asked": {"stop": ["a"]}}, "stop", "", '["a"]'),
        ({"request": {"tool_choice": "required"}}, "tool_choice", "", '"required"'),
        ({"request": {"model": "other", "metadata": {"id": 7}}}, None, "", ""),
    ],
)
def test_what_a_request_asks_of_the_sampler_is_compared(
    changes: dict[str, object], where: str | None, before: str, now: str
) -> None:
    world = play(1, [World.turn])
    changed = [renamed(call, **changes) for call in world.calls]
    for call in compare_sessions(world.calls, changed).calls:
        if where is None:
            assert call.state == "same"
        else:
            assert call.difference is not None and call.state == "diverged"
            assert (call.difference.where, call.difference.before, call.difference.now) == (where, before, now)
    assert world.calls
