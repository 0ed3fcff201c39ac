"""Sessions of a proxy in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openforgerl.errors import InputError, WireError
from openforgerl.proxy.server import ProxyServer
from openforgerl.types import JsonValue, Limits, ModelCall, OpenedSession, Sampling


class InProcessSessions:
    """Implements `protocols.Sessions` without HTTP."""

    def __init__(self, proxy: ProxyServer) -> None:
        self._proxy = proxy

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
        try:
            _, key = await self._proxy.sessions.open(
                session_id, sampling=sampling, limits=limits, metadata=metadata, template_kwargs=template_kwargs
            )
        except WireError as error:
            raise InputError(error.message) from error
        return OpenedSession(session_id=session_id, key=key, base_urls=self._proxy.base_urls(session_id))

    async def seal(self, session_id: str) -> None:
        """Seal a session; InputError when there is none of that id."""
        try:
            await self._proxy.sessions.seal(session_id)
        except WireError as error:
            raise InputError(error.message) from error

    async def calls(self, session_id: str) -> Sequence[ModelCall]:
        """All recorded calls in order of arrival; InputError when there is no such session."""
        try:
            self._proxy.sessions.get(session_id)
        except WireError as error:
            raise InputError(error.message) from error
        return await self._proxy.store.calls(session_id)
