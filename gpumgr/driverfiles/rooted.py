"""Paths as they are meant below another root: an absolute link in /run/nvidia/driver leads back into /run/nvidia/driver."""

import os
import stat
from pathlib import Path, PurePosixPath
from typing import Final

#: As many links as Linux follows in one path.
_MAX_LINKS: Final = 40


def resolve(root: Path, path: str) -> Path | None:
    """The regular file that `path` names for a process whose root is `root`, as a path without links; None if there is none."""
    todo = list(reversed(PurePosixPath(path).parts))
    place = root
    links = 0
    while todo:
        part = todo.pop()
        if part == "/":
            place = root
        elif part == "..":
            place = place.parent if place != root else root
        else:
            place = place / part
            target = _link(place)
            if target is not None:
                links += 1
                if links > _MAX_LINKS:
                    return None
                place = place.parent
                todo += reversed(PurePosixPath(target).parts)
    return place if is_file(place) else None


def is_file(path: Path) -> bool:
    """A regular file, not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _link(place: Path) -> str | None:
    try:
        return os.readlink(place)
    except OSError:
        return None
