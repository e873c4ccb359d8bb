"""The processes of a container: their pids on the host and in the container, and the folders of allocations that they have mounted.

While any process has an allocation's folder mounted, the allocation's container is alive.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from gpumgr.common.proc import PROC, first_stack, mount_tables, mounted_root, start_time_ticks
from gpumgr.ledger.ledger import AllocationId

#: Host pid -> its pid in its innermost pid namespace (the last column of NSpid in /proc/PID/status); None if the process is gone.
PidInContainerOf = Callable[[int], int | None]
#: Pid in a container -> the pids of the processes on the host that have it. Nested pid namespaces can give several.
HostsOf = Callable[[int], Sequence[int]]


class Identity(NamedTuple):
    """Identifies a process. `namespace`: the inode of its innermost pid namespace; `pid`: its pid there. The limiter's library reports
    both."""

    namespace: int
    pid: int


class Identities:
    """Finds the identities of processes on the host."""

    def __init__(self, pid_in_container_of: PidInContainerOf, proc_root: Path = PROC) -> None:
        self._pid_in_container_of, self._proc_root = pid_in_container_of, proc_root

    def of(self, host_pid: int) -> Identity | None:
        """None: the process is gone, or hidden from the agent."""
        try:
            namespace = os.stat(self._proc_root / str(host_pid) / "ns" / "pid").st_ino
        except OSError:
            return None
        inside = self._pid_in_container_of(host_pid)
        return None if inside is None else Identity(namespace, inside)

    def executed(self, host_pid: int | None, stack: int) -> bool:
        """Whether the process has executed another program: its first stack is no longer at the address `stack`. False without a process
        (`host_pid` None), or if one of the addresses is not known (`stack` 0: not known)."""
        now = first_stack(host_pid, self._proc_root) if host_pid is not None and stack else None
        return now is not None and now != stack

    def all(self) -> Iterator[Identity]:
        """All processes that the agent may see, without zombies. Raises OSError."""
        for name in os.listdir(self._proc_root):
            if not name.isdecimal() or start_time_ticks(int(name), self._proc_root) is None:
                continue
            if (found := self.of(int(name))) is not None:
                yield found


def mounted_names(names: Collection[str], proc_root: Path = PROC) -> frozenset[str]:
    """The names that occur in the mount table of any process: in the line of a mounted file or folder, as a part of its path or of
    the mount's source. The source of an allocation's tmpfs contains the allocation's id.

    A mount of a whole file system does not count: the agent makes it, not a container. Blocks for some milliseconds. Raises OSError if a
    process is hidden from the agent, since it may have any of the folders mounted.
    """
    found: set[str] = set()
    for table in mount_tables(proc_root):
        found |= {name for name in names if name in table and any(_is_part(name, line) for line in table.splitlines())}
        if len(found) == len(names):
            break
    return frozenset(found)


def has_mounted(pid: int, allocation: AllocationId, proc_root: Path = PROC) -> bool:
    """Whether the process has the folder of this allocation mounted. Only the allocation's container has it mounted. False for a process
    that is gone. Blocks."""
    try:
        with (proc_root / str(pid) / "mountinfo").open(encoding="utf-8", errors="replace") as lines:
            return any(PurePosixPath(mounted_root(line)).name == allocation for line in lines)
    except OSError:
        return False


def _is_part(name: str, line: str) -> bool:
    return name in line and PurePosixPath(mounted_root(line)) != PurePosixPath("/")
