"""The service's unix socket. It is a courtesy to old programs: where it can't be had, the agent goes on without it."""

import os
import socket
from pathlib import Path
from typing import Final

import structlog

from gpumgr.display.service import GpuDisplay
from gpumgr.rpc.server import DrainingServer

_log = structlog.get_logger(__name__)

#: It tells of every tenant on the node, so it is root's alone (gpu-manager's is open to whom its umask lets in).
_MODE: Final = 0o600
_BACKLOG: Final = 64


class DisplayServer:
    """Serves `display` at `path`, between `start` and `stop`. Make it inside the event loop; it serves once."""

    def __init__(self, path: Path, display: GpuDisplay) -> None:
        self.path: Final = path
        self._server = DrainingServer([display])
        self._file: tuple[int, int] | None = None

    async def start(self) -> bool:
        """Listens; True if it does. The socket's folder is made. A socket where nobody answers is replaced; if another process
        answers there, or no socket can be made, that is logged as a warning, once, and nothing is served."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if _somebody_answers(self.path):
                return self._without("another process listens there (gpu-manager?): end it")
            listening = _bound(self.path)
            self._file = _identity(self.path)
            await self._server.start(sock=listening, backlog=_BACKLOG)
        except OSError as error:
            return self._without(f"it can't be listened on ({error.strerror or error}): make it possible")
        return True

    def _without(self, why: str) -> bool:
        _log.warning(
            "display_not_served",
            socket=str(self.path),
            reason=f"{why}, or set display.socket to another path, or display.enabled to false",
            consequence="gpu-manager's gRPC service is missing; nothing else depends on it",
        )
        return False

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Lets running calls end, hangs up, and removes the socket unless it is another process's by now. May be called always."""
        if self._file is not None and _identity(self.path) == self._file:
            self.path.unlink(missing_ok=True)
        self._file = None
        await self._server.drain(grace_seconds, lambda: None)


def _somebody_answers(path: Path) -> bool:
    """Whether a process listens there. Connecting never waits. Raises OSError if it can't be known."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fsencode(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # somebody listens, and others wait for him already
            pass
    return True


def _bound(path: Path) -> socket.socket:
    """A socket bound to `path`, which is free or nobody's. Raises OSError; a file that is no socket stays where it is."""
    if path.is_socket():
        path.unlink()
    bound = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(bound.fileno(), _MODE)  # Linux makes the file with these rights: there is no moment with others
        bound.bind(os.fsencode(path))
    except OSError:
        bound.close()
        raise
    return bound


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
