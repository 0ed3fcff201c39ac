"""Whose request is it, what does it continue, and which turns may be restored."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest

from openforgerl.trajectory import Attribution, attribute, build, carried
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    Message,
    ModelCall,
    Prompt,
    Reasoning,
    Role,
    Text,
    ThreadRole,
    ToolCall,
    ToolSpec,
)

TOOLS = (ToolSpec(name="bash", parameters={"type": "object"}),)


def system(text: str = "You are an agent.") -> Message:
    return Message(role=Role.SYSTEM, parts=(Text(text),))


def user(*texts: str) -> Message:
    return Message(role=Role.USER, parts=tuple(map(Text, texts)))


def said(text: str, *, thought: str = "", arguments: str | None = None) -> Message:
    calls = () if arguments is None else (ToolCall(id="call_1", name="bash", arguments=arguments),)
    parts = (Reasoning(thought), Text(text)) if thought else (Text(text),)
    return Message(role=Role.ASSISTANT, parts=parts, tool_calls=calls)


def result(text: str = "ok") -> Message:
    return Message(role=Role.TOOL, parts=(Text(text),), tool_call_id="call_1")


START = (system(), user("do it"))


class Recorder:
    """A session's calls, attributed as they come."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []

    def ask(self, *messages: Message, tools: tuple[ToolSpec, ...] = TOOLS, **rest: object) -> Attribution:
        return self.attribute(list(self.calls), messages, tools, **rest)

    def attribute(
        self,
        known: list[ModelCall],
        messages: tuple[Message, ...],
        tools: tuple[ToolSpec, ...],
        headers: dict[str, str] | None = None,
        max_tokens: int | None = None,
        opening: bool | None = None,
    ) -> Attribution:
        return attribute(
            known,
            Conversation(messages=messages, tools=tools),
            headers=headers or {},
            opening=not known if opening is None else opening,
            max_tokens=max_tokens,
        )

    def record(
        self,
        *messages: Message,
        answer: Message | None = None,
        status: CallStatus = CallStatus.COMPLETE,
        finish: FinishReason = FinishReason.STOP,
        tools: tuple[ToolSpec, ...] = TOOLS,
        headers: dict[str, str] | None = None,
        max_tokens: int | None = None,
    ) -> ModelCall:
        found = self.ask(*messages, tools=tools, headers=headers, max_tokens=max_tokens)
        index = len(self.calls)
        call = ModelCall(
            call_id=f"c{index}",
            session_id="s",
            index=index,
            dialect="chat",
            thread=found.thread,
            role=found.role,
            role_evidence=found.evidence,
            parent_call_id=found.parent_call_id,
            status=status,
            conversation=Conversation(messages=messages, tools=tools),
            prompt=Prompt(ids=(1,)),
            weights_version=0,
            answer=answer,
            finish_reason=finish,
            timing=CallTiming(received=0.0),
            request_headers=headers or {},
        )
        self.calls.append(call)
        return call


def test_a_conversation_grows_and_its_turns_are_restored() -> None:
    session = Recorder()
    first = session.record(*START, answer=said("a", arguments='{"x": 1}'))
    assert (first.thread, first.role, first.parent_call_id) == ("main", ThreadRole.MAIN, None)
    history = (*START, said("a", arguments='{ "x":1.0 }'), result())  # the harness wrote the arguments anew
    second = session.record(*history, answer=said("b"))
    found = session.ask(*history, said("b"), user("more"))
    assert (found.thread, found.role, found.parent_call_id) == ("main", ThreadRole.MAIN, "c1")
    assert found.restored == {2: first, 4: second}


def test_an_altered_answer_is_no_parent() -> None:
    session = Recorder()
    session.record(*START, answer=said("a", arguments='{"x": 1}'))
    found = session.ask(*START, said("a", arguments='{"x": true}'), result())
    assert (found.parent_call_id, found.restored) == (None, {})
    assert (found.thread, found.role) == ("main", ThreadRole.MAIN)  # yet it is the main conversation, rewritten
    assert found.evidence.startswith("rewrites c0")


def test_a_history_without_reasoning_has_a_parent_and_restores_what_it_repeats() -> None:
    session = Recorder()
    first = session.record(*START, answer=said("a"))
    session.record(*START, said("a"), result(), answer=said("b", thought="hm"))
    found = session.ask(*START, said("a"), result(), said("b"), user("more"))
    assert found.parent_call_id == "c1"
    assert "reasoning dropped" in found.evidence
    assert found.restored == {2: first}


def test_a_turn_after_a_changed_one_is_not_restored() -> None:
    """c1's own answer is repeated exactly, but what stood before it when it was sampled is not."""
    session = Recorder()
    session.record(*START, answer=said("a", thought="hm"))
    session.record(*START, said("a", thought="hm"), result(), answer=said("b"))
    found = session.ask(*START, said("a"), result(), said("b"), user("more"))
    assert (found.parent_call_id, found.restored) == ("c1", {})


@pytest.mark.parametrize(
    ("status", "finish"),
    [(CallStatus.ABORTED, FinishReason.ABORTED), (CallStatus.COMPLETE, FinishReason.STOP_STRING)],
)
def test_what_was_not_delivered_whole_is_not_restored(status: CallStatus, finish: FinishReason) -> None:
    session = Recorder()
    session.record(*START, answer=said("a"), status=status, finish=finish)
    found = session.ask(*START, said("a"), user("go on"))
    assert (found.parent_call_id, found.restored) == ("c0", {})


def test_other_tools_are_no_prefix_but_the_same_conversation() -> None:
    """Tools stand in the prompt, so nothing can be restored; the sampled answer in the history says whose it is."""
    session = Recorder()
    session.record(*START, answer=said("a"))
    found = session.ask(*START, said("a"), result(), tools=(*TOOLS, ToolSpec(name="more")))
    assert (found.thread, found.role) == ("main", ThreadRole.MAIN)
    assert (found.parent_call_id, found.restored) == (None, {})
    unsampled = session.ask(*START, user("x"), tools=(*TOOLS, ToolSpec(name="more")))
    assert unsampled.role is ThreadRole.UNATTRIBUTED


def test_identical_requests_are_siblings_and_the_continued_one_is_the_parent() -> None:
    session = Recorder()
    session.record(*START, answer=said("a"))
    session.record(*START, said("a"), result(), answer=said("b"))
    session.record(*START, said("a"), result(), answer=said("c"))
    session.record(*START, said("a"), result(), answer=None, status=CallStatus.ERROR)
    assert {(call.thread, call.parent_call_id) for call in session.calls[1:]} == {("main", "c0")}
    assert session.ask(*START, said("a"), result(), said("b"), user("x")).parent_call_id == "c1"
    assert session.ask(*START, said("a"), result(), said("c"), user("x")).parent_call_id == "c2"


def test_of_equal_answers_the_last_fully_delivered_is_the_parent() -> None:
    session = Recorder()
    for status in (CallStatus.COMPLETE, CallStatus.COMPLETE, CallStatus.ABORTED):
        session.record(*START, answer=said("same"), status=status)
    found = session.ask(*START, said("same"), user("x"))
    assert found.parent_call_id == "c1"
    assert found.restored == {2: session.calls[1]}


def test_the_order_of_the_known_calls_does_not_matter() -> None:
    session = Recorder()
    session.record(*START, answer=said("same"))
    session.record(*START, answer=said("same"))
    session.record(system(), user("other"), answer=said("same"))
    session.record(*START, said("same"), result(), answer=said("b"))
    asked = [
        (*START, said("same"), user("x")),
        (*START, said("same"), result(), said("b"), user("x")),
        (*START, said("edited"), user("x")),
        (system(), user("third")),
        START,
    ]
    for messages in asked:
        found = {
            msgspec.json.encode(session.attribute(list(order), messages, TOOLS))
            for order in itertools.permutations(session.calls)
        }
        assert len(found) == 1


def test_a_failed_opening_may_be_asked_differently() -> None:
    """Nothing of the main conversation was delivered, so what comes next still opens the session."""
    session = Recorder()
    session.record(*START, answer=None, status=CallStatus.ERROR)
    assert session.ask(system("You are an agent."), user("do it, please")).role is ThreadRole.MAIN
    session.record(*START, answer=None, status=CallStatus.INTENT)
    assert session.ask(system(), user("something else")).role is ThreadRole.UNATTRIBUTED


def test_a_conversation_nobody_announces_is_unattributed() -> None:
    session = Recorder()
    session.record(*START, answer=said("a"))
    rogue = session.record(system("You judge."), user("score this"), tools=(), answer=said("10"))
    assert rogue.role is ThreadRole.UNATTRIBUTED
    follow = session.ask(system("You judge."), user("score this"), said("10"), user("again"), tools=())
    assert (follow.thread, follow.role) == (rogue.thread, ThreadRole.UNATTRIBUTED)
    other = session.ask(system("You judge."), user("score that"), tools=())
    assert other.thread != rogue.thread


def test_a_system_prompt_that_changes_with_every_request_is_the_same_conversation() -> None:
    session = Recorder()
    session.record(system("count 1"), user("do it"), answer=said("a"))
    second = session.record(system("count 2"), user("do it"), said("a"), result(), answer=said("b"))
    assert (second.thread, second.role, second.parent_call_id) == ("main", ThreadRole.MAIN, None)
    assert second.role_evidence == "continues c0 under another system prompt"
    third = session.ask(system("count 3"), user("do it"), said("a"), result(), said("b"), result())
    assert third.evidence == "continues c1 under another system prompt"
    # The task alone proves nothing, nor does an answer that nobody sampled or other tools.
    assert session.ask(system("count 4"), user("do it")).role is ThreadRole.UNATTRIBUTED
    assert session.ask(system("count 4"), user("do it"), said("x"), result()).role is ThreadRole.UNATTRIBUTED
    told = (system("count 4"), user("do it"), said("a"), result())
    assert session.ask(*told, tools=()).role is ThreadRole.UNATTRIBUTED


def test_a_first_message_that_changes_with_every_request_is_the_same_conversation() -> None:
    session = Recorder()
    session.record(system(), user("now 10:01\ndo it"), answer=said("a"))
    second = session.record(system(), user("now 10:02\ndo it"), said("a"), result(), answer=said("b"))
    assert (second.thread, second.role, second.parent_call_id) == ("main", ThreadRole.MAIN, None)
    assert second.role_evidence == "continues c0 under another first message"
    third = (said("a"), result(), said("b"), result())
    assert session.ask(system("count 3"), user("now 10:03\ndo it"), *third).thread == "main"  # both at once
    # Not by the lines alone, nor by the answers alone, nor with other tools.
    assert session.ask(system(), user("now 10:04\ndo it")).role is ThreadRole.UNATTRIBUTED
    assert session.ask(system(), user("now 10:04\ndo it"), said("x"), result()).role is ThreadRole.UNATTRIBUTED
    assert session.ask(system(), user("now 10:04\ndo that"), *third).role is ThreadRole.UNATTRIBUTED
    assert session.ask(system(), user("now 10:04\ndo it"), *third, tools=()).role is ThreadRole.UNATTRIBUTED
    edited = session.ask(system(), user("now 10:04\ndo it"), said("a"), user("?"), said("b"))
    assert edited.evidence == "continues c0 under another first message"


def test_unannounced_children_with_the_main_system_prompt_stay_apart() -> None:
    session = Recorder()
    session.record(*START, answer=said("a"))
    one = session.record(system(), user("child one"), answer=said("x"))
    two = session.record(system(), user("child two"), answer=said("x"), tools=(*TOOLS, ToolSpec(name="more")))
    assert len({"main", one.thread, two.thread}) == 3
    assert session.ask(system(), user("child one"), said("x"), result()).parent_call_id == one.call_id
    assert session.ask(*START, said("a"), result()).thread == "main"


@pytest.mark.parametrize(
    ("headers", "agent"),
    [
        ({"thread-id": "t2", "x-codex-parent-thread-id": "t1", "x-openai-subagent": "collab_spawn"}, "t2"),
        ({"X-Claude-Code-Session-Id": "z", "x-claude-code-agent-id": "a7"}, "a7"),
        ({"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, "ses_2"),
    ],
)
def test_harnesses_announce_their_sub_agents(headers: dict[str, str], agent: str) -> None:
    session = Recorder()
    session.record(*START, answer=said("a"))
    child = session.record(system(), user("child"), answer=said("x"), headers=headers)
    assert (child.thread, child.role) == (f"subagent:{agent}", ThreadRole.SUBAGENT)
    follow = session.ask(system(), user("child"), said("x"), result(), headers=headers)
    assert (follow.thread, follow.role, follow.parent_call_id) == (child.thread, ThreadRole.SUBAGENT, child.call_id)


def test_two_sub_agents_with_the_same_request_are_no_retries() -> None:
    session = Recorder()
    session.record(*START, answer=said("a"))
    one = session.record(system(), user("child"), answer=said("x"), headers={"x-claude-code-agent-id": "1"})
    two = session.record(system(), user("child"), answer=said("x"), headers={"x-claude-code-agent-id": "2"})
    assert (one.thread, two.thread) == ("subagent:1", "subagent:2")
    for call, agent in ((one, "1"), (two, "2")):
        found = session.ask(system(), user("child"), said("x"), result(), headers={"x-claude-code-agent-id": agent})
        assert (found.thread, found.parent_call_id) == (call.thread, call.call_id)


def test_a_forked_sub_agent_continues_the_main_history_on_a_thread_of_its_own() -> None:
    session = Recorder()
    first = session.record(*START, answer=said("a"))
    fork = session.ask(*START, said("a"), user("child task"), headers={"x-claude-code-agent-id": "f"})
    assert (fork.thread, fork.role, fork.parent_call_id) == ("subagent:f", ThreadRole.SUBAGENT, "c0")
    assert fork.restored == {2: first}


def test_a_title_request_that_comes_first_does_not_take_the_main_place() -> None:
    session = Recorder()
    title = session.record(system("You are a title generator. Short."), user("do it"), tools=(), answer=said("It"))
    assert title.role is ThreadRole.SIDE
    assert session.ask(*START).role is ThreadRole.MAIN
    assert session.ask(*START, opening=False).role is ThreadRole.MAIN
    assert Recorder().ask(*START, opening=False).role is ThreadRole.UNATTRIBUTED


def test_a_probe_is_a_side_request() -> None:
    assert Recorder().ask(user("Hi"), tools=(), max_tokens=1).role is ThreadRole.SIDE
    assert Recorder().ask(user("Hi"), tools=(), max_tokens=2).role is ThreadRole.MAIN


def test_compaction_by_words_and_what_goes_on_from_its_summary() -> None:
    session = Recorder()
    session.record(*START, answer=said("a"))
    summary = "The file was made; what is left is to check it."
    compaction = session.record(
        system("You are a context summarization assistant. Do not continue."),
        user("<conversation>...</conversation>"),
        tools=(),
        answer=said(summary),
    )
    assert compaction.role is ThreadRole.COMPACTION
    after = session.ask(system(), user(f"The conversation before was compacted: <summary>{summary}</summary>"))
    assert (after.thread, after.role, after.parent_call_id) == ("main", ThreadRole.MAIN, None)
    assert "summary of c1" in after.evidence
    # With another system prompt, or without the summary, nothing says that it is the main conversation.
    assert session.ask(system("Other."), user(f"<summary>{summary}</summary>")).role is ThreadRole.UNATTRIBUTED
    assert session.ask(system(), user("<summary></summary>")).role is ThreadRole.UNATTRIBUTED


def test_compaction_inside_the_history() -> None:
    """claude-code adds a block to the last user message; qwen-code a message; codex drops the tools."""
    session = Recorder()
    session.record(*START, answer=said("a"))
    words = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."
    inside = session.ask(*START, said("a"), user("next", words))
    assert (inside.role, inside.parent_call_id) == (ThreadRole.COMPACTION, "c0")
    assert inside.thread.startswith("compaction:")
    assert inside.restored == {2: session.calls[0]}
    reminded = session.ask(*START, said("a"), user("next", words), system("The date has changed."))
    assert reminded.role is ThreadRole.COMPACTION
    answered = session.ask(*START, said("a"), user(words), said("b"), user("next"))
    assert answered.role is ThreadRole.MAIN
    quoted = session.ask(*START, said("a"), user(f"what does this mean: {words}"))
    assert quoted.role is ThreadRole.MAIN
    codex = session.ask(*START, said("a"), user("You are performing a CONTEXT CHECKPOINT COMPACTION. ..."), tools=())
    assert codex.role is ThreadRole.COMPACTION
    qwen = session.ask(*START, said("a"), user("You are the component that summarizes a conversation when ..."))
    assert (qwen.role, qwen.parent_call_id) == (ThreadRole.COMPACTION, "c0")


def test_the_harnesss_own_word_for_a_compaction() -> None:
    session = Recorder()
    session.record(*START, answer=said("a"))
    metadata = '{"session_id":"s","request_kind":"compaction","window_number":0}'
    found = session.ask(*START, said("a"), user("Sum up."), tools=(), headers={"X-Codex-Turn-Metadata": metadata})
    assert (found.role, found.thread[:11]) == (ThreadRole.COMPACTION, "compaction:")
    assert found.evidence == 'header x-codex-turn-metadata holds "request_kind":"compaction"'
    turn = metadata.replace("compaction", "turn")
    assert session.ask(*START, said("a"), user("x"), headers={"x-codex-turn-metadata": turn}).role is ThreadRole.MAIN


def test_a_subagent_that_only_its_words_tell_apart() -> None:
    session = Recorder()
    session.record(*START, answer=said("a"))
    child = (system("You are a general-purpose subagent. Do the task."), user("child task"))
    first = session.record(*child, answer=said("b"))
    assert (first.role, first.thread[:9]) == (ThreadRole.SUBAGENT, "subagent:")
    assert session.ask(*child, said("b"), user("go on")).thread == first.thread
    edited = session.ask(*child, said("edited"), user("go on"))
    assert (edited.role, edited.thread, edited.parent_call_id) == (ThreadRole.SUBAGENT, first.thread, None)
    other = session.ask(child[0], user("another task"))
    assert other.role is ThreadRole.SUBAGENT
    assert other.thread != first.thread
    # The words count at the very beginning of the system prompt, nowhere else.
    assert session.ask(system("Note: You are a general-purpose subagent"), user("x")).role is ThreadRole.UNATTRIBUTED


def test_a_subagent_that_carries_the_task_it_was_given() -> None:
    session = Recorder()
    task = "Copy a.txt to b.txt for me, child."
    call = ToolCall(id="c", name="invoke_agent", arguments=json.dumps({"agent_name": "generalist", "prompt": task}))
    session.record(*START, answer=Message(role=Role.ASSISTANT, tool_calls=(call,)))
    child = (system("Do the task, then call complete_task."), user(f"<context/> {task}"))
    first = session.record(*child, answer=said("b"))
    assert (first.role, first.role_evidence) == (ThreadRole.SUBAGENT, "carries the task that c0 gave to invoke_agent")
    assert session.ask(*child, said("edited"), user("go on")).thread == first.thread
    assert session.ask(child[0], user("Copy a.txt")).role is ThreadRole.UNATTRIBUTED


def test_a_task_handed_over_word_for_word_does_not_take_the_main_conversation_away() -> None:
    session = Recorder()
    start = (system(), user("Copy a.txt to b.txt, and say when it is done."))
    call = ToolCall(id="c", name="agent", arguments=json.dumps({"prompt": start[1].text}))
    session.record(*start, answer=Message(role=Role.ASSISTANT, tool_calls=(call,)))
    assert session.ask(*start, said("edited"), user("go on")).role is ThreadRole.MAIN
    assert session.ask(system("Child."), start[1]).role is ThreadRole.SUBAGENT


def test_a_first_message_that_quotes_the_one_before_it() -> None:
    """openclaw, after a call that broke off before the first turn was whole."""
    session = Recorder()
    opening = user("[Tue 2026-12-01 00:03 UTC] Copy a.txt to b.txt.")
    session.record(system(), opening, answer=said("I am"), status=CallStatus.ERROR, finish=FinishReason.ERROR)
    sign = "[Tue 2026-12-01 00:04 UTC] [Queued user message from a previous active turn; preserved as context only.]"
    anew = user(f"{sign}\nCopy a.txt to b.txt.\n\nContinue the current task.")
    found = session.ask(system(), anew)
    assert (found.thread, found.role, found.parent_call_id) == ("main", ThreadRole.MAIN, None)
    assert found.evidence == "asks c0 anew"
    for other in (
        (system("Other."), anew),
        (system(), user(f"{sign}\nDelete everything.")),
        (system(), user("Copy a.txt to b.txt. Continue the current task.")),
    ):
        assert session.ask(*other).role is ThreadRole.UNATTRIBUTED
    assert session.ask(system(), anew, tools=()).role is ThreadRole.UNATTRIBUTED


def test_a_header_keeps_the_main_conversation_together_over_a_rewrite() -> None:
    session = Recorder()
    session.record(*START, answer=said("a"), headers={"thread-id": "t1"})
    after = session.ask(system("new prompt"), user("new start"), headers={"Thread-Id": "t1"})
    assert (after.thread, after.role) == ("main", ThreadRole.MAIN)
    assert session.ask(system("new prompt"), user("x"), headers={"thread-id": "t9"}).role is ThreadRole.UNATTRIBUTED


def test_a_dropped_turn_goes_back_to_the_call_before() -> None:
    session = Recorder()
    first = session.record(*START, answer=said("a"))
    session.record(*START, said("a"), result(), answer=said("malformed"))
    found = session.ask(*START, said("a"), result(), user("No tool call found."))
    assert (found.thread, found.parent_call_id, found.restored) == ("main", "c0", {2: first})


def test_a_rewrite_of_the_main_history_is_not_given_to_those_that_share_its_beginning() -> None:
    session = Recorder()
    session.record(*START, answer=said("a"))
    history = (*START, said("a"), result())
    session.record(*history, answer=said("b"))
    fork = session.record(*history, user("child task"), headers={"x-claude-code-agent-id": "f"}, answer=said("c"))
    summary = session.record(*history, user("CRITICAL: Respond with TEXT ONLY."), answer=said("d"))
    assert (fork.role, summary.role) == (ThreadRole.SUBAGENT, ThreadRole.COMPACTION)
    found = session.ask(*START, said("altered"), result(), user("go on"))
    assert (found.thread, found.role) == ("main", ThreadRole.MAIN)
    found = session.ask(*START, said("a"), result("altered"), said("b"), user("go on"))
    assert (found.thread, found.role, found.parent_call_id) == ("main", ThreadRole.MAIN, "c0")


# -- edges by tokens


def test_only_a_stop_token_may_give_way_to_the_templates_closing() -> None:
    base = Recorder().record(*START, answer=said("a"))

    def call(index: int, ids: tuple[int, ...], sampled: tuple[int, ...], finish: FinishReason) -> ModelCall:
        return msgspec.structs.replace(
            base,
            call_id=f"c{index}",
            index=index,
            prompt=Prompt(ids=ids),
            sampled_ids=sampled,
            finish_reason=finish,
            parent_call_id=f"c{index - 1}" if index else None,
        )

    stop = call(0, (1, 2), (7, 8, 9), FinishReason.STOP)
    cut = call(0, (1, 2), (7, 8, 9), FinishReason.LENGTH)
    whole = call(1, (1, 2, 7, 8, 9, 3), (4,), FinishReason.STOP)
    replaced = call(1, (1, 2, 7, 8, 5, 3), (4,), FinishReason.STOP)
    other = call(1, (1, 2, 7, 0, 9, 3), (4,), FinishReason.STOP)
    moved = call(1, (1, 0, 7, 8, 9, 3), (4,), FinishReason.STOP)
    assert [carried(stop, child) for child in (whole, replaced, other, moved)] == [3, 2, None, None]
    assert [carried(cut, child) for child in (whole, replaced, other, moved)] == [3, None, None, None]
    assert [branch.calls for branch in build("a", [stop, whole]).branches] == [("c0", "c1")]
    assert [branch.calls for branch in build("a", [stop, other]).branches] == [("c0",), ("c1",)]
