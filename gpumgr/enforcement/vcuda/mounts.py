"""Who has an allocation's folder: the mounts of a process, which are those of its container."""

from pathlib import Path, PurePosixPath
from typing import Final

from gpumgr.allocator.ledger import AllocationId

#: proc(5): the path within its own file system that a mount shows. Octal escapes stand for blanks, which an allocation has none of.
_ROOT_FIELD: Final = 3


def has_mounted(pid: int, allocation: AllocationId, proc_root: Path = Path("/proc")) -> bool:
    """Whether the folder of this allocation is mounted in the process's mount namespace, as it is for its own container alone.

    False for a process that is gone. Blocks for as long as the process has mounts.
    """
    try:
        with (proc_root / str(pid) / "mountinfo").open(encoding="utf-8", errors="replace") as lines:
            return any(_root_of(line).name == allocation for line in lines)
    except OSError:
        return False


def _root_of(line: str) -> PurePosixPath:
    fields = line.split(" ", _ROOT_FIELD + 1)
    return PurePosixPath(fields[_ROOT_FIELD] if len(fields) > _ROOT_FIELD else "")
