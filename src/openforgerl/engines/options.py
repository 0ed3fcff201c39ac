"""What a user may set about the engine (config section `engine`)."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from openforgerl.types import JsonValue

_SECRET_HEADERS = frozenset(
    {"authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie"}
)


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach and pay a model behind somebody else's API (engine kind `relay`)."""

    model: str = ""
    """The upstream's name of the model."""
    models: dict[str, str] = {}
    """Name that a harness asks for → the upstream's name, where it is another one (a small model for side calls)."""
    key_env: str = ""
    """Environment variable that holds the API key. It is read once and sent to the upstream only."""
    key_file: str = ""
    """File that holds the API key, instead of `key_env`. Neither = no key is sent."""
    headers: dict[str, str] = {}
    """Further headers, without secrets: they are kept with the run's config."""
    extra: dict[str, JsonValue] = {}
    """Further fields of every request body (`reasoning_effort`, `thinking`, ...); they win over ours."""
    omit: tuple[str, ...] = ()
    """Fields of our request bodies that the upstream does not take (`temperature`, `stream_options`, ...)."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """How an OpenAI-compatible upstream calls the bound of an answer."""
    send_reasoning: bool = False
    """Send earlier thoughts back as `reasoning_content` (OpenAI-compatible upstreams that want them)."""
    concurrent: int = 16
    """Requests at the upstream at once; further ones wait."""
    requests_per_minute: int | None = None
    """Requests sent in any minute at most, retries included; None = any number."""
    retries: int = 5
    """How often a request is sent again after 429, a server error or a lost connection, before any of the answer
    has been passed on."""
    backoff_s: float = 1.0
    """Wait before the first retry; doubled each time, with jitter. A Retry-After of the upstream wins when longer."""
    max_backoff_s: float = 60.0
    """Longest wait of our own choice."""
    timeout_s: float = 600.0
    """Time for a whole answer, waits and retries included."""
    silence_s: float = 120.0
    """Silence of the upstream after which the connection counts as lost."""
    price_in: float | None = None
    """Price of a million prompt tokens, in any currency; cost is counted when this and `price_out` are given."""
    price_out: float | None = None
    """Price of a million answer tokens."""
    price_cached: float | None = None
    """Price of a million prompt tokens read from the provider's cache; None = `price_in`."""
    price_cache_write: float | None = None
    """Price of a million prompt tokens written to it; None = `price_in`."""

    def __post_init__(self) -> None:
        if self.key_env and self.key_file:
            raise ValueError("give key_env or key_file, not both")
        for name in self.headers:
            if name.lower() in _SECRET_HEADERS:
                raise ValueError(f"headers must hold no secret, and {name} is one: use key_env or key_file")
        for name in ("concurrent", "requests_per_minute", "backoff_s", "max_backoff_s", "timeout_s", "silence_s"):
            value: float | None = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0; got {value}")
        if self.retries < 0:
            raise ValueError(f"retries must be 0 or more; got {self.retries}")
        for name in ("price_in", "price_out", "price_cached", "price_cache_write"):
            price: float | None = getattr(self, name)
            if price is not None and not (math.isfinite(price) and price >= 0):
                raise ValueError(f"{name} must be 0 or more; got {price}")


class ServersOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How inference servers are reached (engine kinds `vllm` and `sglang`)."""

    key_env: str = ""
    """Environment variable that holds the servers' API key; empty = they want none."""
    connect_s: float = 10.0
    """Time to connect."""
    silence_s: float = 300.0
    """Silence of a server in mid-answer after which it counts as dead: a long prompt is silent until its first id."""
    retry_seconds: float = 2.0
    """A server that failed is left alone for so long; doubled with each further failure, to 32 times."""
    patience_s: float = 120.0
    """How long a call waits when no server can be asked, before it fails."""
    weights_s: float = 900.0
    """Time for a server to load weights."""
    require_temperature: bool = True
    """Refuse servers whose log-probs are not those of the sampling temperature."""

    def __post_init__(self) -> None:
        for name in ("connect_s", "silence_s", "retry_seconds", "patience_s", "weights_s"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0; got {value}")


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine answers, and what it may use."""

    kind: str = "torch"
    """A registry name (`torch`, `scripted`, `relay`, `vllm`, `sglang`) or `module:Class`."""
    path: str = ""
    """What the engine opens: a model directory (torch), a script file (scripted), `openai:URL` or `anthropic:URL`
    (relay), URLs of servers separated by commas (vllm, sglang)."""
    model_name: str = ""
    """The name that `/v1/models` lists; empty = the engine's own choice (the directory's name, `scripted`)."""
    context_length: int | None = None
    """Most tokens of prompt and answer together; at most the model's own. None = the model's (relay: 131072)."""
    threads: int | None = 1
    """CPU threads of the engine. Models of a few million parameters gain nothing from a second one; None = torch's
    own setting (all cores)."""
    max_sequences: int = 64
    """Answers sampled at once; further requests wait."""
    max_batch_tokens: int = 512
    """Most tokens computed in one step. Smaller = a long prompt delays the others less; larger = it is done sooner."""
    max_waiting: int = 4096
    """Requests that may wait before further ones are refused with 429."""
    kv_memory_mb: int = 1024
    """Memory for cached keys and values in MiB. Sequences being sampled may outgrow it (then nothing else is kept)."""
    device: str = "cpu"
    """torch device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and keys. On CPUs without bfloat16 instructions float32 is several times faster."""
    relay: RelayOptions = RelayOptions()
    """Of engine kind `relay` only."""
    servers: ServersOptions = ServersOptions()
    """Of engine kinds `vllm` and `sglang` only."""

    def __post_init__(self) -> None:
        for name in ("context_length", "threads", "max_sequences", "max_batch_tokens", "max_waiting", "kv_memory_mb"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more; got {value}")
