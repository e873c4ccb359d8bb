"""The web server's life: listen, serve, stop within a bound."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web

from gpumgr.web.door.access import Keys, Whence, whence
from gpumgr.web.door.connection import Connection
from gpumgr.web.door.credentials import Certificates, TokenFile
from gpumgr.web.door.doorman import PATIENCE, Doorman, Patience, Visit
from gpumgr.web.door.listening import ListenError, UnixListener, listen_tcp
from gpumgr.web.door.reception import Reception
from gpumgr.web.front import PAGE, Front
from gpumgr.web.pages import make_app
from gpumgr.web.sources import Sources
from gpumgr.web.stream import HEARTBEAT_SECONDS, Streams

__all__ = ["ListenError", "WebServer"]

_log = structlog.get_logger(__name__)

#: What a request under way may take when the server stops; idle connections end at once.
_STOP_SECONDS: Final = 1.0
#: The unix socket's own places: whoever fills the others, root comes in.
_UNIX_PLACES: Final = 64


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
        names: Collection[str] = (),
        page: Path = PAGE,
        patience: Patience = PATIENCE,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        seen_from: Callable[[int, Any], Whence] = whence,
        stop_seconds: float = _STOP_SECONDS,
    ) -> None:
        """`port` 0 takes a free one; `address` tells which. `max_connections` bounds those over TCP; the unix socket has places of its
        own. `names` are the host's: a request over the loopback may bear one of them as its `Host`. `seen_from` tells from a socket's
        family and its peer's address where a client is. Reads the files; raises SettingsError if one can't be used. Must be made
        inside the event loop.
        """
        self._host, self._port = host, port
        self._unix = UnixListener(unix_socket) if unix_socket is not None else None
        self._token = TokenFile(token_file) if token_file is not None else None
        self._certificates = Certificates.of(tls_cert_file, tls_key_file, client_ca_file)
        self._keys = Keys(takes_token=token_file is not None, takes_certificate=client_ca_file is not None)
        self._streams = Streams(sources, heartbeat_seconds=heartbeat_seconds)
        app = make_app(sources, front=Front.read(page), streams=self._streams, keys=self._keys_now, names=names)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=stop_seconds)
        self._seen_from, self._patience = seen_from, patience
        self._doorman, self._unix_doorman = Doorman(max_connections, patience), Doorman(_UNIX_PLACES, patience)
        self._reception = Reception(self._connection, peer=self._peer, handshake_seconds=patience.request_seconds)
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
        """Open now, on both doors."""
        return self._doorman.inside + self._unix_doorman.inside

    @property
    def connections_refused(self) -> int:
        """For want of room, since the start."""
        return self._doorman.refused + self._unix_doorman.refused

    async def start(self) -> None:
        """Listens. Raises ListenError that says what to do; nothing is left open then."""
        await self._runner.setup()
        try:
            for listener in await listen_tcp(self._host, self._port):
                self._reception.open(listener, self._tls_context, self._doorman)
            if self._unix is not None:
                self._reception.open(self._unix.listen(), lambda: None, self._unix_doorman)
        except ListenError:
            await self.stop()
            raise
        self._look()
        _log.info("web_listening", url=self.url)
        self._warn_of_plain_token()

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
        self._unix_doorman.end_all()

    def _warn_of_plain_token(self) -> None:
        addresses = [listener.getsockname()[0] for listener in self._reception.listeners if listener.family != socket.AF_UNIX]
        told = [address for address in addresses if not ip_address(address).is_loopback]
        if self._token is not None and self._certificates is None and told:
            _log.warning(
                "token_in_plain_http",
                addresses=told,
                consequence="whoever sees the network's packets learns the token",
                remedy="set http.tls_cert_file and http.tls_key_file",
            )

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(self._patience.look_seconds, self._look)
        self._doorman.look(loop.time())
        self._unix_doorman.look(loop.time())

    def _peer(self, connected: socket.socket) -> str | None:
        """The kubelet's probes come from the address that they go to."""
        try:
            here, there = connected.getsockname(), connected.getpeername()
        except OSError:  # gone already
            return None
        return None if self._seen_from(connected.family, there) != "beyond" or here[0] == there[0] else str(there[0])

    def _connection(self, visit: Visit, doorman: Doorman) -> Connection:
        server = self._runner.server
        assert server is not None
        return Connection(server, doorman, visit, self._seen_from)

    def _tls_context(self) -> ssl.SSLContext | None:
        return self._certificates.context() if self._certificates is not None else None

    def _keys_now(self) -> Keys:
        if self._token is None:
            return self._keys
        return Keys(takes_token=True, token=self._token.current(), takes_certificate=self._keys.takes_certificate)
