"""Serves gRPC on a unix socket: binds the socket, detects that others removed its file, binds it again, drains, removes the file."""

import errno
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumgr.common.errors import KubeletError
from gpumgr.common.rpc.server import DrainingServer
from gpumgr.common.unix_socket import UnixSocket

_REMEDIES: Final = {errno.ENAMETOOLONG: "; use a folder with a shorter path", errno.EEXIST: "; remove it"}


class UnixServer:
    """`services` at `path`. Create it inside the event loop."""

    def __init__(self, path: Path, services: Collection[Any], end_streams: Callable[[], None] = lambda: None) -> None:
        """`end_streams` ends every streaming call of the services."""
        self.path = path
        self._server = DrainingServer(services)
        self._socket = UnixSocket(path)
        self._end_streams = end_streams

    @property
    def in_place(self) -> bool:
        """Whether the socket file is still the file of this server. Others may have deleted the file; the socket stays open then."""
        return self._socket.in_place

    @property
    def connections(self) -> int:
        return len(self._server.connections)

    @property
    def accepted(self) -> int:
        """How many connections there have been."""
        return self._server.accepted

    async def start(self) -> None:
        """Binds and listens, or does so again on a new socket file; connections and calls stay. A socket of an earlier process is
        replaced, any other file is kept.

        Raises KubeletError if the path is too long or can't be bound.
        """
        try:
            await self._server.listen_on(self._socket.bind(replace_served=True))
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "")
            raise KubeletError(f"can't listen on {self.path}: {error.strerror or error}{remedy}") from error

    def remove(self) -> None:
        """Removes the socket file, unless a newer one has replaced it; `start` makes it again."""
        self._socket.remove()

    @property
    def idle(self) -> bool:
        """Whether no unary call runs or has just ended."""
        return self._server.idle

    async def wait_idle(self, timeout_seconds: float) -> None:
        """Waits until the server is idle, at most `timeout_seconds`."""
        await self._server.wait_idle(timeout_seconds)

    async def drain(self, grace_seconds: float) -> None:
        """Removes the socket file, unless a newer one has replaced it, and ends the service in order (see DrainingServer.drain)."""
        self._socket.remove()
        await self._server.drain(grace_seconds, self._end_streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """The state of a registration with the kubelet. `registrations` counts the successful attempts. `error`: the present problem, and what
    to do."""

    registered: bool = False
    registrations: int = 0
    error: str | None = None
