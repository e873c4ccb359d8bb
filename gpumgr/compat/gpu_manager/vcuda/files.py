"""The folder of one allocation, which its container sees as /etc/vcuda.

Files are replaced, never written in place: the library opens them by path each time and must not read an incomplete one. They are not
locked: a container can lock a file that it can only read, and would block the agent.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

from gpumgr.common.files import replace_file, temporary_of

CONFIG: Final = "vcuda.config"
PIDS: Final = "pids.config"
SOCKET: Final = "vcuda.sock"
_OURS: Final = (CONFIG, PIDS, SOCKET)


def read(folder: Path, name: str) -> bytes | None:
    """The file's content; None if it can't be read."""
    try:
        return (folder / name).read_bytes()
    except OSError:
        return None


def replace(folder: Path, name: str, content: bytes) -> None:
    """Writes the file unless it has this content already. Raises OSError."""
    if read(folder, name) != content:
        replace_file(folder / name, content, durable=False)  # every start of the container, also after a reboot, writes it again


def holds_ours(folder: Path) -> bool:
    """Whether the folder has a file of this backend."""
    return any(os.path.lexists(folder / name) for name in _OURS)


def remove(folder: Path) -> None:
    """Removes the files of this backend, and the folder if it is empty then. Raises OSError."""
    for name in _OURS:
        (folder / name).unlink(missing_ok=True)
        temporary_of(folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
