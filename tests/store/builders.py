"""Calls, attempts and plans for store tests."""

from __future__ import annotations

import msgspec

from openforgerl.types import (
    Attempt,
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    Message,
    ModelCall,
    OriginSpan,
    Prompt,
    Role,
    Rollout,
    Sampling,
    Session,
    SessionState,
    Text,
    ThreadRole,
    ToolSpec,
    Verdict,
)

TOOLS = tuple(
    ToolSpec(
        name=name, description=f"{name}: " + "what it does and when to use it. " * 20, parameters={"type": "object"}
    )
    for name in ("bash", "read", "edit", "write")
)
SYSTEM = "You are an agent. " * 200


def call(index: int = 0, *, session: str = "s", parent: str | None = None, **fields: object) -> ModelCall:
    """A small finished call; `fields` replace."""
    values: dict[str, object] = {
        "call_id": f"{session}-c{index}",
        "session_id": session,
        "index": index,
        "dialect": "chat",
        "thread": "main",
        "role": ThreadRole.MAIN,
        "role_evidence": "opening",
        "parent_call_id": parent,
        "status": CallStatus.COMPLETE,
        "conversation": Conversation(messages=(Message(role=Role.USER, parts=(Text(f"task {index}"),)),)),
        "prompt": Prompt(ids=(1, 2, 3 + index)),
        "sampled_ids": (7, 8, 9),
        "logprobs": (-0.1, -1 / 3, -2e-300),
        "weights_version": 4,
        "finish_reason": FinishReason.STOP,
        "sampling_asked": {"temperature": 1, "seed": None},
        "sampling_applied": Sampling(temperature=0.7),
        "answer": Message(role=Role.ASSISTANT, parts=(Text("done"),)),
        "timing": CallTiming(received=1.25, first_token=2.5, finished=3.75),
        "request": {"messages": [{"role": "user", "content": f"task {index}"}], "max_tokens": 5, "top_p": 1.0},
        "response": {"id": "r", "choices": []},
    }
    return ModelCall(**(values | fields))  # type: ignore[arg-type]


def intent(finished: ModelCall) -> ModelCall:
    """The row that was there before `finished` was generated."""
    return msgspec.structs.replace(
        finished,
        status=CallStatus.INTENT,
        sampled_ids=(),
        logprobs=None,
        sampling_logprobs=None,
        finish_reason=None,
        answer=None,
        response=None,
    )


def long_session(turns: int, session: str = "s") -> list[ModelCall]:
    """An appending conversation: each turn answers 20 ids and gets an observation of 60 ids and 400 characters."""
    calls: list[ModelCall] = []
    messages = [
        Message(role=Role.SYSTEM, parts=(Text(SYSTEM),)),
        Message(role=Role.USER, parts=(Text("Do the task."),)),
    ]
    ids = tuple(range(1000))
    origins = [OriginSpan(start=0, stop=1000, kind="data", message=0)]
    tools = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in TOOLS]
    for turn in range(turns):
        answer = Message(role=Role.ASSISTANT, parts=(Text(f"answer {turn} " + "y" * 80),))
        sampled = tuple(50_000 + turn * 20 + i for i in range(20))
        calls.append(
            call(
                turn,
                session=session,
                parent=calls[-1].call_id if calls else None,
                conversation=Conversation(messages=tuple(messages), tools=TOOLS),
                prompt=Prompt(ids=ids, origins=tuple(origins)),
                sampled_ids=sampled,
                logprobs=tuple(-1 / (turn + i + 1) for i in range(20)),
                answer=answer,
                request={"model": "m", "messages": [wire(message) for message in messages], "tools": tools},
                response={"id": f"r{turn}", "choices": [{"message": wire(answer)}]},
            )
        )
        observation = Message(role=Role.TOOL, tool_call_id=f"t{turn}", parts=(Text(f"{turn}: " + "z" * 400),))
        messages += [answer, observation]
        origins += [
            OriginSpan(start=len(ids), stop=len(ids) + 20, kind="call", call_id=calls[-1].call_id, offset=0),
            OriginSpan(start=len(ids) + 20, stop=len(ids) + 80, kind="data", message=len(messages) - 1),
        ]
        ids = ids + sampled + tuple(200 + i for i in range(60))
    return calls


def wire(message: Message) -> dict[str, object]:
    return {"role": message.role.value, "content": message.text}


def session(session_id: str = "s") -> Session:
    return Session(session_id=session_id, key_sha256="ab" * 32, state=SessionState.OPEN, opened_at=12.5)


def rollout(index: int = 0, **fields: object) -> Rollout:
    values: dict[str, object] = {
        "rollout_id": f"r{index}",
        "run_id": "run",
        "task": "t",
        "task_digest": "d",
        "harness": "react",
        "group_id": "g",
        "index": index,
        "seed": 7,
        "purpose": "train",
    }
    return Rollout(**(values | fields))  # type: ignore[arg-type]


def attempt(rollout_id: str = "r0", number: int = 0) -> Attempt:
    return Attempt(attempt_id=f"{rollout_id}-a{number}", rollout_id=rollout_id, number=number, started_at=1.5)


def passed(attempt: Attempt) -> Attempt:
    return msgspec.structs.replace(attempt, finished_at=2.5, outcome=Verdict(reward=1.0, passed=True))
