"""In a pod: whether the folders that must be the host's are mounted from it."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, aside, error, ok, skipped

IF_HUNG: Final = "look whether the mounts of this container answer (`cat /proc/self/mountinfo`)"
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
        f"not mounted from the host: {', '.join(own)}; what the agent writes there neither the host nor its next life finds",
        "add a hostPath volume for each of them, mounted at the same path",
    )


def parse_mounts(text: str) -> Mapping[str, str]:
    """Mount point -> the mounted part of the file system; of several mounts at one point the last one, which is the visible one.

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
