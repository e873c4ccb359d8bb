"""Simulates processes: makes a /proc and cgroups of the simulated node, as folders with the small files that the agent reads.

PID/stat has state and start time, PID/cgroup has the cgroup, `mounts` has the mount point of the only hierarchy (v2), and each cgroup has
a `cgroup.procs`. Sources: proc(5), cgroups(7). A process appears and disappears atomically, as in the kernel.
"""

import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpumgr.common.files import replace_file

_PROC: Final = "proc"
_CGROUPS: Final = "cgroup"
_FIRST_PID: Final = 20_001
#: The unit of start times: sysconf(_SC_CLK_TCK), which is 100 on every Linux.
_TICKS_PER_SECOND: Final = 100


def proc_root_of(sim_dir: Path) -> Path:
    """The /proc of the simulated node in `sim_dir`, or the host's if the folder has none."""
    own = sim_dir / _PROC
    return own if own.is_dir() else Path("/proc")


class SimProcesses:
    """Creates its files in `sim_dir`. Create it before an agent starts there. Pids are never reused."""

    def __init__(self, sim_dir: Path) -> None:
        self.proc_root = sim_dir / _PROC
        self.cgroup_root = sim_dir / _CGROUPS
        self._pids: Iterator[int] = itertools.count(_FIRST_PID)
        self._cgroups: dict[int, str] = {}
        for root in (self.proc_root, self.cgroup_root):
            root.mkdir(parents=True, exist_ok=True)
        # fstab(5): blanks and backslashes are written as octal numbers.
        point = str(self.cgroup_root.resolve()).replace("\\", r"\134").replace(" ", r"\040")
        replace_file(self.proc_root / "mounts", f"cgroup2 {point} cgroup2 rw,nosuid,nodev,noexec 0 0\n", durable=False)

    def start(self, cgroup: str = "/") -> int:
        """Starts a process in `cgroup` (an absolute path in the hierarchy, created if missing), and returns its pid."""
        pid = next(self._pids)
        coming = self.proc_root / f".{pid}"
        coming.mkdir()
        started = int(time.monotonic() * _TICKS_PER_SECOND)
        # Fields 3 to 24: running, parent 1, ..., priority 20, nice 0, one thread, start time, size and pages.
        replace_file(coming / "stat", f"{pid} (worker) R 1{' 0' * 13} 20 0 1 0 {started} 0 0\n", durable=False)
        replace_file(coming / "cgroup", f"0::{cgroup}\n", durable=False)
        coming.rename(self.proc_root / str(pid))
        self._cgroups[pid] = cgroup
        self._list(cgroup)
        return pid

    def end(self, pid: int) -> None:
        """Ends the process; its cgroup stays. Raises KeyError if it does not exist."""
        cgroup = self._cgroups.pop(pid)
        going = self.proc_root / f".{pid}"
        (self.proc_root / str(pid)).rename(going)
        shutil.rmtree(going)
        self._list(cgroup)

    def end_cgroup(self, cgroup: str) -> tuple[int, ...]:
        """Removes the cgroup with all its processes; returns their pids."""
        pids = self.of(cgroup)
        for pid in pids:
            self.end(pid)
        shutil.rmtree(self._folder(cgroup), ignore_errors=True)
        return pids

    def of(self, cgroup: str) -> tuple[int, ...]:
        """The pids of the processes in the cgroup, oldest first."""
        return tuple(pid for pid, place in self._cgroups.items() if place == cgroup)

    def _list(self, cgroup: str) -> None:
        folder = self._folder(cgroup)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "cgroup.procs", "".join(f"{pid}\n" for pid in self.of(cgroup)), durable=False)

    def _folder(self, cgroup: str) -> Path:
        return self.cgroup_root / cgroup.lstrip("/")
