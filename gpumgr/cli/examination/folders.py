"""Whether the folders that the agent writes can be created and written."""

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from gpumgr.cli.examination.examine import CheckResult, aside, error, ok
from gpumgr.settings import Settings

IF_HUNG: Final = "look whether the file systems of the settings' folders answer (`df`)"
_REMEDY: Final = "set them to folders on a file system that the agent may write to"
_AS_ROOT: Final = "run this as root, as the agent runs: another user cannot check what root may write"
#: Errors that root gets only where the file system refuses writes to everyone.
_WANT_OF_RIGHTS: Final = frozenset({errno.EACCES, errno.EPERM})
#: File systems without unnamed files, and kernels that read the flag differently. Source: open(2), O_TMPFILE.
_NO_NAMELESS: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


def backend_words(settings: Settings) -> frozenset[str]:
    """The backends that the settings name, "auto" included."""
    return frozenset({settings.enforcement.backend, *(rule.partition("=")[2] for rule in settings.enforcement.overrides)})


def written(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Setting -> folder that the agent writes."""
    yield "checkpoint.dir", settings.checkpoint.dir
    yield "process.lock_path", settings.process.lock_path.parent
    yield "container.allocation_dir", settings.container.allocation_dir
    if backend_words(settings) - {"none"}:
        yield "enforcement.run_dir", settings.enforcement.run_dir
    if settings.enforcement.injection == "cdi" or settings.node.mode == "dra":
        yield "enforcement.cdi_dir", settings.enforcement.cdi_dir


async def look_at_folders(folders: Mapping[str, Path]) -> CheckResult:
    """`folders`: setting -> its folder. The check creates no folder and leaves no file."""
    obstacles = await aside(lambda: [(f"{path} ({key})", why) for key, path in folders.items() if (why := obstacle(path))])
    if obstacles:
        said = ", ".join(f"{what}: {why.sentence}" for what, why in obstacles)
        by_root = os.geteuid() != 0 and any(why.errno in _WANT_OF_RIGHTS for _, why in obstacles)
        return error(f"can't be written: {said}", _AS_ROOT if by_root else _REMEDY)
    return ok(f"{len(set(folders.values()))} folders can be written")


class Obstacle(NamedTuple):
    sentence: str
    errno: int | None


def obstacle(folder: Path) -> Obstacle | None:
    """The reason why nothing can be created in the folder, or why the folder itself cannot be created."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    try:
        _write_in(nearest)
    except OSError as exception:
        reason = exception.strerror or str(exception)
        return Obstacle(reason if nearest == folder else f"it can't be made in {nearest}: {reason}", exception.errno)
    return None


def _write_in(folder: Path) -> None:
    """Raises OSError if nothing can be created in the folder."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as exception:
        if exception.errno not in _NO_NAMELESS:
            raise
        os.rmdir(tempfile.mkdtemp(prefix=".gpumgr-doctor-", dir=folder))
