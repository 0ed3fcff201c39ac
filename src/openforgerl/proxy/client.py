"""Sessions of a proxy in another process, over its control API. The door of the aiohttp client."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from urllib.parse import quote

import aiohttp
import msgspec

from openforgerl.errors import InputError, StoreError
from openforgerl.proxy.views import ErrorView, OpenSession, RecordPage
from openforgerl.types import JsonValue, Limits, ModelCall, OpenedSession, Sampling

PAGE = 50
"""Calls asked for at once."""


class HttpSessions:
    """Implements `protocols.Sessions` over HTTP. `async with` opens and closes its connections.

    What the proxy refuses (4xx) is an InputError with its message; a broken proxy (5xx) a StoreError; an
    unreachable one a ConnectionError or TimeoutError.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 60.0) -> None:
        """`url` is the control port's origin, `http://host:port`; `token` what the control-token file holds."""
        self._url = url.rstrip("/")
        self._token = token
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpSessions:
        self._http = aiohttp.ClientSession(
            timeout=self._timeout, headers={"Authorization": f"Bearer {self._token}"}, trust_env=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        limits: Limits,
        metadata: Mapping[str, str],
        template_kwargs: Mapping[str, JsonValue],
    ) -> OpenedSession:
        """Open a session. InputError when the id is malformed or taken."""
        wanted = OpenSession(
            session_id=session_id,
            sampling=sampling,
            limits=limits,
            metadata=dict(metadata),
            template_kwargs=dict(template_kwargs),
        )
        body = await self._ask("POST", "/v1/sessions", msgspec.json.encode(wanted))
        return msgspec.json.decode(body, type=OpenedSession)

    async def seal(self, session_id: str) -> None:
        """Seal a session; InputError when there is none of that id."""
        await self._ask("POST", f"/v1/sessions/{quote(session_id, safe='')}/seal", b"")

    async def calls(self, session_id: str) -> Sequence[ModelCall]:
        """All recorded calls in order of arrival, fetched page by page; InputError when there is no such session."""
        path = f"/v1/sessions/{quote(session_id, safe='')}/calls?form=record&limit={PAGE}"
        calls: list[ModelCall] = []
        after: int | None = -1
        while after is not None:
            page = msgspec.json.decode(await self._ask("GET", f"{path}&after={after}", None), type=RecordPage)
            calls += page.calls
            after = page.next
        return calls

    async def images(self, names: Collection[str]) -> dict[str, bytes]:
        """The bytes of images that calls' prompts name, by sha256; InputError when one is not there."""
        return {name: await self._ask("GET", f"/v1/images/{quote(name, safe='')}", None) for name in names}

    async def _ask(self, method: str, path: str, body: bytes | None) -> bytes:
        if self._http is None:
            raise InputError("HttpSessions is not open; use it in `async with`")
        try:
            async with self._http.request(method, self._url + path, data=body) as response:
                answer = await response.read()
                if response.status == 200:
                    return answer
                message = _refusal(response.status, answer)
        except aiohttp.ClientError as error:
            raise ConnectionError(f"the proxy's control port {self._url} cannot be reached: {error}") from error
        raise StoreError(message) if response.status >= 500 else InputError(message)


def _refusal(status: int, body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=ErrorView).error.message
    except msgspec.DecodeError:
        return f"the control port answered {status} in a form that is not the proxy's; is the address right?"
