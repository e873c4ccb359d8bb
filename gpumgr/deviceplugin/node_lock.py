"""One agent on a node: binding a unix socket silently replaces the one of a living agent, so a lock comes first.

The kernel drops the lock when its holder dies, however it dies. The file stays; removing it would let two agents lock two files.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from gpumgr.errors import AlreadyRunning, GpumgrError


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds the kubelet's plugin folder itself locked: two agents with lock files of their own would still take its sockets from
    one another. A folder that is not there yet is nobody's.

    Raises AlreadyRunning if another process holds it.
    """
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield
        return
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunning(f"another gpumgr agent serves {folder}; stop it before starting this one") from error
        yield
    finally:
        os.close(held)


class NodeLock:
    """A context manager that holds `path` locked. The file tells the holder's pid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def acquire(self) -> None:
        """Raises AlreadyRunning if another process holds the lock, GpumgrError if the file can't be opened."""
        while True:
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            except OSError as error:
                raise GpumgrError(f"can't open the lock file {self._path}: {error.strerror or error}") from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(file, 32, 0).decode(errors="replace").strip()
                os.close(file)
                raise AlreadyRunning(
                    f"another gpumgr agent (pid {holder or 'unknown'}) runs on this node: it holds {self._path}; "
                    "stop it before starting this one"
                ) from error
            if self._is_current(file):
                break
            os.close(file)
        self._file = file
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only the next agent's message is poorer
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _is_current(self, file: int) -> bool:
        """Whether `path` still names the locked file: somebody may have deleted it between open and lock."""
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            return False
