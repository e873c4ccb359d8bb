"""Resolves paths below another root, where an absolute link stays below that root."""

import os
import stat
from pathlib import Path, PurePosixPath
from typing import Final

#: The number of links that Linux follows in one path.
_MAX_LINKS: Final = 40


def resolve(root: Path, path: str) -> Path | None:
    """The regular file that `path` names for a process with this root, as a path without links; None if there is none."""
    parts = list(reversed(PurePosixPath(path).parts))
    current = root
    links = 0
    while parts:
        part = parts.pop()
        if part == "/":
            current = root
        elif part == "..":
            current = current.parent if current != root else root
        else:
            current = current / part
            target = _link(current)
            if target is not None:
                links += 1
                if links > _MAX_LINKS:
                    return None
                current = current.parent
                parts += reversed(PurePosixPath(target).parts)
    return current if is_file(current) else None


def is_file(path: Path) -> bool:
    """A regular file, not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _link(current: Path) -> str | None:
    try:
        return os.readlink(current)
    except OSError:
        return None
