"""Locks that permit one agent per node: binding a unix socket replaces the socket of a running agent, so the agent takes the lock first.

The kernel releases the lock when its holder ends. The file is kept: if it were removed, two agents could lock two files.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from gpumgr.common.errors import AlreadyRunning, GpumgrError


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks the kubelet's plugin folder: two agents with different lock files would replace each other's sockets in it.

    A folder that does not exist is not locked. Raises AlreadyRunning if another process holds the lock.
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


@contextlib.contextmanager
def lock_node(path: Path) -> Iterator[None]:
    """Locks the file `path`, which contains the holder's pid. Raises AlreadyRunning if another process holds the lock, GpumgrError if the
    file can't be opened."""
    held = _locked(path)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock is held, but the message of a second agent lacks the pid
            os.ftruncate(held, 0)
            os.pwrite(held, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(held)


def holder(path: Path) -> str | None:
    """The process that holds a lock on a file or folder, as text with a trailing comma; "" if the pid is not known, None if no process
    holds a lock.

    It takes a shared lock for an instant. An agent that starts in that instant ends with code 3 and is started again.
    """
    try:
        held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = "" if path.is_dir() else os.pread(held, 32, 0).decode(errors="replace").strip()
        return f"pid {pid}, " if pid else ""
    finally:
        os.close(held)
    return None


def _locked(path: Path) -> int:
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise GpumgrError(f"can't open the lock file {path}: {error.strerror or error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file, 32, 0).decode(errors="replace").strip()
            os.close(file)
            raise AlreadyRunning(
                f"another gpumgr agent (pid {holder or 'unknown'}) runs on this node: it holds {path}; stop it before starting this one",
                pid=holder or None,
            ) from error
        # The file may have been deleted between open and lock: then `path` names another file.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        os.close(file)
