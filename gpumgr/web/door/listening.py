"""Sockets to listen on: the configured address, the loopback beside it, and a unix socket for root."""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import structlog

from gpumgr.errors import InputError
from gpumgr.web.door.reception import BACKLOG

_log = structlog.get_logger(__name__)

_LOOPBACK: Final = "127.0.0.1"
#: sun_path of Linux's sockaddr_un, less the closing zero.
_MOST_PATH_BYTES: Final = 107


class ListenError(InputError):
    """The configured address or socket can't be listened on."""


async def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """On all addresses of `host`, and on the loopback if they are reached from elsewhere only. `port` 0 takes a free one, the same for all.

    Raises ListenError that says what to do; nothing is left open then.
    """
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in await _resolve(host, port):
            port = port or (listeners[0].getsockname()[1] if listeners else 0)
            listeners.append(_bound_tcp(family, address[0], port, *address[2:]))
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ListenError(f"can't listen on {host}:{port}: {_advice(error)}") from error
    if needs_loopback([listener.getsockname()[0] for listener in listeners]):
        listeners += _loopback_beside(listeners[0].getsockname()[1])
    return listeners


async def _resolve(host: str, port: int) -> Sequence[tuple[int, int, int, str, tuple]]:  # type: ignore[type-arg]
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)


def needs_loopback(addresses: Sequence[str]) -> bool:
    """Whether nobody on the loopback would be heard: `kubectl port-forward` and programs in the pod connect there."""
    found = [ip_address(address) for address in addresses]
    return not any(address.is_loopback or address.is_unspecified for address in found)


def _loopback_beside(port: int) -> list[socket.socket]:
    """A convenience: without it the pages are still there."""
    try:
        return [_bound_tcp(socket.AF_INET, _LOOPBACK, port)]
    except OSError as error:
        _log.warning(
            "loopback_not_served", address=f"{_LOOPBACK}:{port}", error=error.strerror, consequence="port-forward won't work"
        )
        return []


def _bound_tcp(family: int, host: str, port: int, *scope: int) -> socket.socket:
    """Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port, *scope))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _advice(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host; give an IP address in the settings"
    match error.errno:
        case errno.EADDRINUSE:
            return "another process listens there; choose another port in the settings, or end that process"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address; choose another address in the settings"
        case errno.EACCES:
            return "not permitted; choose a port from 1024 on in the settings"
        case _:
            return error.strerror or str(error)


class UnixListener:
    """A unix socket for root alone. A stale one is replaced, one where somebody answers never, and no other kind of file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: tuple[int, int] | None = None

    def listen(self) -> socket.socket:
        """Raises ListenError that says what to do."""
        size = len(os.fsencode(self._path))
        if size > _MOST_PATH_BYTES:
            raise ListenError(
                f"can't listen on {self._path}: the path has {size} bytes and a unix socket allows {_MOST_PATH_BYTES}; "
                "set a shorter http.socket"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._clear()
            listener.bind(str(self._path))
            # Nobody can connect before `listen`, so nobody does with the mode that the umask gave.
            self._path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            self._inode = _inode(self._path)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            self.remove()
            raise ListenError(
                f"can't listen on {self._path}: {error.strerror or error}; set http.socket to a path in a folder that the agent may "
                "write to"
            ) from error
        except ListenError:
            listener.close()
            raise
        return listener

    def remove(self) -> None:
        """The file, unless another one took its place."""
        with contextlib.suppress(OSError):
            if self._inode is not None and _inode(self._path) == self._inode:
                self._path.unlink()
        self._inode = None

    def _clear(self) -> None:
        """Raises ListenError if something stands there that is not an abandoned socket, OSError if it can't be removed."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ListenError(
                f"can't listen on {self._path}: a file that is no socket is there; remove it, or set another http.socket"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink()
                return
            except BlockingIOError:
                pass  # its backlog is full, so it listens
        raise ListenError(f"can't listen on {self._path}: another process answers there; end it, or set another http.socket")


def _inode(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
