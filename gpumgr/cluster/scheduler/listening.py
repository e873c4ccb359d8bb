"""The listening sockets of the verbs and of the webhook: TLS, many connections, and an end that finishes the running requests."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import web

from gpumgr.common.aio import persistently
from gpumgr.common.errors import InputError
from gpumgr.web.access import origin_of
from gpumgr.web.connection import Connection, Listener
from gpumgr.web.connection_limit import ConnectionLimit, Timeouts
from gpumgr.web.credentials import Certificates

_log = structlog.get_logger(__name__)

#: Go's client keeps two idle connections only, so a burst of binds opens many. One address has at most a quarter of the connections.
_BACKLOG: Final = 1024
_MAX_CONNECTIONS: Final = 4096
#: A request with whole nodes has up to 128 MB.
_TIMEOUTS: Final = Timeouts(request_seconds=30.0)


class VerbListener:
    """Serves the application between `start` and `stop`. `certificates` None: plain HTTP."""

    def __init__(self, application: web.Application, certificates: Certificates | None, *, stop_seconds: float) -> None:
        application.middlewares.append(_staged)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=stop_seconds)
        self._certificates = certificates
        self._listener = Listener(
            limit=ConnectionLimit(_MAX_CONNECTIONS, _TIMEOUTS),
            tls=certificates.context if certificates is not None else None,
            origin_of=origin_of,
        )
        self._server: asyncio.Server | None = None
        self._checks: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Raises RuntimeError unless it listens."""
        if self._server is None:
            raise RuntimeError("the listener has not been started")
        found = self._server.sockets[0].getsockname()
        return str(found[0]), int(found[1])

    async def start(self, host: str, port: int) -> None:
        """Raises InputError."""
        await self._runner.setup()
        server, loop = self._runner.server, asyncio.get_running_loop()
        assert server is not None, "made by setup"
        try:
            self._server = await loop.create_server(lambda: Connection(server, self._listener), host, port, backlog=_BACKLOG)
        except OSError as error:
            raise InputError(f"can't listen on {host}:{port}: {error.strerror}; give another address or port") from error
        self._checks = asyncio.create_task(persistently("connection_checks", self._check))
        tls = self._certificates
        transport = "plain HTTP" if tls is None else "TLS with client certificates" if tls.clients_required else "TLS"
        serves = ", ".join(sorted({str(each.canonical) for each in self._runner.app.router.resources()}))
        _log.info("scheduler_listening", address=self.address[0], port=self.address[1], transport=transport, serves=serves)

    async def stop(self) -> None:
        """Closes the listening socket at once, and each connection when its request has ended, within `stop_seconds`."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
        if self._checks is not None:
            self._checks.cancel()
        self._listener.limit.cut_all()
        await asyncio.gather(*self._listener.handshakes)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_TIMEOUTS.check_seconds)
            self._listener.limit.check(asyncio.get_running_loop().time())


@web.middleware
async def _staged(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Reports to the connection limit which connections are at work."""
    connection = request.protocol
    assert isinstance(connection, Connection), "the listener makes no others"
    if not request.can_read_body:
        connection.request_received()
    try:
        return await handler(request)
    finally:
        connection.response_sent()
