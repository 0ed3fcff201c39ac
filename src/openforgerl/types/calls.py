"""What passes between harness, proxy and engine, and how it is recorded."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from openforgerl.types.messages import Conversation, JsonValue, Message, MessageDelta


class OriginSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt ids `[start, stop)` come from.

    `template`: the chat template wrote them. `data`: text of message `message`, or placeholders of its images
    (index into the conversation; None for tool schemas). `call`: sampled ids `[offset, offset + stop - start)` of
    call `call_id`.
    """

    start: int
    stop: int
    kind: Literal["template", "data", "call"]
    message: int | None = None
    call_id: str | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"origin span [{self.start}, {self.stop}) is empty or negative")
        if (self.kind == "call") != (self.call_id is not None and self.offset is not None):
            raise ValueError("call_id and offset belong to kind 'call', and only there")


class PlacedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image in a prompt: where its placeholder ids start, how many, and the patch grid (t, h, w)."""

    sha256: str
    start: int
    count: int
    grid: tuple[int, int, int]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine sees, and where every id of it comes from."""

    ids: tuple[int, ...]
    origins: tuple[OriginSpan, ...] = ()
    """Ordered, disjoint, covering all of `ids`; or empty when unknown (imported data)."""
    images: tuple[PlacedImage, ...] = ()
    template_digest: str = ""
    """sha256 of the chat template, its kwargs and the tokenizer: what made these ids."""

    def __post_init__(self) -> None:
        if not self.origins:
            return
        at = 0
        for span in self.origins:
            if span.start != at:
                raise ValueError(f"origins leave a gap or overlap at id {at} (span starts at {span.start})")
            at = span.stop
        if at != len(self.ids):
            raise ValueError(f"origins cover {at} of {len(self.ids)} ids")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters as applied. Defaults are the training defaults (DESIGN §5 Sampling)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 4096
    """Most tokens sampled in this call."""
    stop: tuple[str, ...] = ()
    """Stop strings. The client gets the text before; the record keeps all sampled ids."""

    def __post_init__(self) -> None:
        checks = (
            (math.isfinite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "0 to 100"),
            (0 < self.top_p <= 1, "top_p", "above 0, at most 1"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (math.isfinite(self.presence_penalty), "presence_penalty", "a finite number"),
            (math.isfinite(self.frequency_penalty), "frequency_penalty", "a finite number"),
            (
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "repetition_penalty",
                "> 0",
            ),
            (self.max_tokens >= 1, "max_tokens", "1 or more"),
        )
        for good, name, accepted in checks:
            if not good:
                raise ValueError(f"{name} must be {accepted}; got {getattr(self, name)!r}")

    @property
    def off_policy(self) -> str | None:
        """Why samples drawn like this are not from the policy's own distribution, or None."""
        if self.temperature == 0:
            return "greedy"
        if self.top_p < 1 or self.top_k > 0:
            return "truncation"
        if self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1:
            return "penalty"
        return None


class ForcedCall(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` required (`name` None) or named: the answer opens with a tool call that nobody sampled."""

    name: str | None = None
    """As the model is offered it."""


class FinishReason(enum.StrEnum):
    """Why sampling ended."""

    STOP = "stop"
    """The model sampled an end-of-turn token (it is the last sampled id)."""
    STOP_STRING = "stop_string"
    """A stop string appeared; the client's text ends before it."""
    LENGTH = "length"
    """max_tokens reached."""
    ABORTED = "aborted"
    """The client left or the session was sealed mid-stream."""
    ERROR = "error"


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Newly sampled ids of one call. The last chunk carries the finish reason."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """log_softmax(logits / temperature)[id] over the full vocabulary, parallel to `ids`; None when the engine
    has none (scripted, relay): such a call cannot train by RL."""
    weights_version: int
    """Version of the weights that sampled these ids."""
    finish: FinishReason | None = None
    sampling_logprobs: tuple[float, ...] | None = None
    """log-probs under the truncated distribution actually sampled from, when top_p or top_k is on."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "sampling_logprobs"):
            values: tuple[float, ...] | None = getattr(self, name)
            if values is None:
                continue
            if len(values) != len(self.ids):
                raise ValueError(f"{len(self.ids)} ids but {len(values)} {name}")
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} must be finite")


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one answer as a remote engine counts and bills them (its tokenizer, not ours)."""

    prompt_tokens: int = 0
    """All of the prompt, cached or not."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of `prompt_tokens`: read from the provider's cache."""
    cache_written_tokens: int = 0
    """Of `prompt_tokens`: written to it."""
    cost: float | None = None
    """In the currency of the configured prices; None when there are none."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that takes a conversation is asked."""

    conversation: Conversation
    images: Mapping[str, bytes] = {}
    """The bytes of every image that the conversation names by sha256."""
    forced: ForcedCall | None = None
    """The tool call that the answer must hold, or None: as the model likes."""
    model: str = ""
    """The name that the client asked for."""
    prompt_tokens: int = 0
    """Size of the prompt by our own tokenizer; 0 when not known."""


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New pieces of an answer given as text. The last chunk carries the finish reason."""

    deltas: tuple[MessageDelta, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    """With the last chunk, when the engine said it."""
    warnings: tuple[str, ...] = ()
    """For the record: what was left out of the question or is odd about the answer."""


class CallStatus(enum.StrEnum):
    """How a recorded exchange ended on our side."""

    INTENT = "intent"
    """Committed before generation; still running, or the process died in it."""
    COMPLETE = "complete"
    ABORTED = "aborted"
    """The client left mid-stream: sampled ids are kept, the turn was not delivered."""
    ERROR = "error"


class ThreadRole(enum.StrEnum):
    """What a conversation inside a session is for."""

    MAIN = "main"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"
    UNATTRIBUTED = "unattributed"


class CallTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Unix seconds. `first_token` and `finished` are None while there is none."""

    received: float
    first_token: float | None = None
    finished: float | None = None


class WeightsSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled ids `[start, stop)` were sampled by weights `version`."""

    start: int
    stop: int
    version: int


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded exchange: what the harness asked, what the engine saw and sampled, what was sent back."""

    call_id: str
    session_id: str
    index: int
    """0-based order of arrival inside the session."""
    dialect: str
    thread: str
    role: ThreadRole
    role_evidence: str
    parent_call_id: str | None
    """The call whose answer this call's history continues, or None for a root."""
    status: CallStatus
    conversation: Conversation
    prompt: Prompt
    sampled_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    sampling_logprobs: tuple[float, ...] | None = None
    weights_version: int
    """At dispatch."""
    weights_spans: tuple[WeightsSpan, ...] = ()
    """Per-token versions when weights changed midway; empty = all `weights_version`."""
    sampling_asked: dict[str, JsonValue] = {}
    sampling_applied: Sampling = Sampling()
    finish_reason: FinishReason | None = None
    answer: Message | None = None
    """What we sent back, in canonical form (None until complete or when nothing was delivered)."""
    off_policy: str | None = None
    """Why RL must mask this call (truncation, greedy, penalty, grammar, forced, relay, ...), or None. `relay`: the
    engine answered in text, and the ids are our own renderer's encoding of it."""
    usage: Usage | None = None
    """What a remote engine counted; None for engines that take ids."""
    warnings: tuple[str, ...] = ()
    timing: CallTiming
    request: JsonValue = None
    """The request body as received (parsed JSON)."""
    request_headers: dict[str, str] = {}
    """Received headers without credentials."""
    response: JsonValue = None
    """The response body as sent; for a stream the equivalent whole body."""
    error: str | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.sampled_ids):
            raise ValueError(f"call {self.call_id}: {len(self.sampled_ids)} ids, {len(self.logprobs)} log-probs")
        if self.logprobs is not None and not all(map(math.isfinite, self.logprobs)):
            raise ValueError(f"call {self.call_id}: log-probs must be finite")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one session may use. None = no limit of that kind."""

    calls: int | None = 200
    sampled_tokens: int | None = None
    seconds: float | None = None
    """Since the session was opened; calls after it get 403 `session_closed`."""
    concurrent: int = 16
    """Calls in flight at once; more wait for a place."""

    def __post_init__(self) -> None:
        for name in ("calls", "sampled_tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"limits.{name} must be above 0 or null; got {value!r}")
        if self.concurrent < 1:
            raise ValueError(f"limits.concurrent must be 1 or more; got {self.concurrent!r}")


class SessionState(enum.StrEnum):
    OPEN = "open"
    SEALED = "sealed"


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy's credential scope of one attempt."""

    session_id: str
    """Public; part of the base URL's path."""
    key_sha256: str
    """Hex digest of the secret; the secret itself is stored nowhere."""
    state: SessionState
    opened_at: float
    """Unix seconds; also the frozen template clock."""
    sampling: Sampling = Sampling()
    """Wins over the request, except max_tokens (the smallest wins) and stop (the request's)."""
    limits: Limits = Limits()
    template_kwargs: dict[str, JsonValue] = {}
    metadata: dict[str, str] = {}


class OpenedSession(msgspec.Struct, frozen=True, kw_only=True):
    """What opening returns: the only time the key is in clear."""

    session_id: str
    key: str
    base_urls: dict[str, str]
    """Dialect name → base URL that the harness gets (only served dialects)."""
