"""The unix socket of one allocation, open to every user in the container and protected against misuse."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration

from gpumgr.rpc.server import DrainingServer
from gpumgr.unix_socket import UnixSocket

_MODE: Final = 0o666
_BACKLOG: Final = 128
#: At once, of one container. A registration takes milliseconds, and the client retries when it is refused.
_MOST_CONNECTIONS: Final = 128
#: Longer than any client waits for an answer.
_MOST_CONNECTION_SECONDS: Final = 30.0
#: A registration takes some hundred bytes; h2 itself would collect a frame of 16 MiB before it finds it too large.
_MOST_CONNECTION_BYTES: Final = 256 * 1024
#: The minimum of HTTP/2: as many bytes of one connection may wait here unread.
_WINDOW_BYTES: Final = 65535


class RegistrationListener:
    """Serves `service` at `path`, once: a new socket needs a new listener."""

    def __init__(self, path: Path, service: Any) -> None:
        self._socket = UnixSocket(path, mode=_MODE)
        self._server = _Server([service])

    @property
    def in_place(self) -> bool:
        """Whether the socket's file is the one that this listener made."""
        return self._socket.in_place

    async def listen(self) -> None:
        """Replaces a socket of an earlier process of the agent. Raises OSError."""
        await self._server.start(sock=self._socket.bind(replace_served=True), backlog=_BACKLOG)

    async def close(self, grace_seconds: float) -> None:
        """Waits for calls in flight and disconnects. The file stays: a restarted agent replaces it."""
        await self._server.drain(grace_seconds, lambda: None)


class _Server(DrainingServer):
    """A server for untrusted peers: h2 checks their headers, and little memory is kept for each of them."""

    def __init__(self, services: list[Any]) -> None:
        windows = Configuration(http2_connection_window_size=_WINDOW_BYTES, http2_stream_window_size=_WINDOW_BYTES)
        super().__init__(services, config=windows, h2_config=H2Configuration(client_side=False, header_encoding="ascii"))
        self._limited: set[_LimitedProtocol] = set()

    def _protocol_factory(self) -> H2Protocol:
        return cast("H2Protocol", _LimitedProtocol(super()._protocol_factory, self._limited))


class _LimitedProtocol(asyncio.Protocol):
    """Limits one connection in time and bytes, and all connections in number, before its bytes reach HTTP/2."""

    def __init__(self, make: Callable[[], H2Protocol], limited: "set[_LimitedProtocol]") -> None:
        self._make = make
        self._limited = limited
        self._inner: H2Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._end: asyncio.TimerHandle | None = None
        self._received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._limited) >= _MOST_CONNECTIONS:
            self._transport.abort()
            return
        self._limited.add(self)
        self._end = asyncio.get_running_loop().call_later(_MOST_CONNECTION_SECONDS, transport.close)
        self._inner = self._make()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is None or self._transport is None:
            return
        self._received_bytes += len(data)
        if self._received_bytes > _MOST_CONNECTION_BYTES:
            self._transport.abort()
            return
        try:
            self._inner.data_received(data)
        except Exception:  # bytes on which h2 itself fails, such as headers that are not ASCII
            self._transport.abort()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limited.discard(self)
        if self._end is not None:
            self._end.cancel()
        if self._inner is not None:
            self._inner.connection_lost(exc)
