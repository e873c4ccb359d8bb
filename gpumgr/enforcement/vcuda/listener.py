"""The unix socket of one allocation: bound for everyone in the container, sturdy against whoever connects."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration

from gpumgr.rpc.server import DrainingServer

#: sun_path of Linux's sockaddr_un, less the closing zero.
MOST_PATH_BYTES: Final = 107
_MODE: Final = 0o666
_BACKLOG: Final = 128
#: Of one container at once; a registration takes milliseconds, and our client comes again when it is turned away.
_MOST_CONNECTIONS: Final = 128
#: Longer than any client waits for an answer.
_MOST_CONNECTION_SECONDS: Final = 30.0
#: A registration takes some hundred bytes. h2 itself would gather a frame of 16 MiB before it finds it too large.
_MOST_CONNECTION_BYTES: Final = 256 * 1024
#: The least that HTTP/2 allows: so much may lie here unread for one connection.
_WINDOW_BYTES: Final = 65535


def path_problem(path: Path) -> str | None:
    """Why no socket can be there; None if one can."""
    size = len(os.fsencode(path))
    if size <= MOST_PATH_BYTES:
        return None
    return f"the socket {path} would have a path of {size} bytes and {MOST_PATH_BYTES} are possible: set a shorter container.allocation_dir"


class Listener:
    """Serves `service` at `path`. Cheap: nothing runs until somebody connects. Use it once; a new socket takes a new listener."""

    def __init__(self, path: Path, service: Any) -> None:
        self.path: Final = path
        self._server = _Server([service])
        self._inode: tuple[int, int] | None = None

    @property
    def in_place(self) -> bool:
        """Whether the socket's file is there and is ours."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._inode

    async def listen(self) -> None:
        """Replaces a socket that an earlier life left. Raises OSError."""
        await self._server.start(path=str(self.path), backlog=_BACKLOG)
        self.path.chmod(_MODE)
        found = self.path.stat()
        self._inode = (found.st_dev, found.st_ino)

    async def close(self, grace_seconds: float) -> None:
        """Lets running calls end and hangs up. The file stays: a restarted agent listens there again."""
        await self._server.drain(grace_seconds, lambda: None)


class _Server(DrainingServer):
    """A server for peers that may mean no good: h2 checks their headers, and little is kept for each of them."""

    def __init__(self, services: list[Any]) -> None:
        super().__init__(services)
        self._config = Configuration(
            http2_connection_window_size=_WINDOW_BYTES, http2_stream_window_size=_WINDOW_BYTES
        ).__for_server__()
        self._h2_config = H2Configuration(client_side=False, header_encoding="ascii")
        self._guards: set[_Guard] = set()

    def _protocol_factory(self) -> H2Protocol:
        return cast("H2Protocol", _Guard(super()._protocol_factory, self._guards))


class _Guard(asyncio.Protocol):
    """Stands before one connection's protocol: so many at once, for so long, with so many bytes, and no bytes do harm elsewhere."""

    def __init__(self, make: Callable[[], H2Protocol], guards: "set[_Guard]") -> None:
        self._make = make
        self._guards = guards
        self._inner: H2Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._end: asyncio.TimerHandle | None = None
        self._received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._guards) >= _MOST_CONNECTIONS:
            self._transport.abort()
            return
        self._guards.add(self)
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
        except Exception:  # bytes that h2 itself stumbles over, such as headers that are no ASCII
            self._transport.abort()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guards.discard(self)
        if self._end is not None:
            self._end.cancel()
        if self._inner is not None:
            self._inner.connection_lost(exc)
