"""A web application under the access rules and connection limits of gpumgr: listen, serve, stop within a time limit."""

import asyncio
import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web

from gpumgr.common.aio import next_tick
from gpumgr.common.heap import return_memory
from gpumgr.common.unix_socket import UnixSocket
from gpumgr.web.access import AuthPolicy, CurrentPolicy, Origin, origin_of
from gpumgr.web.connection import Connection, Listener
from gpumgr.web.connection_limit import TIMEOUTS, ConnectionLimit, Timeouts
from gpumgr.web.credentials import Certificates, TokenFile
from gpumgr.web.listening import BACKLOG, ListenError, listen_tcp, listen_unix

_log = structlog.get_logger(__name__)

#: The time that a request in progress has when the server stops; idle connections are closed at once.
STOP_SECONDS: Final = 1.0
#: The unix socket has slots of its own, so that root can connect when all others are taken.
_UNIX_SLOTS: Final = 64
#: Freed memory is returned to the system at this interval, if there were so many requests.
_TRIM_SECONDS: Final = 10.0
_REQUESTS_PER_TRIM: Final = 50


class AppServer:
    """Serves an application on a TCP address and a unix socket, between `start` and `stop`."""

    def __init__(
        self,
        make_app: Callable[[CurrentPolicy], web.Application],
        *,
        host: str,
        port: int,
        unix_socket: Path | None = None,
        max_connections: int = 512,
        token_file: Path | None = None,
        tls_cert_file: Path | None = None,
        tls_key_file: Path | None = None,
        client_ca_file: Path | None = None,
        timeouts: Timeouts = TIMEOUTS,
        origin_of: Callable[[int, Any], Origin] = origin_of,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        """`make_app` gets the current policy for remote clients. `port` 0 takes a free one; `address` has it. `max_connections` bounds
        those over TCP; the unix socket has slots of its own.

        Reads the files; raises SettingsError if one cannot be used. Must be created inside the event loop.
        """
        self._host, self._port = host, port
        self._unix = UnixSocket(unix_socket) if unix_socket is not None else None
        self._token = TokenFile(token_file) if token_file is not None else None
        self._certificates = Certificates.of(tls_cert_file, tls_key_file, client_ca_file)
        self._policy = AuthPolicy(takes_token=token_file is not None, takes_certificate=client_ca_file is not None)
        self._runner = web.AppRunner(make_app(self._current_policy), access_log=None, shutdown_timeout=stop_seconds)
        self._check_seconds = timeouts.check_seconds
        self._tcp_listener = Listener(
            limit=ConnectionLimit(max_connections, timeouts),
            tls=self._certificates.context if self._certificates is not None else None,
            origin_of=origin_of,
        )
        self._unix_listener = Listener(limit=ConnectionLimit(_UNIX_SLOTS, timeouts), tls=None, origin_of=origin_of)
        self._servers: list[asyncio.Server] = []
        self._next_check: asyncio.TimerHandle | None = None
        #: Time, and the number of requests by then.
        self._last_trim = (0.0, 0)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the listening socket. Raises RuntimeError before `start`."""
        for name in self._tcp_names():
            return str(name[0]), int(name[1])
        raise RuntimeError("the web server does not listen")

    @property
    def url(self) -> str:
        host, port = self.address
        scheme = "http" if self._certificates is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def connections(self) -> int:
        """Open now, over TCP and the unix socket."""
        return sum(listener.limit.open for listener in self._listeners)

    @property
    def connections_refused(self) -> int:
        """Since the start, because no slot was free."""
        return sum(listener.limit.refused for listener in self._listeners)

    @property
    def disconnects(self) -> int:
        """Number of requests since the start that the client ended, by closing the connection, before the response was complete."""
        return sum(listener.disconnects for listener in self._listeners)

    async def start(self) -> None:
        """Listens. Raises ListenError; no socket stays open then."""
        await self._runner.setup()
        try:
            for listening in await listen_tcp(self._host, self._port):
                await self._serve(listening, self._tcp_listener)
            if self._unix is not None:
                await self._serve(listen_unix(self._unix), self._unix_listener)
        except ListenError:
            await self.stop()
            raise
        self._check_limits()
        _log.info("web_listening", url=self.url)
        self._warn_of_plain_token()

    async def stop(self) -> None:
        """Closes the listening sockets at once, and all connections within `stop_seconds`. May be called twice, or without `start`."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        if self._unix is not None:
            self._unix.remove()
        await self._runner.cleanup()
        if self._next_check is not None:
            self._next_check.cancel()
        for listener in self._listeners:
            listener.limit.cut_all()
            await asyncio.gather(*listener.handshakes)

    @property
    def _listeners(self) -> tuple[Listener, Listener]:
        return self._tcp_listener, self._unix_listener

    async def _serve(self, listening: socket.socket, listener: Listener) -> None:
        """asyncio accepts, since aiohttp's sites have no place for a limit that counts a connection before its TLS handshake."""
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(lambda: Connection(server, listener), sock=listening, backlog=BACKLOG))

    def _tcp_names(self) -> list[Any]:
        sockets = [each for server in self._servers for each in server.sockets]
        return [each.getsockname() for each in sockets if each.family != socket.AF_UNIX]

    def _warn_of_plain_token(self) -> None:
        addresses = [name[0] for name in self._tcp_names() if not ip_address(name[0]).is_loopback]
        if self._token is not None and self._certificates is None and addresses:
            _log.warning(
                "token_in_plain_http",
                addresses=addresses,
                consequence="everyone who can capture the network's packets can read the token",
                remedy="set http.tls_cert_file and http.tls_key_file",
            )

    def _check_limits(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._next_check = loop.call_at(next_tick(self._check_seconds, now), self._check_limits)
        for listener in self._listeners:
            listener.limit.check(now)
        requests = self._runner.server.requests_count if self._runner.server is not None else 0
        if now >= self._last_trim[0] + _TRIM_SECONDS and requests >= self._last_trim[1] + _REQUESTS_PER_TRIM:
            self._last_trim = (now, requests)
            loop.run_in_executor(None, return_memory)

    async def _current_policy(self) -> AuthPolicy:
        if self._token is None:
            return self._policy
        return AuthPolicy(takes_token=True, token=await self._token.current(), takes_certificate=self._policy.takes_certificate)
