"""Finds the folders of allocations that are mounted in processes: a container that has such a folder mounted is alive."""

from collections.abc import Collection
from pathlib import Path, PurePosixPath

from gpumgr.common.proc import PROC, mount_tables, mounted_root
from gpumgr.ledger.ledger import AllocationId


def mounted_names(names: Collection[str], proc_root: Path = PROC) -> frozenset[str]:
    """The names that occur in the mount table of any process: in the path of a mounted file or folder, or in the name of its file system.
    A mount of a whole file system does not count, since it is the agent's own mount. Blocks for some milliseconds.

    Raises OSError if a process is hidden from the agent, since that process may have any of the folders mounted.
    """
    found: set[str] = set()
    for table in mount_tables(proc_root):
        found |= {name for name in names if name in table and any(_is_part(name, line) for line in table.splitlines())}
        if len(found) == len(names):
            break
    return frozenset(found)


def has_mounted(pid: int, allocation: AllocationId, proc_root: Path = PROC) -> bool:
    """Whether the folder of this allocation is mounted in the process's mount namespace; only the allocation's container has it mounted.

    False for a process that is gone. Blocks.
    """
    try:
        with (proc_root / str(pid) / "mountinfo").open(encoding="utf-8", errors="replace") as lines:
            return any(PurePosixPath(mounted_root(line)).name == allocation for line in lines)
    except OSError:
        return False


def _is_part(name: str, line: str) -> bool:
    return name in line and PurePosixPath(mounted_root(line)) != PurePosixPath("/")
