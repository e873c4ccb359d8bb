"""The checkpoint's file: creates it, renames a corrupt one, and translates sqlite's errors for an operator."""

import os
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from gpumgr.common.errors import CheckpointError
from gpumgr.common.files import sync_folder

NAME: Final = "gpumgr.sqlite3"
#: The suffixes of the files that sqlite creates next to a database in WAL mode.
_COMPANIONS: Final = ("-wal", "-shm")
_MIN_PAGE_BYTES: Final = 512

_FULL: Final = "make room on its file system; nothing was changed, and the agent retries"
_ACCESS: Final = "make its folder writable for the user that gpumgr runs as, or set checkpoint.dir to another one"
_DISK: Final = "check the kernel log for disk errors"
_BUSY: Final = "another program holds the file; only one agent may run on a node"
_CORRUPT: Final = "start the agent again: it renames the file and rebuilds the ledger from the kubelet's state"

#: Prefix of sqlite's name for an error -> what to do about it.
_ADVICE: Final = {
    "SQLITE_FULL": _FULL,
    "SQLITE_READONLY": _ACCESS,
    "SQLITE_CANTOPEN": _ACCESS,
    "SQLITE_PERM": _ACCESS,
    "SQLITE_IOERR": _DISK,
    "SQLITE_BUSY": _BUSY,
    "SQLITE_LOCKED": _BUSY,
    "SQLITE_NOMEM": "give the agent more memory",
    "SQLITE_PROTOCOL": _BUSY,
}


class CorruptError(CheckpointError):
    """The file's content can't be trusted."""


def prepare(folder: Path) -> Path:
    """Creates the checkpoint's file if it is missing, with mode 0600, and returns its path. Raises CheckpointError."""
    path = folder / NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # sqlite creates its -wal and -shm files with the mode of this file. No descriptor of it may be closed while a connection is open:
        # closing it drops sqlite's locks.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"can't open the checkpoint {path}: {error.strerror or error}; {_ACCESS}") from error
    return path


def check_header(path: Path) -> None:
    """Raises CorruptError for a file that sqlite would treat as empty or as read-only. Call it before any connection is open: it opens and
    closes the file, and that would drop the locks of an open connection. Source of the layout: sqlite's file format, section 1.3."""
    try:
        with path.open("rb") as file:
            header = file.read(_MIN_PAGE_BYTES)
    except OSError as error:
        raise CheckpointError(f"can't open the checkpoint {path}: {error.strerror or error}; {_ACCESS}") from error
    if header and (len(header) < _MIN_PAGE_BYTES or header[:16] != b"SQLite format 3\0" or not set(header[18:20]) <= {1, 2}):
        raise CorruptError(f"{path} does not begin like a sqlite file")


def set_aside(path: Path, now_seconds: float) -> Path:
    """Renames the file and its -wal and -shm files, and returns the new name. Raises CheckpointError."""
    stamp = datetime.fromtimestamp(now_seconds, UTC).strftime("%Y%m%dT%H%M%SZ")
    names = (path.with_name(f"{path.name}.corrupt-{stamp}{f'.{n}' if n else ''}") for n in range(1 << 16))
    try:
        aside = next(name for name in names if not name.exists())
        path.rename(aside)
        for companion in _COMPANIONS:
            old = path.with_name(path.name + companion)
            if old.exists():
                old.rename(aside.with_name(aside.name + companion))
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} is corrupt and can't be renamed: {error.strerror or error}; {_ACCESS}"
        ) from error
    return aside


def translate(error: sqlite3.Error, path: Path, verb: Literal["open", "read", "write"]) -> CheckpointError:
    """sqlite's error as a CheckpointError with the path, the cause and a remedy.

    An error without an entry in _ADVICE (no such table, not a database, text that is not UTF-8) means corrupt content: CorruptError.
    """
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    problem = f"can't {verb} the checkpoint {path}: {error} ({name})"
    advice = next((advice for prefix, advice in _ADVICE.items() if name.startswith(prefix)), None)
    if advice is not None:
        return CheckpointError(f"{problem}; {advice}")
    return CorruptError(f"{problem}; {_CORRUPT}" if verb == "write" else problem)
