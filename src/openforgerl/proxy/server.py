"""The proxy as a server: one port for agents, one for us, and sockets that sandboxes hand over."""

from __future__ import annotations

import logging
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

from openforgerl.errors import ConfigError
from openforgerl.protocols import Engine, Renderer
from openforgerl.proxy.control_app import control_app
from openforgerl.proxy.data_app import UNLISTED, data_app
from openforgerl.proxy.exchange import Gateway
from openforgerl.proxy.listening import BoundedListener
from openforgerl.proxy.options import ProxyOptions
from openforgerl.proxy.routes import BASE_PATHS
from openforgerl.proxy.sessions import CallLog, SessionRegistry
from openforgerl.proxy.tokens import control_token
from openforgerl.wire import DIALECTS

logger = logging.getLogger(__name__)


class _HttpLog(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp has to say about requests that are no HTTP: at most INFO, and without the error itself.

    Its text quotes the bytes that could not be read, and a credential may be among them; nor may an agent fill
    our log with stack traces. Failures of our own handlers are logged by the handlers.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """One line."""
        super().log(min(level, logging.INFO), msg, *args)


class ProxyServer:
    """Serves one engine to harnesses and records every call. `async with` starts and closes it.

    Engine and store are the caller's: opened before, closed after.
    """

    def __init__(
        self, *, engine: Engine, renderer: Renderer, store: CallLog, options: ProxyOptions | None = None
    ) -> None:
        self.options = options or ProxyOptions()
        self.sessions = SessionRegistry(store)
        self.store = store
        self._gateway = Gateway(
            engine=engine,
            renderer=renderer,
            store=store,
            sessions=self.sessions,
            options=self.options,
            dialects={dialect.name: dialect for dialect in (make() for make in DIALECTS)},
        )
        self._data: web.AppRunner | None = None
        self._control: web.AppRunner | None = None
        self._unix_path: Path | None = None
        """The socket file that we made, and so remove."""
        self._listeners: dict[socket.socket, BoundedListener] = {}

    @property
    def calls_in_flight(self) -> int:
        """Model calls that are under way now."""
        return sum(session.in_flight for session in self.sessions.sessions)

    async def __aenter__(self) -> ProxyServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def serving(self) -> AbstractAsyncContextManager[ProxyServer]:
        """This server as a context manager: `async with proxy.serving():`."""
        return self

    async def start(self) -> None:
        """Take over the store's sessions and listen. OSError when an address is taken."""
        options = self.options
        token = control_token(Path(options.control_token_file)) if options.control_token_file else None
        interrupted = await self.sessions.load()
        if interrupted:
            logger.warning("%d calls were running when the last proxy process ended; recorded as errors", interrupted)
        try:
            data = data_app(self._gateway)
            self._data = await self._runner(data)
            await web.TCPSite(self._data, options.host, options.port).start()
            if options.unix_socket:
                await self._serve_unix(self._data, options.unix_socket)
            if token is not None:
                control = control_app(self._gateway, token, base_urls=self.base_urls, unlisted=data[UNLISTED])
                self._control = await self._runner(control)
                await web.TCPSite(self._control, options.host, options.control_port).start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop every call, see that it is recorded, tell its client, and stop listening. Idempotent."""
        data, control, self._data, self._control = self._data, self._control, None, None
        for runner in (data, control):
            for site in list(runner.sites) if runner is not None else ():
                await site.stop()
        await self.sessions.shut_down()
        while self._listeners:
            await self._listeners.popitem()[1].stop()
        for runner in (data, control):
            if runner is not None:
                await runner.cleanup()
        await self.sessions.drain()
        made, self._unix_path = self._unix_path, None
        if made is not None:
            made.unlink(missing_ok=True)

    async def add_listener(self, listener: socket.socket) -> None:
        """Serve the data port's routes on a socket that already listens (made in a sandbox's net namespace).

        The socket is the proxy's from now on: `remove_listener`, or closing the proxy, closes it.
        """
        if self._data is None or self._data.server is None:
            raise ConfigError("the proxy is not started; start it before adding listeners")
        bounded = BoundedListener(self._data.server, listener, self.options.connections_per_listener)
        await bounded.start()
        self._listeners[listener] = bounded

    async def remove_listener(self, listener: socket.socket) -> None:
        """Close an added socket and what came through it; nothing when it is not (or no longer) served."""
        bounded = self._listeners.pop(listener, None)
        if bounded is not None:
            await bounded.stop()

    @property
    def data_address(self) -> tuple[str, int]:
        """Host and port that agents reach."""
        return _address(self._data, "data port")

    @property
    def control_address(self) -> tuple[str, int]:
        """Host and port of the control API; ConfigError when there is none."""
        return _address(self._control, "control port (set proxy.control_token_file)")

    def base_urls(self, session_id: str) -> dict[str, str]:
        """Dialect → base URL that a harness of that session is given."""
        origin = self.options.public_url.rstrip("/")
        if not origin:
            host, port = self.data_address
            origin = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        served = self._gateway.dialects
        return {name: f"{origin}/s/{session_id}{end}" for name, end in BASE_PATHS.items() if name in served}

    async def _serve_unix(self, runner: web.AppRunner, path: str) -> None:
        try:
            await web.UnixSite(runner, path).start()
        except OSError as error:
            raise ConfigError(f"proxy.unix_socket {path!r}: {error.strerror or error}") from error
        if not path.startswith("\0"):
            self._unix_path = Path(path)

    async def _runner(self, app: web.Application) -> web.AppRunner:
        options = self.options
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_HttpLog(logger),
            handler_cancellation=True,
            auto_decompress=False,  # a compressed body is refused, so that none can blow up in memory
            keepalive_timeout=options.idle_timeout_s,
            max_line_size=options.header_limit_kb * 1024,
            max_field_size=options.header_limit_kb * 1024,
            lingering_time=1.0,
            shutdown_timeout=options.shutdown_timeout_s,
        )
        await runner.setup()
        return runner


def _address(runner: web.AppRunner | None, what: str) -> tuple[str, int]:
    for address in runner.addresses if runner is not None else ():
        if isinstance(address, tuple):
            return str(address[0]), int(address[1])
    raise ConfigError(f"the proxy has no {what} now")
