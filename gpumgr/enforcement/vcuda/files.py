"""The folder of one allocation, which its container sees as /etc/vcuda.

Files are replaced, never written in place: the library opens them by path each time and must not meet half of one. No lock is taken:
a container can hold one on a file that it can only read, and would stall whoever waits for it. Nothing here must outlive the host.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

CONFIG: Final = "vcuda.config"
PIDS: Final = "pids.config"
SOCKET: Final = "vcuda.sock"
_OURS: Final = (CONFIG, PIDS, SOCKET)

_FOLDER_MODE: Final = 0o755
_FILE_MODE: Final = 0o644


def make_folder(folder: Path) -> None:
    """The folder, for everyone to enter and only root to change, whatever the umask is. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) != _FOLDER_MODE:
        folder.chmod(_FOLDER_MODE)


def read(folder: Path, name: str) -> bytes | None:
    """The file's content; None if there is none."""
    try:
        return (folder / name).read_bytes()
    except OSError:
        return None


def replace(folder: Path, name: str, content: bytes) -> bool:
    """Makes the file say `content`. False: it did already and is the same file still. Raises OSError."""
    if read(folder, name) == content:
        return False
    fresh = folder / _fresh(name)
    with contextlib.suppress(FileNotFoundError):  # left by an earlier life; opening it would follow a link
        fresh.unlink()
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, _FILE_MODE)
        file.write(content)
    os.rename(fresh, folder / name)
    return True


def holds_ours(folder: Path) -> bool:
    """Whether something of ours is in there."""
    return any(os.path.lexists(folder / name) for name in _OURS)


def remove(folder: Path) -> None:
    """Removes what is ours, and the folder if nothing else is in it. Raises OSError."""
    for name in (*_OURS, *map(_fresh, _OURS)):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _fresh(name: str) -> str:
    return f".{name}.new"
