"""The folders that the agent writes: whether they can be written, whether a pod has the host's, and whether the checkpoint can be used.

The checkpoint is read as `gpumgr checkpoint show` reads it: no content changes and no file is created, but sqlite may rebuild its
shared-memory index (-shm) after a killed agent, as the next agent would.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, aside, error, error_of, ok, skipped, warning
from gpumgr.common.errors import CheckpointError
from gpumgr.ledger.checkpoint.files import CorruptError
from gpumgr.ledger.checkpoint.reader import read_checkpoint
from gpumgr.settings import Settings

IF_HUNG: Final = "look whether the file systems of the settings' folders answer (`df`)"
_REMEDY: Final = "set them to folders on a file system that the agent may write to"


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
    obstacles = await aside(lambda: [f"{path} ({key}): {why}" for key, path in folders.items() if (why := obstacle(path))])
    if obstacles:
        return error(f"can't be written: {', '.join(obstacles)}", _REMEDY)
    return ok(f"{len(set(folders.values()))} folders can be written")


def obstacle(folder: Path) -> str | None:
    """The reason why nothing can be created in the folder, or why the folder itself cannot be created."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".gpumgr-doctor-", dir=nearest))
    except OSError as exception:
        reason = exception.strerror or str(exception)
        return reason if nearest == folder else f"it can't be made in {nearest}: {reason}"
    return None


_READ: Final = "run the agent, and this, as root, or set checkpoint.dir to a folder that it may read"


async def look_at_checkpoint(folder: Path) -> CheckResult:
    """`folder`: the setting checkpoint.dir."""
    try:
        loaded = await aside(lambda: read_checkpoint(folder))
    except CorruptError as damaged:
        return warning(
            str(damaged), "nothing, or mend the disk: the agent sets the file aside and rebuilds from what the kubelet knows"
        )
    except CheckpointError as exception:
        return error_of(exception, _READ)
    if loaded.lost:
        return ok(f"{loaded.why}: the agent makes one")
    if broken := loaded.ledger.violations():
        return warning(
            f"the checkpoint in {folder} contradicts itself: {broken[0]}",
            "nothing: the agent sets the file aside and rebuilds from what the kubelet knows",
        )
    return ok(f"{len(loaded.ledger.allocations)} allocations in {folder}")


#: Part of the path of a volume that is deleted with its pod.
_EMPTY_DIR: Final = "/kubernetes.io~empty-dir/"


async def look_at_host_paths(folders: Mapping[str, Path], proc_root: Path, *, in_pod: bool) -> CheckResult:
    """`folders`: setting -> its folder. `in_pod`: the command runs in a pod's container."""
    if not in_pod:
        return skipped("not in a pod")
    text = await aside((proc_root / "self/mountinfo").read_text)
    return judge_host_paths(folders, parse_mounts(text))


def judge_host_paths(folders: Mapping[str, Path], mounts: Mapping[str, str]) -> CheckResult:
    """`mounts`: by the mount point, the part of the file system that is mounted there."""
    own = [f"{path} ({key})" for key, path in folders.items() if _is_own(path, mounts)]
    if not own:
        return ok(f"{len(folders)} folders are mounted from the host")
    return error(
        f"not mounted from the host: {', '.join(own)}; the host and the next agent do not find what this agent writes there",
        "add a hostPath volume for each of them, mounted at the same path",
    )


def parse_mounts(text: str) -> Mapping[str, str]:
    """Maps each mount point to the part of the file system that is visible there. The last mount at a point hides the earlier mounts.

    Source: proc(5), /proc/PID/mountinfo. Lines that cannot be parsed are skipped.
    """
    lines = (line.split() for line in text.splitlines())
    return {_plain(fields[4]): _plain(fields[3]) for fields in lines if len(fields) >= 5}


def _is_own(path: Path, mounts: Mapping[str, str]) -> bool:
    """Whether the folder is in the container's own file system, or in a volume of its pod."""
    places = [str(path), *map(str, PurePosixPath(path).parents)]
    point = next((place for place in places if place in mounts), "/")
    return point == "/" or _EMPTY_DIR in f"{mounts[point]}/"


def _plain(text: str) -> str:
    """Decodes blanks, tabs and backslashes, which mountinfo writes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
