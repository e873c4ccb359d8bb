"""The unix socket of gpu-manager's service. It serves old programs only, so the agent runs on without it if it can't be had."""

import errno
from pathlib import Path
from typing import Final

import structlog

from gpumgr.display.service import GpuDisplay
from gpumgr.rpc.server import DrainingServer
from gpumgr.unix_socket import UnixSocket

_log = structlog.get_logger(__name__)

_BACKLOG: Final = 64


class DisplayServer:
    """Serves `display` at `path`, between `start` and `stop`. Create it inside the event loop; it serves once.

    The answers name every pod on the node, so only root may connect (gpu-manager leaves the mode to its umask).
    """

    def __init__(self, path: Path, display: GpuDisplay) -> None:
        self.path: Final = path
        self._server = DrainingServer([display])
        self._socket = UnixSocket(path)

    async def start(self) -> bool:
        """Makes the folder, binds and listens; returns whether it listens. An abandoned socket is replaced. If another process
        listens there, or no socket can be made, that is logged as a warning."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            await self._server.start(sock=self._socket.bind(), backlog=_BACKLOG)
        except OSError as error:
            why = "another process listens there (gpu-manager?): end it"
            if error.errno != errno.EADDRINUSE:
                why = f"it can't be listened on ({error.strerror or error}): make it possible"
            _log.warning(
                "display_not_served",
                socket=str(self.path),
                reason=f"{why}, or set display.socket to another path, or display.enabled to false",
                consequence="gpu-manager's gRPC service is missing; nothing else depends on it",
            )
            return False
        return True

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Lets running calls end, disconnects the clients, and removes the socket unless another process replaced it. May be called
        at any time."""
        self._socket.remove()
        await self._server.drain(grace_seconds, lambda: None)
