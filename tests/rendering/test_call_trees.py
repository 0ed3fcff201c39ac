"""Arbitrary trees of calls over real chat templates: every sample is what the engine saw and emitted.

A harness leads conversations as real ones do: it retries, drops and edits turns, strips thoughts, writes arguments
anew, starts sub-agents, summarises, changes its tools and its system prompt. The model says things in its family's
form, tokenised as no tokenizer would, cut anywhere, or draws ids at random.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openforgerl.conversation import parse_arguments
from openforgerl.errors import TemplateError
from openforgerl.rendering import ChatRenderer
from openforgerl.trajectory import SamplePolicy, attribute, audit_attempt, build, build_samples, find_breaks
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    Message,
    ModelCall,
    Reasoning,
    Role,
    Rollout,
    SampleSet,
    Source,
    Text,
    ThreadRole,
    ToolSpec,
)

ROLLOUT = Rollout(
    rollout_id="r", run_id="run", task="t", task_digest="", harness="h", group_id="g", index=0, seed=0, purpose="train"
)  # fmt: skip


def tool(name: str) -> ToolSpec:
    schema = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}}
    function = {"name": name, "description": "Run", "parameters": schema}
    return ToolSpec(name=name, raw={"type": "function", "function": function})


BASH, READ = tool("bash"), tool("read")
WORDS = (
    "notes",
    "list",
    " world",
    "\n",
    "é",
    "😀",
    "你好",
    "<|im_end|>",
    '"',
    "</think>",
    "[INST]",
    "ls -la",
    "  ",
    "0",
)
Speak = Callable[..., str]
"""(text, calls, thought=..., odd=...) → one answer in the model's form."""
RendererOf = Callable[[str], tuple[ChatRenderer, Speak]]
SUMMARIZER = "You are a context summarization assistant. Be brief."


def hermes(text: str, calls: Sequence[tuple[str, Any]], *, thought: str, odd: int) -> str:
    """An answer of a model that writes tool calls as Hermes did; `odd` chooses among spellings."""
    gap, spaces = ("\n", "", " \n")[odd % 3], ((", ", ": "), (",", ":"))[odd % 2]
    bodies = [json.dumps({"name": name, "arguments": given}, separators=spaces) for name, given in calls]
    before = f"<think>{gap}{thought}{gap}</think>\n\n" if thought else ""
    return before + text + "".join(f"{gap}<tool_call>\n{body}\n</tool_call>" for body in bodies)


@dataclass
class Conversing:
    """One conversation that the harness leads."""

    messages: list[Message]
    tools: tuple[ToolSpec, ...] = (BASH,)
    headers: dict[str, str] = field(default_factory=dict)
    name: str = "main"


@dataclass
class World:
    """Proxy, engine and harness; `engine` is what the engine saw and emitted, apart from what the calls say."""

    renderer: ChatRenderer
    speak: Speak
    seed: int
    calls: list[ModelCall] = field(default_factory=list)
    engine: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random, self.shuffler = random.Random(self.seed), random.Random(self.seed)
        self.agents = [self.conversing("main")]

    def conversing(self, name: str, **rest: Any) -> Conversing:
        messages = [
            Message(role=Role.SYSTEM, parts=(Text("You are an agent."),)),
            Message(role=Role.USER, parts=(Text(f"task of {name}"),)),
        ]
        return Conversing(messages, name=name, **rest)

    def text(self, most: int = 4) -> str:
        return "a" + "".join(self.random.choice(WORDS) for _ in range(self.random.randrange(most))) + "z"

    # -- proxy and engine

    def begin(self, agent: Conversing) -> ModelCall | None:
        """The request arrives. None: the template refuses the conversation, so there is no call (the proxy's 400)."""
        conversation = Conversation(messages=tuple(agent.messages), tools=agent.tools)
        known = self.shuffler.sample(self.calls, len(self.calls))
        found = attribute(known, conversation, headers=agent.headers, opening=not known)
        try:
            prompt = self.renderer.render(conversation, restored=found.restored, clock=0.0, kwargs={})
        except TemplateError:
            return None
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
            status=CallStatus.INTENT,
            conversation=conversation,
            prompt=prompt,
            weights_version=1,
            timing=CallTiming(received=float(index)),
            request_headers=agent.headers,
        )
        self.calls.append(call)
        return call

    def finish(self, call: ModelCall, *, status: CallStatus = CallStatus.COMPLETE, cut: bool = False) -> ModelCall:
        """The engine samples; the call is recorded as the proxy does."""
        sampled = self.sampled()
        if cut:
            sampled = sampled[: self.random.randrange(len(sampled) + 1)]
        stops = not cut and status is CallStatus.COMPLETE
        sampled += self.renderer.stop_ids[:1] if stops and sampled[-1:] != self.renderer.stop_ids[:1] else ()
        parser = self.renderer.parser(call.conversation, call.prompt, seed=call.call_id)
        parser.feed(sampled)
        answer = parser.finish()[1]
        reason = FinishReason.STOP if stops else FinishReason.LENGTH
        reasons = {CallStatus.ABORTED: FinishReason.ABORTED, CallStatus.ERROR: FinishReason.ERROR}
        done = msgspec.structs.replace(
            call,
            status=status,
            sampled_ids=sampled,
            logprobs=tuple(-self.random.random() for _ in sampled),
            finish_reason=reasons.get(status, reason),
            answer=answer,
        )
        assert done.logprobs is not None
        self.calls[call.index] = done
        self.engine[call.call_id] = (call.prompt.ids, sampled, done.logprobs)
        return done

    def sampled(self) -> tuple[int, ...]:
        """Ids of an answer without the end of the turn."""
        rng = self.random
        if rng.random() < 0.1:
            drawn = (rng.randrange(3, 250) for _ in range(rng.randrange(8)))
            return tuple(i for i in drawn if i not in self.renderer.stop_ids)
        calls = [("bash", {"command": self.text(), "n": rng.randrange(9)}) for _ in range(rng.randrange(3))]
        thought = self.text() if rng.random() < 0.5 else ""
        words = self.speak(self.text(), calls, thought=thought, odd=rng.randrange(6))
        cuts = sorted({rng.randrange(len(words)) for _ in range(rng.randrange(4))} | {0, len(words)})
        ids = tuple(i for a, b in pairwise(cuts) for i in self.renderer.encode(words[a:b]))
        return tuple(i for i in ids if i not in self.renderer.stop_ids)

    # -- the harness

    def ask(self, agent: Conversing, **how: Any) -> ModelCall | None:
        call = self.begin(agent)
        return None if call is None else self.finish(call, **how)

    def go_on(
        self, agent: Conversing, call: ModelCall | None, change: Callable[[Message], Message] = lambda m: m
    ) -> None:
        """The answer, maybe changed, enters the history, and what came of it."""
        if call is None or call.answer is None:
            return
        agent.messages.append(change(call.answer))
        seen = [
            Message(role=Role.TOOL, tool_call_id=made.id, parts=(Text(self.text()),)) for made in call.answer.tool_calls
        ]
        agent.messages += seen or [Message(role=Role.USER, parts=(Text(self.text()),))]

    def turn(self, agent: Conversing) -> None:
        self.go_on(agent, self.ask(agent))

    def asked_twice(self, agent: Conversing) -> None:
        self.ask(agent)
        self.turn(agent)

    def both_kept(self, agent: Conversing) -> None:
        """Two answers to one request; another conversation goes on from the second."""
        first, second = self.ask(agent), self.ask(agent)
        fork = Conversing(list(agent.messages), agent.tools, agent.headers, agent.name)
        self.go_on(fork, second)
        self.go_on(agent, first)
        self.turn(fork)

    def aborted(self, agent: Conversing) -> None:
        self.ask(agent, status=CallStatus.ABORTED, cut=True)
        self.turn(agent)

    def kept_part(self, agent: Conversing) -> None:
        self.go_on(agent, self.ask(agent, status=CallStatus.ABORTED, cut=True))

    def failed(self, agent: Conversing) -> None:
        self.ask(agent, status=CallStatus.ERROR, cut=True)

    def cut_by_length(self, agent: Conversing) -> None:
        self.go_on(agent, self.ask(agent, cut=True))

    def thought_dropped(self, agent: Conversing) -> None:
        def change(answer: Message) -> Message:
            parts = tuple(part for part in answer.parts if not isinstance(part, Reasoning))
            return msgspec.structs.replace(answer, parts=parts)

        self.go_on(agent, self.ask(agent), change)

    def arguments_rewritten(self, agent: Conversing) -> None:
        """Same values in other bytes; what is no JSON is mended."""

        def change(answer: Message) -> Message:
            calls = tuple(
                msgspec.structs.replace(made, arguments=json.dumps(parse_arguments(made.arguments) or {}, indent=1))
                for made in answer.tool_calls
            )
            return msgspec.structs.replace(answer, tool_calls=calls)

        self.go_on(agent, self.ask(agent), change)

    def trimmed(self, agent: Conversing) -> None:
        def change(answer: Message) -> Message:
            parts = tuple(Text(part.text.strip()) if isinstance(part, Text) else part for part in answer.parts)
            return msgspec.structs.replace(answer, parts=parts)

        self.go_on(agent, self.ask(agent), change)

    def old_result_edited(self, agent: Conversing) -> None:
        at = next((n for n, message in enumerate(agent.messages) if message.role is Role.TOOL), None)
        if at is not None:
            agent.messages[at] = msgspec.structs.replace(agent.messages[at], parts=(Text("[removed]"),))
        self.turn(agent)

    def other_header(self, agent: Conversing) -> None:
        agent.messages[0] = Message(role=Role.SYSTEM, parts=(Text(f"You are an agent. {self.random.random()}"),))
        self.turn(agent)

    def other_tools(self, agent: Conversing) -> None:
        agent.tools = (BASH, READ) if agent.tools == (BASH,) else (BASH,)
        self.turn(agent)

    def sub_agent(self, agent: Conversing) -> None:
        name = f"child{len(self.agents)}"
        self.agents.append(self.conversing(name, headers={"x-claude-code-agent-id": name}))
        self.turn(self.agents[-1])

    def in_flight(self, agent: Conversing) -> None:
        """Another agent asks before this one has its answer, and is answered first."""
        other = self.random.choice(self.agents)
        first = self.begin(agent)
        if other is not agent:
            self.turn(other)
        if first is not None:
            self.go_on(agent, self.finish(first))

    def compacted(self, agent: Conversing) -> None:
        helper = Conversing([Message(role=Role.SYSTEM, parts=(Text(SUMMARIZER),)), *agent.messages[1:2]], ())
        call = self.ask(helper)
        if call is not None and call.answer is not None:
            summary = Message(role=Role.USER, parts=(Text(f"{call.answer.text} Go on, {self.text()}."),))
            agent.messages = [agent.messages[0], summary]


DEEDS: tuple[Callable[[World, Conversing], None], ...] = (
    World.turn,
    World.turn,
    World.asked_twice,
    World.both_kept,
    World.aborted,
    World.kept_part,
    World.failed,
    World.cut_by_length,
    World.thought_dropped,
    World.arguments_rewritten,
    World.trimmed,
    World.old_result_edited,
    World.other_header,
    World.other_tools,
    World.sub_agent,
    World.in_flight,
    World.compacted,
)


def rows_of(calls: list[ModelCall]) -> SampleSet:
    return build_samples(build("a", calls), rollout=ROLLOUT, source=Source.POLICY, policy=SamplePolicy())


def check(world: World, order: random.Random) -> None:
    """Samples against the engine's own record, token by token; every token once; in any order of arrival the same."""
    found = rows_of(world.calls)
    spans: Counter[tuple[str, int]] = Counter()
    for sample in found.samples:
        assert sample.logprobs is not None
        at = 0
        for span in sample.spans:
            prompt, sampled, logprobs = world.engine[span.call_id]
            length = span.stop - span.start
            assert sample.ids[: span.stop] == prompt + sampled[: span.offset + length]
            assert sample.logprobs[at : at + length] == logprobs[span.offset : span.offset + length]
            at += length
            spans.update((span.call_id, offset) for offset in range(span.offset, span.offset + length))
    assert set(spans.values()) <= {1}
    totals = found.totals
    assert totals.sampled == sum(len(sampled) for _, sampled, _ in world.engine.values())
    assert totals.trained + sum(totals.masked.values()) == len(spans)
    assert set(totals.dropped) <= {"retry", "aborted", "error", "closing"}
    assert set(totals.masked) <= {"error", f"role:{ThreadRole.UNATTRIBUTED.value}"}
    assert rows_of(order.sample(world.calls, len(world.calls))) == found
    assert audit_attempt(build("a", world.calls), found).findings == ()


@pytest.fixture
def renderer_of(model_of: Callable[[str], Any]) -> RendererOf:
    """A small model's renderer, and how it speaks."""
    return lambda name: (model_of(name).renderer, hermes)


def played(name: str, renderer_of: RendererOf, seed: int, deeds: list[Any]) -> World:
    world = World(*renderer_of(name), seed)
    for deed in [World.turn, *deeds]:
        deed(world, world.random.choice(world.agents))
    return world


FAST = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
SESSIONS: Mapping[str, Any] = {
    "seed": st.integers(0, 2**32),
    "deeds": st.lists(st.sampled_from(DEEDS), max_size=9),
    "order": st.randoms(use_true_random=False),
}


@pytest.mark.parametrize("name", ["tiny", "opened", "inst", "pieces"])
@FAST
@given(**SESSIONS)
def test_any_tree_of_calls_over_small_templates(
    name: str, seed: int, deeds: list[Any], order: random.Random, renderer_of: Any
) -> None:
    check(played(name, renderer_of, seed, deeds), order)


@pytest.mark.parametrize("name", ["tiny", "opened", "pieces"])
@settings(FAST, max_examples=20)
@given(seed=st.integers(0, 2**32), order=st.permutations("mmmxxxyy"))
def test_the_order_in_which_agents_are_answered_changes_no_row(
    name: str, seed: int, order: list[str], renderer_of: Any
) -> None:
    """Three conversations, each with its own course: one after the other, and mixed in any order."""

    def rows(turns: list[str]) -> set[tuple[object, ...]]:
        world = World(*renderer_of(name), 0)
        agents = {"m": world.agents[0]}
        for child in "xy":
            agents[child] = world.conversing(child, headers={"x-claude-code-agent-id": child})
        for at, agent in enumerate(turns):
            world.random.seed(f"{seed}{agent}{turns[:at].count(agent)}")
            world.turn(agents[agent])
        threads = {call.call_id: call.thread for call in world.calls}
        return {
            (sample.ids, sample.logprobs, tuple((s.start, s.stop, threads[s.call_id], s.state) for s in sample.spans))
            for sample in rows_of(world.calls).samples
        }

    opening = ["m", *[turn for turn in order if turn != "m"], "m", "m"]
    moved = ["m", *list(order)]
    moved.remove("m")
    assert rows(moved) == rows(sorted(moved)) == rows(opening)


def test_these_sessions_hold_what_they_are_for(renderer_of: RendererOf) -> None:
    """Forty of them over the shipped template: restored turns, every way to lose a token, and most ways to break."""
    reasons, roles, causes, longest = Counter[str](), set[ThreadRole](), set[str](), 0
    for seed in range(40):
        deeds = random.Random(seed).choices(DEEDS, k=9)
        world = played("tiny", renderer_of, seed, deeds)
        found = rows_of(world.calls)
        reasons.update(found.totals.dropped)
        roles |= {call.role for call in world.calls}
        causes |= {one.cause for one in find_breaks(build("a", world.calls))}
        longest = max(longest, *(len(sample.spans) for sample in found.samples))
    assert longest >= 5
    assert {"retry", "aborted", "error"} <= set(reasons)
    assert {ThreadRole.MAIN, ThreadRole.SUBAGENT, ThreadRole.COMPACTION} <= roles
    assert {"tools_changed", "marker_changed", "reasoning_dropped", "compacted", "observation_edited"} <= causes
