"""The HTTP server of agent, scheduler and claims controller.

It accepts connections itself and hands them to aiohttp. So a connection counts toward the limit already before its TLS handshake, and each
handshake uses the current certificates.
"""

import asyncio
import asyncio.sslproto
import logging
import socket
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from aiohttp import web

from gpumgr.common.aio import BugLog, persistently, until_tick
from gpumgr.common.unix_socket import UnixSocket
from gpumgr.settings.schema import HttpSettings
from gpumgr.web.access import AuthPolicy, CurrentPolicy
from gpumgr.web.credentials import Certificates, TokenFile
from gpumgr.web.listening import ListenError, listen_tcp, listen_unix
from gpumgr.web.responses import failure

_log = structlog.get_logger(__name__)

# asyncio allocates this buffer before the handshake. With its default of 256 KiB, 4096 unknown clients take 1 GiB.
asyncio.sslproto.SSLProtocol.max_size = 32 << 10

#: How long the rest of a refused body is read. A client that still sends might never read the response.
_LINGER_SECONDS: Final = 2.0
#: The pause after a failure to accept, for example without a free file descriptor.
_PAUSE_SECONDS: Final = 1.0
#: aiohttp would log a traceback for each client that does not send HTTP. The server itself logs errors of handlers.
_AIOHTTP_LOG: Final = logging.getLogger("gpumgr.web.aiohttp")
_AIOHTTP_LOG.disabled = True


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """TCP connections beyond `connections` are closed at once; unix connections count, but are never refused.

    A connection ends if its handshake or first headers take more than `request_seconds`, if it is idle for `idle_seconds`, or if the client
    leaves a response unread for `unread_seconds`. `stop_seconds`: see `HttpServer.stop`.
    """

    connections: int = 512
    request_seconds: float = 10.0
    idle_seconds: float = 75.0
    unread_seconds: float = 30.0
    stop_seconds: float = 1.0


class HttpServer:
    """Serves an application on a TCP address, and on a unix socket without TLS. Port 0 takes a free port, see `address`. Create it inside
    the event loop."""

    def __init__(
        self,
        application: web.Application,
        *,
        host: str,
        port: int,
        unix_socket: Path | None = None,
        tls: Certificates | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._host, self._port, self._tls, self._limits = host, port, tls, limits or Limits()
        self._unix = UnixSocket(unix_socket) if unix_socket is not None else None
        application.middlewares.insert(0, self._middleware())
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_AIOHTTP_LOG,
            shutdown_timeout=self._limits.stop_seconds,
            keepalive_timeout=self._limits.idle_seconds,
            lingering_time=_LINGER_SECONDS,
            auto_decompress=False,
        )
        self._listening: list[socket.socket] = []
        self._daemons: list[asyncio.Task[None]] = []
        #: Connections before the end of their TLS handshake.
        self._starting: dict[asyncio.Task[None], socket.socket] = {}
        self._bugs = BugLog("web_connection")
        self._open: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        #: Connections that have sent no request yet -> the deadline of the request, by the event loop's clock.
        self._silent: weakref.WeakKeyDictionary[asyncio.Transport, float] = weakref.WeakKeyDictionary()
        #: Counts connections that were refused at the limit, and requests of clients that disconnected before the response.
        self.connections_refused = 0
        self.disconnects = 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first listening socket. Raises RuntimeError if there is none."""
        for name in self._tcp_names():
            return str(name[0]), int(name[1])
        raise RuntimeError("the web server does not listen")

    @property
    def url(self) -> str:
        host, port = self.address
        return f"{'http' if self._tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def connections(self) -> int:
        """Counts TCP and unix connections."""
        server = self._runner.server
        return len(self._starting) + (len(server.connections) if server is not None else 0)

    async def start(self) -> None:
        """Raises ListenError; no socket stays open then."""
        await self._runner.setup()
        try:
            self._listening += await listen_tcp(self._host, self._port)
            if self._unix is not None:
                self._listening.append(listen_unix(self._unix))
        except ListenError:
            await self.stop()
            raise
        for each in self._listening:
            each.setblocking(False)
            self._keep("web_accept", partial(self._accept, each))
        self._keep("web_end_silent", self._end_silent)

    def _keep(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        self._daemons.append(asyncio.create_task(persistently(name, work), name=name))

    async def stop(self) -> None:
        """Closes the listening sockets at once, and each connection when its request has ended. After `stop_seconds` it does not wait for
        bodies, and after twice that time it cancels requests. May be called twice, or without `start`."""
        for task in self._daemons:
            task.cancel()
        if self._daemons:
            await asyncio.wait(self._daemons)
        self._daemons.clear()
        for listening in self._listening:
            listening.close()
        self._listening.clear()
        if self._unix is not None:
            self._unix.remove()
        starting = dict(self._starting)
        for task in starting:
            task.cancel()
        await self._runner.cleanup()
        for transport in self._open:
            transport.abort()
        await asyncio.gather(*starting, return_exceptions=True)
        for task, connected in starting.items():
            if task.cancelled():  # a task that is cancelled before it starts never runs `_begin`, which would close the socket
                connected.close()

    def _tcp_names(self) -> list[Any]:
        return [each.getsockname() for each in self._listening if each.family != socket.AF_UNIX]

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connected, _ = listening.accept()
            except BlockingIOError:
                await _readable(listening)
                continue
            except OSError as error:
                _log.error("connection_not_accepted", error=error.strerror or str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if listening.family != socket.AF_UNIX and self.connections >= self._limits.connections:
                self.connections_refused += 1
                connected.close()
            else:
                task = asyncio.create_task(self._begin(connected), name="web_connection")
                self._starting[task] = connected
                task.add_done_callback(self._starting.pop)
            await asyncio.sleep(0)  # while connections are queued, this loop would not let other tasks run

    async def _begin(self, connected: socket.socket) -> None:
        loop, limits = asyncio.get_running_loop(), self._limits
        tls, server = self._tls, self._runner.server
        assert server is not None, "made by setup"
        secure = tls is not None and connected.family != socket.AF_UNIX
        try:
            if connected.family != socket.AF_UNIX:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * limits.unread_seconds))
            transport, _ = await loop.connect_accepted_socket(
                server,
                connected,
                ssl=await tls.current() if tls is not None and secure else None,
                ssl_handshake_timeout=limits.request_seconds if secure else None,
            )
        except BaseException as error:
            connected.close()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, OSError):  # OSError: the client has gone, or the handshake failed
                self._bugs.record(error)
            return
        self._open.add(transport)
        self._silent[transport] = loop.time() + limits.request_seconds

    async def _end_silent(self) -> None:
        """Closes connections that have sent no request in time. One loop checks all, because timers would outlive short connections."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(until_tick(min(1.0, self._limits.request_seconds)))
            for transport in [each for each, until in self._silent.items() if until <= loop.time()]:
                transport.abort()

    def _middleware(self) -> Any:
        @web.middleware
        async def middleware(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if request.transport is None:  # the client disconnected before its request was examined
                self.disconnects += 1
                raise ConnectionResetError("the client has gone")
            self._silent.pop(request.transport, None)
            try:
                return await handler(request)
            except web.HTTPException:
                raise
            except ConnectionError:
                self.disconnects += 1
                raise
            except Exception as error:
                _log.error("page_failed", path=request.path, error=repr(error), exc_info=error)
                return failure(500, "the server failed to respond; see its log")

        return middleware


class PageServer(HttpServer):
    """Serves an application with the address, certificates and token of the settings' section `http`.

    `make_app` gets a function that returns the current policy. The constructor raises SettingsError if a certificate or token file can't be
    used.
    """

    def __init__(
        self,
        make_app: Callable[[CurrentPolicy], web.Application],
        http: HttpSettings,
        *,
        port: int | None = None,
        unix_socket: Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._token = TokenFile(http.token_file) if http.token_file is not None else None
        self._takes_certificate = http.client_ca_file is not None
        super().__init__(
            make_app(self._current_policy),
            host=http.address,
            port=http.port if port is None else port,
            unix_socket=unix_socket,
            tls=Certificates.of(http.tls_cert_file, http.tls_key_file, http.client_ca_file),
            limits=limits or Limits(connections=http.max_connections),
        )

    async def start(self) -> None:
        await super().start()
        _log.info("web_listening", url=self.url)
        addresses = [name[0] for name in self._tcp_names() if not ip_address(name[0]).is_loopback]
        if self._token is not None and self._tls is None and addresses:
            _log.warning(
                "token_in_plain_http",
                addresses=addresses,
                consequence="everyone who can capture the network's packets can read the token",
                remedy="set http.tls_cert_file and http.tls_key_file",
            )

    async def _current_policy(self) -> AuthPolicy:
        token = None if self._token is None else await self._token.current()
        return AuthPolicy(takes_token=self._token is not None, token=token, takes_certificate=self._takes_certificate)


async def _readable(listening: socket.socket) -> None:
    """Waits until `accept` does not block. The event loop's own sock_accept may lose a connection when it is cancelled."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(listening, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listening)
