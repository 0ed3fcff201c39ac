"""Numbers of histories say what comparing them message by message says, and cost what is new."""

from __future__ import annotations

import random

from openforgerl.conversation import digest_outline, same_message
from openforgerl.trajectory.histories import UNSEEN, Histories
from openforgerl.trajectory.threads import attribute
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
)


def said(rng: random.Random) -> Message:
    """One of few messages, in spellings that are canonically equal or differ in their thought only."""
    text = rng.choice("ab")
    if rng.random() < 0.5:
        return Message(role=Role.USER, parts=rng.choice(((Text(text),), (Text(text), Text("")))))
    arguments = rng.choice(('{"x": 1, "y": 2}', '{"y":2.0,"x":1}', '{"x": 1'))
    return Message(
        role=Role.ASSISTANT,
        parts=rng.choice(((Text(text),), (Reasoning("t", rng.choice((None, "h"))), Text(text)))),
        tool_calls=(ToolCall(id=rng.choice(("call_1", "call1")), name="f", arguments=arguments),),
    )


def call(number: int, messages: tuple[Message, ...], answer: Message | None) -> ModelCall:
    return ModelCall(
        call_id=f"c{number}",
        session_id="s",
        index=number,
        dialect="chat",
        thread="main",
        role=ThreadRole.MAIN,
        role_evidence="",
        parent_call_id=f"c{number - 1}" if number else None,
        status=CallStatus.INTENT if answer is None else CallStatus.COMPLETE,
        conversation=Conversation(messages=messages),
        prompt=Prompt(ids=()),
        weights_version=0,
        finish_reason=None if answer is None else FinishReason.STOP,
        answer=answer,
        timing=CallTiming(received=0.0),
    )


def same(left: tuple[Message, ...], right: tuple[Message, ...]) -> bool:
    return len(left) == len(right) and all(map(same_message, left, right))


def alike(left: tuple[Message, ...], right: tuple[Message, ...]) -> bool:
    return [digest_outline(message) for message in left] == [digest_outline(message) for message in right]


def test_two_histories_have_one_number_when_they_are_equal() -> None:
    rng, equal = random.Random(0), 0
    for _ in range(60):
        histories, known = Histories(), list[ModelCall]()
        for number in range(6):
            messages = tuple(said(rng) for _ in range(rng.randrange(3)))
            known.append(call(number, messages, said(rng) if rng.random() < 0.7 else None))
            histories.asked(known[-1])
            histories.answered(known[-1])
        asked = tuple(said(rng) for _ in range(4))
        path = histories.path(asked)
        for one in known:
            theirs = one.conversation.messages
            end = histories.asked(one)
            assert (path.exact[end.length] == end.exact) == same(theirs, asked[: end.length])
            assert (path.outline[end.length] == end.outline) == alike(theirs, asked[: end.length])
            after = histories.answered(one)
            assert (after is None) == (one.answer is None)
            if after is not None and one.answer is not None:
                whole = (*theirs, one.answer)
                assert (path.exact[after.length] == after.exact) == same(whole, asked[: after.length])
                equal += path.exact[after.length] == after.exact
    assert equal > 5


def test_an_intent_that_got_its_answer_is_read_anew() -> None:
    histories = Histories()
    user, answer = Message(role=Role.USER, parts=(Text("u"),)), Message(role=Role.ASSISTANT, parts=(Text("a"),))
    assert histories.answered(call(0, (user,), None)) is None
    done = histories.answered(call(0, (user,), answer))
    assert done is not None and done.exact == histories.path((user, answer)).exact[-1]
    other = Message(role=Role.ASSISTANT, parts=(Text("b"),))
    changed = histories.answered(call(0, (user,), other))
    assert changed is not None and changed.exact != done.exact


def test_a_growing_conversation_adds_what_is_new_and_a_question_adds_nothing() -> None:
    histories, messages, known = Histories(), tuple[Message, ...](), list[ModelCall]()
    for number in range(200):
        messages += (Message(role=Role.USER, parts=(Text(f"u{number}"),)),)
        found = attribute(known, Conversation(messages=messages), headers={}, opening=not known, histories=histories)
        assert found.parent_call_id == (f"c{number - 1}" if number else None)
        assert sorted(found.restored) == list(range(1, 2 * number, 2))
        answer = Message(role=Role.ASSISTANT, parts=(Text(f"a{number}"),))
        known.append(call(number, messages, answer))
        messages += (answer,)
    attribute(known, Conversation(messages=messages), headers={}, opening=False, histories=histories)
    assert histories.size == 400  # a number for each beginning of the whole
    strange = tuple(Message(role=Role.USER, parts=(Text(f"x{number}"),)) for number in range(50))
    assert set(histories.path(strange).exact[1:]) == {UNSEEN}
    assert histories.size == 400
