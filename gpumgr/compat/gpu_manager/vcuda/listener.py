"""The unix socket of one allocation, open to every user in the container and protected against misuse."""

import asyncio
from pathlib import Path
from typing import Any, Final, cast

from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration

from gpumgr.common.rpc.server import DrainingServer, ServedConnection
from gpumgr.common.unix_socket import UnixSocket

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
#: grpclib's own does not validate headers.
_CHECKED: Final = H2Configuration(client_side=False, header_encoding="ascii")


class RegistrationListener(DrainingServer):
    """Serves `service` at `path`, once: a new socket needs a new listener. The file stays when it ends: a restarted agent replaces it.

    Its clients are not trusted: h2 checks their headers, and little memory is kept for each of them.
    """

    def __init__(self, path: Path, service: Any) -> None:
        windows = Configuration(http2_connection_window_size=_WINDOW_BYTES, http2_stream_window_size=_WINDOW_BYTES)
        super().__init__([service], config=windows)
        self._socket = UnixSocket(path, mode=_MODE)

    @property
    def in_place(self) -> bool:
        """Whether the socket's file is the one that this listener made."""
        return self._socket.in_place

    async def listen(self) -> None:
        """Replaces a socket of an earlier process of the agent. Raises OSError."""
        await self.start(sock=self._socket.bind(replace_served=True), backlog=_BACKLOG)

    def _protocol_factory(self) -> H2Protocol:
        return _LimitedConnection(self, super()._protocol_factory(), _CHECKED)


class _LimitedConnection(ServedConnection):
    """Limits one connection in time and bytes, and all connections in number, before its bytes reach HTTP/2."""

    _end: asyncio.TimerHandle | None = None
    _received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self.server.connections) >= _MOST_CONNECTIONS:
            cast("asyncio.Transport", transport).abort()
            return
        self._end = asyncio.get_running_loop().call_later(_MOST_CONNECTION_SECONDS, transport.close)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > _MOST_CONNECTION_BYTES:
            self.transport.abort()
            return
        try:
            super().data_received(data)
        except Exception:  # bytes on which h2 itself fails, such as headers that are not ASCII
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._end is not None:  # else it was never made
            self._end.cancel()
            super().connection_lost(exc)
