"""The way to an upstream: the one place of this room that knows the aiohttp client and the API key."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

import aiohttp
import msgspec

from openforgerl.engines.options import RelayOptions
from openforgerl.engines.relay_faults import Fault, OutOfTime, cut, malformed, refusal
from openforgerl.errors import ConfigError, EngineError
from openforgerl.wire import SseEvent, SseReader

MOST_EVENT_BYTES = 8 * 2**20
MOST_ANSWER_BYTES = 64 * 2**20
MOST_ERROR_BYTES = 64 * 2**10
CONNECT_S = 30.0
LEAST_IN_ANSWERS = 16
"""Characters that a key must have to be taken out of answers: shorter ones are words that a model may well say."""
LEAST_IN_ERRORS = 8
"""The same for an upstream's errors. Still shorter ones guard nothing, and taking them out would spoil the numbers."""
_PLACEHOLDERS = frozenset({"sk-no-key-required"})
"""What stands for no key (llama.cpp's documentation) though it is long enough to be one."""


class Secret:
    """An API key that no repr, log line or record shows."""

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(...)"

    def reveal(self) -> str:
        """The key itself, for the request's header."""
        return self._value

    def out_of_error(self, data: bytes) -> bytes:
        """An upstream's error without the key, if it echoes it."""
        return self._out_of(data, LEAST_IN_ERRORS)

    def out_of_event(self, data: str) -> str:
        """A stream's event without the key, if it echoes it. What a model may have said by itself is left alone."""
        least = LEAST_IN_ERRORS if _is_error(data) else LEAST_IN_ANSWERS
        return self._out_of(data.encode(), least).decode()

    def _out_of(self, data: bytes, least: int) -> bytes:
        if len(self._value) < least or self._value in _PLACEHOLDERS:
            return data
        return data.replace(self._value.encode(), b"[key]")


def read_key(options: RelayOptions) -> Secret:
    """The key that the options name; an empty one when they name none. ConfigError without ever quoting it."""
    if options.key_file:
        where = f"engine.relay.key_file {options.key_file}"
        try:
            value = Path(options.key_file).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{where} cannot be read: {reason}") from None
    elif options.key_env:
        where = f"engine.relay.key_env {options.key_env}"
        value = os.environ.get(options.key_env, "")
    else:
        return Secret("")
    value = value.strip()
    if not value:
        raise ConfigError(f"{where} holds no key")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ConfigError(f"{where} must hold one key: a single word of ASCII characters")
    return Secret(value)


class Door:
    """Sends requests to one URL and gives the events of their answers."""

    def __init__(self, url: str, headers: Mapping[str, str], secret: Secret, options: RelayOptions) -> None:
        """`headers` carry the key."""
        self._url = url
        self._headers = dict(headers)
        self._secret = secret
        self._options = options
        self._client: aiohttp.ClientSession | None = None

    async def events(self, body: bytes, *, seconds: float, prompt_tokens: int, limit: int) -> AsyncGenerator[SseEvent]:
        """The answer's events to the end of the stream, within `seconds` in all.

        Raises Fault for whatever goes wrong, OutOfTime when the time is over.
        """
        ends = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(ends):
                response = await self._http().post(self._url, data=body, headers=self._headers, allow_redirects=False)
            async with response:
                async with asyncio.timeout_at(ends):
                    await self._check(response, prompt_tokens, limit)
                reader, read = SseReader(max_event_bytes=MOST_EVENT_BYTES), 0
                async with aclosing(self._pieces(response, ends)) as pieces:
                    async for piece in pieces:
                        read += len(piece)
                        if read > MOST_ANSWER_BYTES:
                            raise _too_large(f"the answer is larger than {MOST_ANSWER_BYTES} bytes")
                        for event in self._read(reader, piece):
                            yield event
        except TimeoutError as error:
            if asyncio.get_running_loop().time() >= ends:
                raise OutOfTime from error
            raise cut(f"silent for {self._options.silence_s:g} s") from error
        except (ssl.SSLCertVerificationError, aiohttp.ClientConnectorCertificateError) as error:
            raise Fault(EngineError("the upstream's TLS certificate cannot be verified"), again=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise cut(type(error).__name__) from error

    async def close(self) -> None:
        """Drop all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=self._options.silence_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._client

    async def _check(self, response: aiohttp.ClientResponse, prompt_tokens: int, limit: int) -> None:
        """A stream of events, or a Fault."""
        if response.status != 200:
            said = self._secret.out_of_error(await response.content.read(MOST_ERROR_BYTES))
            headers = {name.lower(): value for name, value in response.headers.items()}
            raise refusal(response.status, said, headers, prompt_tokens, limit)
        if response.content_type != "text/event-stream":
            raise malformed(f"it is {response.content_type}, not a stream of events")

    async def _pieces(self, response: aiohttp.ClientResponse, ends: float) -> AsyncGenerator[bytes]:
        """The body as it comes; an end of line at its end, for servers that leave the last one out."""
        while True:
            async with asyncio.timeout_at(ends):
                piece = await response.content.readany()
            if not piece:
                break
            yield piece
        yield b"\n\n"

    def _read(self, reader: SseReader, piece: bytes) -> list[SseEvent]:
        try:
            events = reader.feed(piece)
        except UnicodeDecodeError as error:
            raise malformed("it is not UTF-8") from error
        except ValueError as error:
            raise _too_large(str(error)) from error
        return [SseEvent(self._secret.out_of_event(event.data), event.event) for event in events]


def _is_error(data: str) -> bool:
    """Whether an event's data is an error, as both APIs write one: an object with a field `error`."""
    if '"error"' not in data:
        return False
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False  # its reader says what is wrong with it, without its words
    return isinstance(value, dict) and bool(value.get("error"))


def _too_large(what: str) -> Fault:
    return Fault(EngineError(f"the upstream's answer is too large: {what}"), again=False)
