"""The web server's life: listen, serve, stop within a bound."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web

from gpumgr.web.access import Keys, Whence, whence
from gpumgr.web.connection import Connection
from gpumgr.web.credentials import Certificates, TokenFile
from gpumgr.web.doorman import PATIENCE, Doorman, Patience, Visit
from gpumgr.web.front import PAGE, Front
from gpumgr.web.listening import ListenError, UnixListener, listen_tcp
from gpumgr.web.pages import make_app
from gpumgr.web.reception import Reception
from gpumgr.web.sources import Sources
from gpumgr.web.stream import HEARTBEAT_SECONDS, Streams

__all__ = ["ListenError", "WebServer"]

_log = structlog.get_logger(__name__)

#: What a request under way may take when the server stops; idle connections end at once.
_STOP_SECONDS: Final = 1.0


class WebServer:
    """Serves the pages on a TCP address and a unix socket, between `start` and `stop`."""

    def __init__(
        self,
        sources: Sources,
        *,
        host: str,
        port: int,
        unix_socket: Path | None = None,
        max_connections: int = 512,
        token_file: Path | None = None,
        tls_cert_file: Path | None = None,
        tls_key_file: Path | None = None,
        client_ca_file: Path | None = None,
        page: Path = PAGE,
        patience: Patience = PATIENCE,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        seen_from: Callable[[int, Any], Whence] = whence,
        stop_seconds: float = _STOP_SECONDS,
    ) -> None:
        """`port` 0 takes a free one; `address` tells which. Reads the files; raises SettingsError if one can't be used. Must be made
        inside the event loop. `seen_from` tells from a socket's family and its peer's address where a client is.
        """
        self._host, self._port = host, port
        self._unix = UnixListener(unix_socket) if unix_socket is not None else None
        self._token = TokenFile(token_file) if token_file is not None else None
        self._certificates = Certificates.of(tls_cert_file, tls_key_file, client_ca_file)
        self._keys = Keys(takes_token=token_file is not None, takes_certificate=client_ca_file is not None)
        self._streams = Streams(sources, heartbeat_seconds=heartbeat_seconds)
        app = make_app(sources, front=Front.read(page), streams=self._streams, keys=self._keys_now)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=stop_seconds)
        self._seen_from, self._patience = seen_from, patience
        self._doorman = Doorman(max_connections, patience)
        self._reception = Reception(self._doorman, self._connection, handshake_seconds=patience.request_seconds)
        self._looking: asyncio.TimerHandle | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port where it listens. Raises RuntimeError before `start`."""
        for listener in self._reception.listeners:
            if listener.family != socket.AF_UNIX:
                host, port = listener.getsockname()[:2]
                return str(host), int(port)
        raise RuntimeError("the web server does not listen")

    @property
    def url(self) -> str:
        host, port = self.address
        scheme = "http" if self._certificates is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def connections(self) -> int:
        """Open now."""
        return self._doorman.inside

    @property
    def connections_refused(self) -> int:
        """For want of room, since the start."""
        return self._doorman.refused

    async def start(self) -> None:
        """Listens. Raises ListenError that says what to do; nothing is left open then."""
        await self._runner.setup()
        try:
            for listener in await listen_tcp(self._host, self._port):
                self._reception.open(listener, self._tls_context)
            if self._unix is not None:
                self._reception.open(self._unix.listen(), lambda: None)
        except ListenError:
            await self.stop()
            raise
        self._look()
        _log.info("web_listening", url=self.url)

    async def stop(self) -> None:
        """Closes the address at once, and all connections within `stop_seconds`. May be called twice, or without `start`."""
        self._reception.close()
        if self._unix is not None:
            self._unix.remove()
        self._streams.close()
        await self._runner.cleanup()
        if self._looking is not None:
            self._looking.cancel()
        self._doorman.end_all()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(self._patience.look_seconds, self._look)
        self._doorman.look(loop.time())

    def _connection(self, visit: Visit) -> Connection:
        server = self._runner.server
        assert server is not None
        return Connection(server, self._doorman, visit, self._seen_from)

    def _tls_context(self) -> ssl.SSLContext | None:
        return self._certificates.context() if self._certificates is not None else None

    def _keys_now(self) -> Keys:
        if self._token is None:
            return self._keys
        return Keys(takes_token=True, token=self._token.current(), takes_certificate=self._keys.takes_certificate)
