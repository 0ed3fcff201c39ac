"""A model behind somebody else's API, for teachers and baselines: conversations out, text back.

Nothing here is token-exact: the upstream tokenizes for itself, and the ids in the record are our own renderer's
encoding of what was said (docs/relay.md). The API key stays in this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from openforgerl.engines.options import EngineOptions, RelayOptions
from openforgerl.engines.relay_anthropic import AnthropicApi
from openforgerl.engines.relay_api import Asking, UpstreamApi
from openforgerl.engines.relay_faults import Fault, OutOfTime
from openforgerl.engines.relay_http import Door, Secret, read_key
from openforgerl.engines.relay_ledger import Ledger, RelayStats
from openforgerl.engines.relay_openai import OpenAiApi
from openforgerl.engines.relay_pace import Pace
from openforgerl.errors import ConfigError, EngineError, EngineOverloaded
from openforgerl.protocols import Renderer
from openforgerl.types import FinishReason, JsonValue, Question, Sampling, TextChunk

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT = 131072
"""Tokens, when nothing else is said: the upstream knows its own limit and says so."""

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


class RelayEngine:
    """Implements `protocols.ConversationEngine`."""

    def __init__(
        self,
        api: UpstreamApi,
        url: str,
        secret: Secret,
        options: RelayOptions,
        *,
        model_name: str = "",
        context_length: int = DEFAULT_CONTEXT,
    ) -> None:
        """`url` is the API's base, up to and with its version (`https://host/v1`)."""
        self._api = api
        self._options = options
        self._model_name = model_name or options.model
        self._context_length = context_length
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **options.headers}
        headers |= api.headers(secret.reveal())
        self._door = Door(f"{url.rstrip('/')}/{api.path}", headers, secret, options)
        self._pace = Pace(options)
        self._ledger = Ledger(options)
        self._closed = False

    @classmethod
    def open(cls, path: Path, renderer: Renderer, options: EngineOptions) -> RelayEngine:
        """An engine for `options.path`, which is `openai:URL` or `anthropic:URL`. ConfigError naming the option."""
        kind, _, url = options.path.partition(":")
        relay = options.relay
        apis: dict[str, UpstreamApi] = {"openai": OpenAiApi(relay), "anthropic": AnthropicApi()}
        if kind not in apis:
            raise ConfigError(f"engine.path must be openai:URL or anthropic:URL for a relay; got {options.path!r}")
        _check_url(url)
        if not relay.model:
            raise ConfigError("engine.relay.model is empty: name the upstream's model")
        secret = read_key(relay)
        parts = urlsplit(url)
        if secret.reveal() and parts.scheme == "http" and parts.hostname not in _THIS_MACHINE:
            logger.warning("engine.path is http, not https: the API key travels unencrypted to %s", parts.netloc)
        return cls(
            apis[kind],
            url,
            secret,
            relay,
            model_name=options.model_name,
            context_length=options.context_length or DEFAULT_CONTEXT,
        )

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def weights_version(self) -> int:
        return 0

    @property
    def stats(self) -> RelayStats:
        """Requests, tokens and cost so far."""
        return self._ledger.stats

    async def converse(
        self, question: Question, sampling: Sampling, *, affinity: str, seed: str, deadline: float | None = None
    ) -> AsyncIterator[TextChunk]:
        """The upstream's answer, piece by piece.

        Tried again while none of it was passed on. Past `deadline` (Unix seconds) the last chunk says aborted.
        """
        if self._closed:
            raise EngineError("the relay is closed", status=503)
        asking = Asking(
            question=question,
            sampling=sampling,
            affinity=affinity,
            seed=seed,
            model=self._options.models.get(question.model, self._options.model),
            limit=self._context_length,
        )
        body, warnings = self._api.body(asking)
        ending, shown = "failed", False
        try:
            async with aclosing(self._tries(asking, self._encoded(body), deadline)) as chunks:
                async for chunk in chunks:
                    shown = True
                    if chunk.finish is not None:
                        ending = "stopped" if chunk.finish is FinishReason.ABORTED else "answered"
                        chunk = msgspec.structs.replace(chunk, warnings=(*warnings, *chunk.warnings))
                    yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            # Closed at the last chunk is not closed early: the caller has the whole answer.
            ending = "stopped" if ending == "failed" else ending
            raise
        finally:
            if ending == "stopped" or (ending == "failed" and shown):
                self._ledger.count(without_usage=1)
            self._ledger.count(**{ending: 1})

    async def close(self) -> None:
        """Drop all connections; say what it came to."""
        if not self._closed:
            self._closed = True
            await self._door.close()
            logger.info("relay to %s: %s", self._options.model, self.stats.line())

    async def _tries(self, asking: Asking, body: bytes, deadline: float | None) -> AsyncGenerator[TextChunk]:
        """One try after another until one succeeds, fails for good, or time is over."""
        ends = time.time() + self._options.timeout_s
        ends = ends if deadline is None else min(ends, deadline)
        attempt = 0
        shown = False
        while True:
            try:
                async with aclosing(self._try(asking, body, ends)) as chunks:
                    async for chunk in chunks:
                        shown = shown or bool(chunk.deltas)
                        yield chunk
                return
            except Fault as fault:
                wait = self._pace.backoff(attempt, fault.wait)
                hopeless = shown or not fault.again or attempt >= self._options.retries
                if fault.overloaded and fault.again:
                    self._pace.hold(wait)
                if hopeless or time.time() + wait >= ends:
                    raise self._given_up(fault, wait, attempt) from fault
                logger.info("relay: %s; trying again in %.1f s", fault, wait)
            except OutOfTime:
                if deadline is not None and ends == deadline:
                    yield TextChunk(finish=FinishReason.ABORTED)
                    return
                raise EngineError(
                    f"no whole answer from the upstream within {self._options.timeout_s:g} s (engine.relay.timeout_s)",
                    status=503,
                ) from None
            attempt += 1
            self._ledger.count(retries=1)
            await asyncio.sleep(wait)

    async def _try(self, asking: Asking, body: bytes, ends: float) -> AsyncGenerator[TextChunk]:
        """One request. Raises Fault or OutOfTime."""
        reader = self._api.reader(asking)
        async with self._pace.place(ends - time.time()):
            self._ledger.count(requests=1)
            events = self._door.events(
                body,
                seconds=ends - time.time(),
                prompt_tokens=asking.question.prompt_tokens,
                limit=asking.limit,
            )
            async with aclosing(events):
                async for event in events:
                    deltas = reader.feed(event)
                    if deltas:
                        yield TextChunk(deltas=tuple(deltas))
                    if reader.complete:
                        break
        last = reader.close()
        yield msgspec.structs.replace(last, usage=self._ledger.bill(last.usage))

    def _encoded(self, body: dict[str, JsonValue]) -> bytes:
        fields: dict[str, Any] = {name: value for name, value in body.items() if name not in self._options.omit}
        return msgspec.json.encode({**fields, **self._options.extra})

    def _given_up(self, fault: Fault, wait: float, attempt: int) -> Exception:
        """What the caller is told."""
        if isinstance(fault.error, EngineError):
            logger.warning("relay: giving up after %d retries: %s", attempt, fault)
        if isinstance(fault.error, EngineOverloaded):
            return EngineOverloaded(str(fault.error), retry_after=fault.wait or wait)
        return fault.error


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise ConfigError(f"engine.path: {url!r} is no URL") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError("engine.path must hold no user name or password: use engine.relay.key_env or key_file")
    if not good or parts.query or parts.fragment:
        raise ConfigError(f"engine.path: {url!r} must be a URL like https://host/v1, without query or fragment")
