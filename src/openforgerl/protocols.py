"""The verbs, on one page (DESIGN §3). A room that needs another room's behaviour asks for one of these."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from openforgerl.types import (
    Attempt,
    Chunk,
    Conversation,
    Ending,
    Exit,
    ForcedCall,
    HarnessContext,
    JsonValue,
    Layer,
    Limits,
    Message,
    MessageDelta,
    ModelCall,
    OpenedSession,
    Plan,
    Prompt,
    Question,
    Rollout,
    Sample,
    Sampling,
    SandboxRef,
    SandboxSpec,
    Task,
    TextChunk,
    Trajectory,
    Verdict,
)


@runtime_checkable
class InferenceEngine(Protocol):
    """Token-in/token-out. Closing the iterator early cancels the generation and frees its place."""

    @property
    def model_name(self) -> str:
        """What `/v1/models` lists."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def weights_version(self) -> int:
        """Version that a generation dispatched now would use first."""
        ...

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        affinity: str,
        priority: int = 0,
        deadline: float | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> AsyncIterator[Chunk]:
        """Sample an answer. `affinity` is the session id (cache routing); `deadline` in Unix seconds.

        `images`: the bytes of every image that the prompt places, by sha256. The last chunk has `finish`. Stop
        strings are the caller's business (it closes the iterator).
        Raises `EngineError` (infrastructure) or `EngineOverloaded`.
        """
        ...

    async def close(self) -> None:
        """Stop all work and free the model."""
        ...


@runtime_checkable
class ConversationEngine(Protocol):
    """Takes a conversation and answers in text: a model behind somebody else's API. Never token-exact."""

    @property
    def model_name(self) -> str:
        """What `/v1/models` lists."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together, as our own tokenizer counts them."""
        ...

    @property
    def weights_version(self) -> int:
        """Always the same: nobody here changes these weights."""
        ...

    def converse(
        self,
        question: Question,
        sampling: Sampling,
        *,
        affinity: str,
        seed: str,
        deadline: float | None = None,
    ) -> AsyncIterator[TextChunk]:
        """Ask for the next assistant turn. `affinity` is the session id; `deadline` in Unix seconds.

        `seed` (the call's id) makes the ids of tool calls, as `Renderer.parser` makes them. Stop strings are the
        caller's business (it closes the iterator). Raises `EngineError`, `EngineOverloaded` or `ContextOverflow`.
        """
        ...

    async def close(self) -> None:
        """Stop all work."""
        ...


Engine = InferenceEngine | ConversationEngine


@runtime_checkable
class WeightControl(Protocol):
    """Weight updates; used by training only. `load` replaces weights without a restart and drops stale KV."""

    async def pause(self) -> None: ...
    async def load(self, weights: Path | Mapping[str, object], version: int) -> None: ...
    async def resume(self) -> None: ...
    @property
    def weights_version(self) -> int: ...


class AnswerParser(Protocol):
    """Turns sampled ids into an assistant message while they arrive."""

    def feed(self, ids: Sequence[int]) -> Sequence[MessageDelta]:
        """The newly certain pieces. Concatenated over all feeds and `finish`, they equal the whole message."""
        ...

    def finish(self) -> tuple[Sequence[MessageDelta], Message]:
        """The last pieces and the whole message; equal to parsing all ids at once, at every cut."""
        ...


class Renderer(Protocol):
    """A model's chat template as ids, both ways. Pure."""

    @property
    def digest(self) -> str:
        """sha256 over template, tokenizer and rules."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""
        ...

    def render(
        self,
        conversation: Conversation,
        *,
        restored: Mapping[int, ModelCall],
        clock: float,
        kwargs: Mapping[str, JsonValue],
        images: Mapping[str, bytes] | None = None,
    ) -> Prompt:
        """The prompt for the next assistant turn.

        `restored` maps the index of an assistant message to the call whose answer it canonically equals
        (condition 1 of the restoring rule, checked by the caller); condition 2 is checked here. `images`: the bytes
        of every image that the conversation names by sha256. Raises `TemplateError`.
        """
        ...

    def force(self, prompt: Prompt, conversation: Conversation, call: ForcedCall) -> Prompt:
        """`prompt` with the opening of a tool call at its end, after what skips a thought.

        The answer then goes on inside the call. Raises `TemplateError` when this model's answers hold no calls.
        """
        ...

    def parser(
        self, conversation: Conversation, prompt: Prompt, *, seed: str = "", forced: ForcedCall | None = None
    ) -> AnswerParser:
        """A parser for an answer to `prompt` (which may already have opened a thought).

        `seed` (the call's id) makes the ids of tool calls; two answers to one prompt must not share theirs.
        `forced`: what `force` put at the end of the prompt; the whole call is part of the message.
        """
        ...

    def encode_answer(
        self,
        message: Message,
        conversation: Conversation,
        *,
        clock: float = 0.0,
        kwargs: Mapping[str, JsonValue] | None = None,
    ) -> tuple[int, ...]:
        """Ids of an assistant turn as the template writes it, end-of-turn token included (scripted, relay)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, added tokens included; for people and for matching."""
        ...

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes that an id stands for, maybe part of a character."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text in which added tokens are structure: the inverse of `decode` (scripted `raw` answers)."""
        ...


class Sessions(Protocol):
    """Sessions of the proxy: in process and over HTTP, the same contract."""

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        limits: Limits,
        metadata: Mapping[str, str],
        template_kwargs: Mapping[str, JsonValue],
    ) -> OpenedSession: ...

    async def seal(self, session_id: str) -> None:
        """Refuse further calls, cancel those in flight, wait until they are recorded. Idempotent."""
        ...

    async def calls(self, session_id: str) -> Sequence[ModelCall]:
        """All recorded calls in order of arrival."""
        ...


class Sandbox(Protocol):
    """One running sandbox."""

    @property
    def ref(self) -> SandboxRef: ...

    @property
    def report(self) -> Mapping[str, JsonValue]:
        """Namespaces, uid, limits in force and how each is enforced."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: bytes = b"",
        timeout: float,
        output_limit: int = 65536,
        key: str = "",
    ) -> Exit:
        """Run as the agent. On timeout the program's whole process tree is killed and `timed_out` set.

        `key`: by what an `AdoptedSandbox` finds the program again.
        """
        ...

    async def read(self, path: str, *, limit: int) -> bytes:
        """A regular file's bytes; links are not followed out; larger than `limit` raises InputError."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None: ...

    async def kill_agent(self) -> None:
        """Kill everything but our init and verify that nothing else lives; raises StageError otherwise."""
        ...

    async def export(self, paths: Sequence[str], destination: Path, *, limit: int) -> None:
        """Copy declared paths out as data: regular files and directories only, bounded, no links, no setuid."""
        ...

    async def close(self) -> None: ...


class Sandboxes(Protocol):
    """A backend."""

    def create(self, spec: SandboxSpec, attempt_id: str) -> AbstractAsyncContextManager[Sandbox]: ...

    async def list(self, run_id: str) -> Sequence[SandboxRef]: ...

    async def reap(self, run_id: str) -> int:
        """Destroy every sandbox of the run, whoever made it; how many there were."""
        ...


class AdoptedSandbox(Sandbox, Protocol):
    """A sandbox that outlived the process that made it."""

    async def claim(self, key: str) -> Exit:
        """How the program that was started with `key` ended; waits for it. Raises InputError when there is none."""
        ...


@runtime_checkable
class AdoptingSandboxes(Protocol):
    """A backend whose sandboxes outlive the process that made them, and are taken over by the next one."""

    def adopt(self, ref: SandboxRef, spec: SandboxSpec) -> AbstractAsyncContextManager[AdoptedSandbox]:
        """The living sandbox of `ref`; destroyed at the end like any other. Raises StageError when it is dead."""
        ...

    async def reap_others(self, run_id: str, keep: Collection[str]) -> int:
        """`reap`, but for the sandboxes of these attempts; how many were destroyed."""
        ...


@runtime_checkable
class NetworkedSandboxes(Protocol):
    """A backend whose sandboxes have a network: they reach the proxy by its address."""

    async def address(self) -> str:
        """This process's address as its sandboxes reach it."""
        ...


class Harness(Protocol):
    """A harness is data: what to mount, what to write, what to run, what its exit means."""

    @property
    def name(self) -> str: ...
    @property
    def dialect(self) -> str:
        """The wire protocol it will speak (`chat`, `responses`, `messages`, `gemini`)."""
        ...

    def layers(self) -> Sequence[Layer]:
        """Read-only directories; raises InputError naming the install command when absent."""
        ...

    def plan(self, context: HarnessContext) -> Plan: ...

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending: ...

    def report(self) -> Mapping[str, JsonValue]:
        """Version and package digest, for the record."""
        ...


class Verifier(Protocol):
    """Grades the state an agent left. Runs only after the agent's processes are dead."""

    @property
    def scratch(self) -> tuple[str, ...]:
        """Absolute directories that it needs, empty and writable, in the grading sandbox."""
        ...

    async def verify(self, task: Task, sandbox: Sandbox, trajectory: Trajectory) -> Verdict: ...


class GroupSource(Protocol):
    """Where a trainer gets complete GRPO groups from: the embedded loop and veRL consume the same."""

    def collect(
        self, tasks: Sequence[Task], *, group_size: int, weights_version: int, step: int
    ) -> AsyncIterator[Sequence[tuple[Rollout, Attempt, Sequence[Sample]]]]: ...


class Progress(Protocol):
    """Tells a person what happens and how long it still takes. A stage is named as the person reads it."""

    def start(self, stage: str, total: int, *, done: int = 0) -> None:
        """A stage of `total` units begins (or goes on after a restart with `done` of them finished)."""
        ...

    def advance(self, stage: str, amount: int = 1, *, note: str | None = None) -> None: ...

    def finish(self, stage: str, *, note: str = "") -> None: ...

    def say(self, line: str) -> None:
        """One line that stays."""
        ...
