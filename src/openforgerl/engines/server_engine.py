"""vLLM and SGLang servers as an engine: ids in, ids out, several replicas, one of which may die in mid-answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import ClassVar

import aiohttp
import msgspec

from openforgerl.engines.continuing import Answer
from openforgerl.engines.options import EngineOptions
from openforgerl.engines.server_api import (
    Piece,
    Scope,
    ServerApi,
    SglangApi,
    Step,
    Unreadable,
    VllmApi,
    check_prompt,
)
from openforgerl.engines.server_probe import Served, glance, probe
from openforgerl.engines.server_replicas import NO_VERSION, Replica, Replicas
from openforgerl.errors import ConfigError, EngineError, EngineOverloaded, InputError
from openforgerl.protocols import Renderer
from openforgerl.types import Chunk, FinishReason, Prompt, Sampling
from openforgerl.wire import SseReader

log = logging.getLogger(__name__)

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_MOST_ERROR_BYTES = 4096
_GONE = (502, 503, 504)
"""What is answered for a server that cannot be reached."""


class _Broken(Exception):
    """A replica cannot be reached, or broke off; another one can go on from the ids that are there."""


class _Aborted(Exception):
    """A replica ended the answer because somebody told it to: a weight update. It is well, and can go on itself."""


class _Spoilt(Exception):
    """A replica failed at this very answer, which says nothing of its others: a prompt that makes servers fail must
    not take them from everybody else."""


class ServerEngine:
    """Implements `InferenceEngine` and `WeightControl`. Open with `open`.

    An answer that a replica breaks off is continued by the next one, from the prompt and the ids sampled so far: the
    same distribution, so nothing is lost and nothing is sampled twice. Only weights of the current version answer.
    """

    api: ClassVar[ServerApi]

    def __init__(self, urls: Sequence[str], served: Served, *, stop_ids: Sequence[int], options: EngineOptions) -> None:
        """`served`: what `probe` found. `stop_ids` end an answer, and nothing else does."""
        self._served = served
        self._stop_ids = tuple(stop_ids)
        self._options = options.servers
        self._name = options.model_name or served.model
        self._context = min(options.context_length or served.context_length, served.context_length)
        self._replicas = Replicas([Replica(url) for url in urls], self._options.retry_seconds)
        self._headers = _headers(options)
        self._http: aiohttp.ClientSession | None = None
        self._open = asyncio.Event()
        self._running: set[str] = set()
        """Addresses of replicas that did not say that they stand still, in a weight update."""
        self._open.set()

    @classmethod
    def open(cls, path: Path, renderer: Renderer, options: EngineOptions) -> ServerEngine:
        """Probe the servers whose URLs `options.path` lists, separated by commas. ConfigError says what they lack."""
        del path  # a URL is no path
        urls = [url.strip().rstrip("/") for url in options.path.split(",")]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"engine.path: {url!r} is no http(s) URL; give {cls.api.name}:http://HOST:PORT[,...]")
        look = glance(renderer)
        found = [probe(url, cls.api, _headers(options), options.servers.connect_s * 3, look=look) for url in urls]
        if len({(one.model, one.context_length) for one in found}) > 1:
            raise ConfigError(f"the servers differ in model or context: {', '.join(map(str, found))}")
        at_temperature = all(one.at_temperature for one in found)
        if not at_temperature and options.servers.require_temperature:
            raise ConfigError(
                f"{', '.join(urls)}: log-probs are not those of the sampling temperature; start the server with "
                f"{cls.api.logprob_fix}, or set engine.servers.require_temperature = false (answers at other "
                "temperatures than 1 then come without log-probs, and cannot train)"
            )
        blind = next((one.blind for one in found if one.blind), "")
        if blind:
            log.warning("%s takes no images: %s", ", ".join(urls), blind)
        served = msgspec.structs.replace(found[0], at_temperature=at_temperature, blind=blind)
        return cls(urls, served, stop_ids=renderer.stop_ids, options=options)

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def context_length(self) -> int:
        return self._context

    @property
    def weights_version(self) -> int:
        return self._replicas.version

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        affinity: str,
        priority: int = 0,
        deadline: float | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> AsyncIterator[Chunk]:
        """Sample an answer as it comes. Raises EngineError (infrastructure) or EngineOverloaded."""
        del priority  # a server needs a flag of its own to know priorities, and refuses them without
        if prompt.images and self._served.blind:
            raise EngineError(f"{self.api.name} takes no images here: {self._served.blind}", status=400)
        asked = Answer.begin(prompt, sampling, context=self._context, images=images)
        async with aclosing(self._sampled(asked, affinity)) as chunks:
            # Around each wait, not around the loop: it must never strike the reader, who has the task between chunks.
            late = Chunk(ids=(), logprobs=None, weights_version=self.weights_version, finish=FinishReason.ABORTED)
            while True:
                left_s = None if deadline is None else deadline - time.time()
                until = asyncio.timeout(left_s)
                try:
                    async with until:
                        chunk = late if left_s is not None and left_s <= 0 else await anext(chunks, None)
                except TimeoutError:
                    if not until.expired():
                        raise
                    chunk = late
                if chunk is None:
                    return
                yield chunk
                if chunk.finish is not None:
                    return

    async def _sampled(self, asked: Answer, session: str) -> AsyncGenerator[Chunk]:
        """Chunks up to the one that finishes, from as many replicas as it takes."""
        tried: list[Replica] = []
        spoilt = ""
        give_up = time.monotonic() + self._options.patience_s
        while True:
            await self._open.wait()
            replica = self._replicas.choose(session, tried)
            if replica is None:
                if spoilt:
                    raise EngineError(f"{self.api.name} fails at this request: {spoilt}")
                tried = []
                await self._pause_for_any(give_up)
                continue
            scope = Scope(model=self._served.model, session=session)
            request = self.api.request(asked, self._stop_ids, scope)
            version, before = self.weights_version, asked.left
            try:
                async with aclosing(self._pieces(replica, request, asked)) as pieces:
                    async for piece in pieces:
                        asked.take(piece.ids)
                        finish = _FINISHES.get(piece.finish)
                        if finish is FinishReason.LENGTH and asked.left:
                            raise EngineError(
                                f"the server cut the answer after {len(asked.sampled)} of {asked.most} tokens"
                            )
                        if piece.ids or finish:
                            yield self._chunk(piece, asked.sampling, version, finish)
                        if piece.finish and not finish:  # `abort`: a weight update, or somebody else's doing
                            raise _Aborted(f"the server ended the answer: {piece.finish}")
                        if finish:
                            self._replicas.answered(replica)
                            return
                raise _Broken("the stream ended in mid-answer")
            except _Broken as error:
                self._replicas.failed(replica, str(error))
            except _Aborted as error:
                replica.last_error = str(error)
                if asked.left == before:
                    await asyncio.sleep(self._options.retry_seconds)
            except _Spoilt as error:
                await self._look_at(replica)
                if spoilt:
                    raise EngineError(f"{self.api.name} fails at this request: {error}") from error
                spoilt = str(error)
            tried.append(replica)
            if asked.left < before:  # it goes on: only replicas that give nothing use up the patience
                give_up = time.monotonic() + self._options.patience_s

    async def _look_at(self, replica: Replica) -> None:
        """Ask a replica that failed at one answer how it is; it counts as down when it is not there or says so."""
        limit = aiohttp.ClientTimeout(total=self._options.connect_s)
        try:
            async with self._client().get(replica.url + self.api.health_path, timeout=limit) as answer:
                why = f"{self.api.health_path} gave {answer.status}" if answer.status in _GONE else ""
        except (aiohttp.ClientError, OSError) as error:
            why = f"{self.api.health_path}: {type(error).__name__}: {error}"
        if why:
            self._replicas.failed(replica, why)

    async def _pause_for_any(self, give_up: float) -> None:
        """Wait until some replica may be asked again. EngineError when that takes too long."""
        wait = self._replicas.wait()
        if time.monotonic() + wait > give_up:
            raise EngineError(f"no {self.api.name} server answers: {self._replicas.words()}", status=503)
        await asyncio.sleep(max(wait, 0.01))

    def _chunk(self, piece: Piece, sampling: Sampling, version: int, finish: FinishReason | None) -> Chunk:
        """log-probs only where they are what `Chunk` says: of the whole distribution, at the sampling temperature."""
        changed = sampling.off_policy
        known = self._served.at_temperature or sampling.temperature == 1
        return Chunk(
            ids=piece.ids,
            logprobs=piece.logprobs if known and changed is None else None,
            sampling_logprobs=piece.logprobs if known and changed == "truncation" else None,
            weights_version=version,
            finish=finish,
        )

    async def _pieces(self, replica: Replica, request: Step, asked: Answer) -> AsyncGenerator[Piece]:
        """The events of one request. Raises _Broken and _Spoilt; EngineError for what none would answer."""
        seen, reader, read = 0, SseReader(), not asked.images
        begun = asked.ids
        replica.in_flight += 1
        try:
            async with self._client().post(replica.url + request.path, json=request.body) as answer:
                if answer.status != 200:
                    raise _refused(answer, await answer.content.read(_MOST_ERROR_BYTES), self.api.name)
                async for data in answer.content.iter_any():
                    for event in reader.feed(data):
                        if event.data.strip() == "[DONE]":
                            return
                        piece = self.api.piece(json.loads(event.data), seen)
                        if piece.error:
                            raise _Broken(piece.error) if piece.status in _GONE else _Spoilt(piece.error)
                        if not read and (piece.ids or piece.finish):
                            check_prompt(piece.prompt_ids, begun, self.api.name)
                            read = True
                        seen += len(piece.ids)
                        yield piece
        except (Unreadable, ValueError) as error:
            raise _Spoilt(f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise  # the caller's deadline
            raise _Broken(f"{type(error).__name__}: {error}") from error
        finally:
            replica.in_flight -= 1

    def serves(self, version: int) -> None:
        """Somebody else updates the servers' weights, and says that this is their version now."""
        self._replicas.version = version
        for replica in self._replicas.all:
            replica.version = version

    async def pause(self) -> None:
        """Let nothing new start, and what runs end."""
        self._open.clear()
        self._running.clear()
        for replica in self._replicas.all:
            if not await self._do(replica, self.api.pausing()):
                self._running.add(replica.url)

    async def load(self, weights: Path | Mapping[str, object], version: int) -> None:
        """Give every replica the model directory `weights`, which they must be able to read under that path.

        A replica that fails is not asked any more until a later `load` reaches it. EngineError when all fail.
        """
        if not isinstance(weights, Path):
            raise InputError(f"{self.api.name} loads weights from a directory, not from memory")
        done = await asyncio.gather(*(self._load(replica, weights, version) for replica in self._replicas.all))
        if not any(done):
            raise EngineError(f"no {self.api.name} server took weights version {version}: {self._replicas.words()}")
        self._replicas.version = version

    async def _load(self, replica: Replica, weights: Path, version: int) -> bool:
        # One that may still answer would go on under other weights; it keeps its own and is not asked meanwhile.
        if replica.url in self._running or not await self._do(replica, self.api.loading(weights, version)):
            return False
        replica.version = version
        self._replicas.answered(replica)
        return True

    async def resume(self) -> None:
        """Answer again. A replica that may still be paused would hold what it is sent: it waits for the next update."""
        self._running.clear()
        for replica in self._replicas.all:
            if not await self._do(replica, self.api.resuming()):
                replica.version = NO_VERSION
        self._open.set()

    async def close(self) -> None:
        """Close the connections; the servers are not ours."""
        if self._http is not None:
            await self._http.close()

    async def _do(self, replica: Replica, steps: Sequence[Step]) -> bool:
        """Requests of a weight update, in order; False (and the replica marked) when one fails."""
        for step in steps:
            limit = aiohttp.ClientTimeout(total=self._options.weights_s)
            try:
                async with self._client().post(replica.url + step.path, json=step.body, timeout=limit) as answer:
                    said = (await answer.content.read(_MOST_ERROR_BYTES)).decode(errors="replace")
                    status = answer.status
            except (aiohttp.ClientError, OSError) as error:
                said, status = f"{type(error).__name__}: {error}", 0
            if status != 200 or _says_no(said):
                needs = f" (is it started with {step.needs}?)" if step.needs and status in (403, 404, 405) else ""
                self._replicas.failed(replica, f"{step.path} gave {status or 'no answer'}{needs}: {said[:300]}")
                return False
        return True

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            options = self._options
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.connect_s, sock_read=options.silence_s)
            self._http = aiohttp.ClientSession(
                timeout=timeout,
                headers=self._headers,
                trust_env=False,
                connector=aiohttp.TCPConnector(limit=0),
                read_bufsize=2**20,
            )
        return self._http


class VllmEngine(ServerEngine):
    """`vllm:http://HOST:PORT[,...]`. Start the server with `--logprobs-mode processed_logprobs`."""

    api = VllmApi()


class SglangEngine(ServerEngine):
    """`sglang:http://HOST:PORT[,...]`."""

    api = SglangApi()


def _headers(options: EngineOptions) -> dict[str, str]:
    name = options.servers.key_env
    if not name:
        return {}
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(f"engine.servers.key_env {name} holds no key")
    return {"Authorization": f"Bearer {key}"}


def _refused(answer: aiohttp.ClientResponse, said: bytes, name: str) -> Exception:
    """What an answer other than 200 means: leave this replica alone, try another, come back later, or give up."""
    text = said.decode(errors="replace").strip()[:500]
    if answer.status == 429:
        seconds = 1.0
        with contextlib.suppress(ValueError):
            seconds = float(answer.headers.get("Retry-After", "1"))
        return EngineOverloaded(f"{name} is overloaded: {text}", retry_after=seconds)
    if answer.status in _GONE:
        return _Broken(f"HTTP {answer.status}: {text}")
    if answer.status in (408, 500):
        return _Spoilt(f"HTTP {answer.status}: {text}")
    return EngineError(f"{name} refuses the request: HTTP {answer.status}: {text}", status=500)


def _says_no(said: str) -> bool:
    """SGLang answers 200 with `{"success": false, ...}` in some of its calls."""
    try:
        answer = json.loads(said)
    except ValueError:
        return False
    return isinstance(answer, dict) and answer.get("success") is False
