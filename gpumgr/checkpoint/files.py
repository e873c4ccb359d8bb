"""The checkpoint's file among other files: made, set aside, and what sqlite's errors about it mean to an operator."""

import os
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from gpumgr.errors import CheckpointError

NAME: Final = "gpumgr.sqlite3"
#: sqlite's companions of a file in WAL mode.
_COMPANIONS: Final = ("-wal", "-shm")
_MIN_PAGE_BYTES: Final = 512

_FULL: Final = "free space on its file system; nothing was changed, and the agent goes on trying"
_ACCESS: Final = "make its folder writable for the user that gpumgr runs as, or set checkpoint.dir to another one"
_DISK: Final = "look into the kernel's log for the disk's errors"
_BUSY: Final = "another program holds the file; only one agent may run on a node"
_CORRUPT: Final = "start the agent again: it sets the file aside and rebuilds from what the kubelet knows"

#: Beginning of sqlite's name for an error -> what to do about it.
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
    """Path of the checkpoint's file, which exists afterwards, for nobody else to read. Raises CheckpointError."""
    path = folder / NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # sqlite gives its companions the mode of the file. No descriptor of it may be closed later: that would drop sqlite's locks.
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
    """Finds what sqlite would take for an empty file, or for one that it may not write. Before any connection: it opens the file.

    Raises CorruptError. Source of the layout: sqlite's file format, section 1.3.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_MIN_PAGE_BYTES)
    except OSError as error:
        raise CheckpointError(f"can't open the checkpoint {path}: {error.strerror or error}; {_ACCESS}") from error
    if header and (len(header) < _MIN_PAGE_BYTES or header[:16] != b"SQLite format 3\0" or not set(header[18:20]) <= {1, 2}):
        raise CorruptError(f"{path} does not begin as a sqlite file does")


def set_aside(path: Path, now_seconds: float) -> Path:
    """Renames the file and its companions, and tells the new name. Raises CheckpointError."""
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


def sync_folder(folder: Path) -> None:
    """Makes names in the folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def translate(error: sqlite3.Error, path: Path, verb: Literal["open", "read", "write"]) -> CheckpointError:
    """sqlite's error in our words: the path, what happened, what to do.

    Whatever the world around the file is not to blame for (no such table, no database at all, text that is no UTF-8) is its content's
    fault: CorruptError.
    """
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    said = f"can't {verb} the checkpoint {path}: {error} ({name})"
    advice = next((advice for prefix, advice in _ADVICE.items() if name.startswith(prefix)), None)
    if advice is not None:
        return CheckpointError(f"{said}; {advice}")
    return CorruptError(f"{said}; {_CORRUPT}" if verb == "write" else said)
