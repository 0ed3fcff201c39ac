"""A tiny world: a language of integers, a template, an engine and a harness that does what real ones do.

Word k is id 100 + k, or 5000 + k: two encodings of the same text, because models do sample encodings that no
tokenizer would choose. Every answer begins with a word never used before, so the world knows the truth about
every call: whose it is, and what becomes of its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from openforgerl.conversation import digest_message
from openforgerl.trajectory import attribute
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
    ToolSpec,
)

SYSTEM, USER, ASSISTANT, TOOL, END, OTHER_END, THINK, THOUGHT, TOOLS = 1, 2, 3, 4, 5, 6, 7, 8, 9
ROLE_IDS = {Role.SYSTEM: SYSTEM, Role.USER: USER, Role.ASSISTANT: ASSISTANT, Role.TOOL: TOOL}
TOOLSET = (ToolSpec(name="bash"), ToolSpec(name="read"))
SUMMARIZER = "You are a context summarization assistant. w1"
TITLES = "You are a title generator. w2"


def words(text: str) -> list[int]:
    """Ids as the tokenizer encodes text; words of our English signs become ids by their letters."""
    return [100 + int(word[1:]) if word[1:].isdigit() else 20 + len(word) for word in text.split()]


def parse(ids: Sequence[int]) -> Message:
    """The assistant message that sampled ids say."""
    thought, text, inside = [], [], False
    for id_ in ids:
        if id_ in (THINK, THOUGHT):
            inside = id_ == THINK
        elif id_ not in (END, OTHER_END):
            (thought if inside else text).append(f"w{(id_ - 100) % 4900}")
    parts = ([Reasoning(" ".join(thought))] if thought else []) + ([Text(" ".join(text))] if text else [])
    return Message(role=Role.ASSISTANT, parts=tuple(parts))


def body(message: Message, *, with_thought: bool = True) -> list[int]:
    """What the template writes for a message, in the tokenizer's own encoding."""
    thought = [THINK, *words(message.reasoning), THOUGHT] if message.reasoning and with_thought else []
    return thought + words(message.text)


def render(conversation: Conversation, restored: Mapping[int, ModelCall], *, strips: bool) -> tuple[int, ...]:
    """The template under the restoring rule. `strips`: thoughts before the last user message are left out."""
    ids = [TOOLS, *(20 + len(tool.name) for tool in conversation.tools)] if conversation.tools else []
    users = [index for index, message in enumerate(conversation.messages) if message.role is Role.USER]
    for index, message in enumerate(conversation.messages):
        call = restored.get(index)
        shown = body(message, with_thought=not strips or not users or index > users[-1])
        ids.append(ROLE_IDS[message.role])
        same_turn = call is not None and digest_message(parse(shown)) == digest_message(parse(call.sampled_ids))
        if call is not None and same_turn and call.prompt.ids == tuple(ids):
            sampled = call.sampled_ids
            ids += sampled[:-1] if call.finish_reason is FinishReason.STOP else sampled
        else:
            ids += shown
        ids.append(END)
    return (*ids, ASSISTANT)


@dataclass
class Agent:
    """One conversation that the harness leads."""

    name: str
    role: ThreadRole
    messages: list[Message]
    tools: tuple[ToolSpec, ...] = TOOLSET
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class World:
    """Records what the engine saw and sampled, apart from what the calls say."""

    seed: int
    strips: bool = False
    calls: list[ModelCall] = field(default_factory=list)
    engine: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict)
    roles: dict[str, ThreadRole] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)
    """call id → `counts`, or the reason why it is dropped."""
    agents: list[Agent] = field(default_factory=list)
    shuffle: bool = True
    fresh: int = 10
    spawned: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        if not self.agents:
            self.agents.append(self.agent("main", ThreadRole.MAIN, "w3 w4", "w5"))

    def agent(self, name: str, role: ThreadRole, system: str, task: str, **rest: object) -> Agent:
        messages = [Message(role=Role.SYSTEM, parts=(Text(system),)), Message(role=Role.USER, parts=(Text(task),))]
        return Agent(name, role, messages, **rest)  # type: ignore[arg-type]

    def new_word(self) -> int:
        self.fresh += 1
        return self.fresh

    # -- the proxy and the engine

    def begin(self, agent: Agent) -> ModelCall:
        """The request arrives: attributed, rendered, its intent recorded."""
        conversation = Conversation(messages=tuple(agent.messages), tools=agent.tools)
        known = list(self.calls)
        if self.shuffle:
            self.random.shuffle(known)
        found = attribute(known, conversation, headers=agent.headers, opening=not known)
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
            prompt=Prompt(ids=render(conversation, found.restored, strips=self.strips)),
            weights_version=1,
            timing=CallTiming(received=float(index)),
            request_headers=agent.headers,
        )
        self.calls.append(call)
        self.roles[call.call_id] = agent.role
        return call

    def finish(
        self,
        call: ModelCall,
        *,
        status: CallStatus = CallStatus.COMPLETE,
        ending: int | None = END,
        empty: bool = False,
    ) -> ModelCall:
        """The engine samples; the call is recorded. `ending` None = cut before an end token."""
        rng = self.random
        sampled: list[int] = []
        if not empty:
            if rng.random() < 0.4:
                sampled += [THINK, self.odd(self.new_word()), THOUGHT]
            sampled += [self.odd(self.new_word()), *(self.odd(rng.randrange(9)) for _ in range(rng.randrange(4)))]
        sampled += [ending] if ending is not None else []
        logprobs = tuple(-rng.random() for _ in sampled)
        delivered = status is not CallStatus.ERROR
        reason = {CallStatus.ABORTED: FinishReason.ABORTED, CallStatus.ERROR: FinishReason.ERROR}.get(
            status, FinishReason.STOP if ending is not None else FinishReason.LENGTH
        )
        done = msgspec.structs.replace(
            call,
            status=status,
            sampled_ids=tuple(sampled),
            logprobs=logprobs,
            finish_reason=reason,
            answer=parse(sampled) if delivered else None,
        )
        self.calls[call.index] = done
        self.engine[call.call_id] = (call.prompt.ids, tuple(sampled), logprobs)
        return done

    def odd(self, word: int) -> int:
        return (100 if self.random.random() < 0.5 else 5000) + word

    # -- what the harness does

    def go_on(self, agent: Agent, call: ModelCall, *, observe: Role = Role.TOOL) -> None:
        """The harness takes the answer into its history and adds what happened."""
        assert call.answer is not None
        self.fates[call.call_id] = "counts"
        seen = Text(f"w{self.new_word()}")
        agent.messages.append(call.answer)
        agent.messages.append(Message(role=observe, parts=(seen,), tool_call_id="t1" if observe is Role.TOOL else None))

    def turn(self, agent: Agent) -> None:
        self.go_on(agent, self.finish(self.begin(agent)))

    def user_turn(self, agent: Agent) -> None:
        self.go_on(agent, self.finish(self.begin(agent)), observe=Role.USER)

    def cut_turn(self, agent: Agent) -> None:
        self.go_on(agent, self.finish(self.begin(agent), ending=None))

    def other_end_turn(self, agent: Agent) -> None:
        self.go_on(agent, self.finish(self.begin(agent), ending=OTHER_END))

    def empty_turn(self, agent: Agent) -> None:
        self.go_on(agent, self.finish(self.begin(agent), empty=True))

    def timed_out_turn(self, agent: Agent) -> None:
        """Delivered in full, but the harness had given up and asks again."""
        self.fates[self.finish(self.begin(agent)).call_id] = "retry"
        self.turn(agent)

    def aborted_turn(self, agent: Agent) -> None:
        self.fates[self.finish(self.begin(agent), status=CallStatus.ABORTED, ending=None).call_id] = "aborted"
        self.turn(agent)

    def kept_partial_turn(self, agent: Agent) -> None:
        """The stream broke and the harness goes on from the part it has."""
        self.go_on(agent, self.finish(self.begin(agent), status=CallStatus.ABORTED, ending=None))
        self.turn(agent)

    def failed_turn(self, agent: Agent) -> None:
        self.fates[self.finish(self.begin(agent), status=CallStatus.ERROR, ending=None).call_id] = "error"
        self.turn(agent)

    def both_in_flight(self, agent: Agent) -> None:
        """Two agents ask before either has its answer; the later one is answered first."""
        other = self.random.choice(self.agents)
        if other is agent:
            return self.turn(agent)
        first, second = self.begin(agent), self.begin(other)
        self.go_on(other, self.finish(second))
        self.go_on(agent, self.finish(first))
        return None

    def drop_turn(self, agent: Agent) -> None:
        """The harness does not keep a turn it could not use; only its complaint enters the history."""
        self.fates[self.finish(self.begin(agent)).call_id] = "counts"
        agent.messages.append(Message(role=Role.USER, parts=(Text(f"w{self.new_word()}"),)))

    def drop_thought(self, agent: Agent) -> None:
        """The harness sends the last answer back without its reasoning."""
        self.turn(agent)
        last = agent.messages[-2]
        agent.messages[-2] = msgspec.structs.replace(
            last, parts=tuple(part for part in last.parts if not isinstance(part, Reasoning))
        )

    def edit_answer(self, agent: Agent) -> None:
        """The harness alters what the model said."""
        self.turn(agent)
        agent.messages[-2] = Message(role=Role.ASSISTANT, parts=(Text(f"w{self.new_word()}"),))

    def spawn(self, agent: Agent) -> None:
        self.spawned += 1
        child = self.agent(
            f"child{self.spawned}",
            ThreadRole.SUBAGENT,
            "w3 w4" if self.random.random() < 0.5 else "w6",
            f"w{self.new_word()}",
            headers={"X-Claude-Code-Agent-Id": f"a{self.spawned}"},
        )
        self.agents.append(child)
        self.turn(child)

    def rogue(self, agent: Agent) -> None:
        """The agent's own code calls the model."""
        self.spawned += 1
        self.agents.append(self.agent(f"rogue{self.spawned}", ThreadRole.UNATTRIBUTED, "w7", f"w{self.new_word()}"))
        self.turn(self.agents[-1])

    def title(self, agent: Agent) -> None:
        side = self.agent("title", ThreadRole.SIDE, TITLES, f"w{self.new_word()}", tools=())
        self.fates[self.finish(self.begin(side)).call_id] = "counts"

    def compact(self, agent: Agent) -> None:
        """The main conversation goes on from a summary of itself."""
        main = self.agents[0]
        helper = self.agent("compact", ThreadRole.COMPACTION, SUMMARIZER, f"w{self.new_word()}", tools=())
        call = self.finish(self.begin(helper))
        self.fates[call.call_id] = "counts"
        assert call.answer is not None
        main.messages = [
            main.messages[0],
            main.messages[1],
            Message(role=Role.USER, parts=(Text(f"{call.answer.text} w{self.new_word()}"),)),
        ]


APPENDING: tuple[Callable[[World, Agent], None], ...] = (
    World.turn,
    World.user_turn,
    World.cut_turn,
    World.empty_turn,
    World.timed_out_turn,
    World.aborted_turn,
    World.failed_turn,
    World.both_in_flight,
    World.spawn,
    World.rogue,
    World.title,
)
EDITING: tuple[Callable[[World, Agent], None], ...] = (
    World.other_end_turn,
    World.kept_partial_turn,
    World.drop_turn,
    World.drop_thought,
    World.edit_answer,
    World.compact,
)


def play(seed: int, deeds: Sequence[Callable[[World, Agent], None]], *, strips: bool = False) -> World:
    """A session: an opening turn of the main agent, then the deeds, each by an agent chosen by the seed."""
    world = World(seed, strips=strips)
    world.turn(world.agents[0])
    for deed in deeds:
        deed(world, world.random.choice(world.agents))
    return world
