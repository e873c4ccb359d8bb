"""Makes and removes the file of a unix socket that a server listens on.

Invariants: only sockets are replaced, and a socket with a listener only at the caller's request. A file that another process has put in the
socket's place is not removed. Clients can't connect before the file has the wanted mode.
"""

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

#: sun_path of Linux's sockaddr_un without the closing NUL (unix(7)).
MAX_PATH_BYTES: Final = 107


def path_problem(path: Path) -> str | None:
    """Why a socket can't have this path, as the end of a sentence. None if it can."""
    size = len(os.fsencode(path))
    return None if size <= MAX_PATH_BYTES else f"the path has {size} bytes and a unix socket allows {MAX_PATH_BYTES}"


class UnixSocket:
    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        self.path: Final = path
        self._mode = mode
        self._inode: tuple[int, int] | None = None

    @property
    def in_place(self) -> bool:
        """Whether the file exists and is the one that `bind` made."""
        return self._inode is not None and _inode(self.path) == self._inode

    def bind(self, *, replace_served: bool = False) -> socket.socket:
        """Returns a bound socket that does not listen yet.

        Raises OSError with a sentence as its strerror: ENAMETOOLONG for a path that is too long, EADDRINUSE if a process listens there
        (unless `replace_served`), EEXIST if the file is no socket.
        """
        if problem := path_problem(self.path):
            raise OSError(errno.ENAMETOOLONG, problem)
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_socket()):
            raise OSError(errno.EEXIST, "a file that is no socket is there")
        if not replace_served and is_served(self.path):
            raise OSError(errno.EADDRINUSE, "another process listens there")
        self.path.unlink(missing_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(bound.fileno(), self._mode)  # Linux gives the file the mode of the socket
            bound.bind(os.fsencode(self.path))
            # The umask may have removed permissions. No client can connect before `listen`.
            self.path.chmod(self._mode)
            self._inode = _inode(self.path)
        except OSError:
            bound.close()
            raise
        return bound

    def remove(self) -> None:
        """Deletes the file if it is the one that `bind` made. Raises OSError."""
        if self.in_place:
            self.path.unlink(missing_ok=True)
        self._inode = None


def is_served(path: Path) -> bool:
    """Whether a process listens at the path. Does not block. Raises OSError if that can't be determined."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fsencode(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # the backlog is full, so a process listens
            pass
    return True


def remove_leftovers(folder: Path, pattern: str) -> list[Path]:
    """Removes sockets without a listener. Returns their paths. Raises nothing."""
    removed = []
    for path in folder.glob(pattern):
        if _is_leftover(path):
            with suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _is_leftover(path: Path) -> bool:
    """Whether the file is a socket without a listener; False if that is uncertain."""
    with suppress(OSError):
        return path.is_socket() and not is_served(path)
    return False


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
