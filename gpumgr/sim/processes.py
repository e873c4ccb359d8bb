"""Processes without programs: the simulated node's own /proc and cgroups, as folders of the small files that the agent reads.

PID/stat tells state and start time, PID/cgroup the place, `mounts` where the one hierarchy (v2) is, and each cgroup has its
`cgroup.procs`. Sources: proc(5), cgroups(7). A process comes and goes whole, as in the kernel.
"""

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = "proc"
_CGROUPS: Final = "cgroup"
_FIRST_PID: Final = 20_001
#: Clock ticks of the start time, sysconf(_SC_CLK_TCK) of every Linux.
_TICKS_PER_SECOND: Final = 100


def proc_root_of(sim_dir: Path) -> Path:
    """Where to look for the processes of the simulated node in `sim_dir`: its own root if it was given one, else the host's."""
    own = sim_dir / _PROC
    return own if own.is_dir() else Path("/proc")


class SimProcesses:
    """Lays itself out in `sim_dir`, which must be done before an agent starts there. Pids are never used again."""

    def __init__(self, sim_dir: Path) -> None:
        self.proc_root = sim_dir / _PROC
        self.cgroup_root = sim_dir / _CGROUPS
        self._pids: Iterator[int] = itertools.count(_FIRST_PID)
        self._cgroups: dict[int, str] = {}
        for root in (self.proc_root, self.cgroup_root):
            root.mkdir(parents=True, exist_ok=True)
        # fstab(5): blanks and backslashes are written as octal numbers.
        point = str(self.cgroup_root.resolve()).replace("\\", r"\134").replace(" ", r"\040")
        _write(self.proc_root / "mounts", f"cgroup2 {point} cgroup2 rw,nosuid,nodev,noexec 0 0\n")

    def start(self, cgroup: str = "/") -> int:
        """The pid of a new process in `cgroup` (an absolute path in the hierarchy), which is made if need be."""
        pid = next(self._pids)
        coming = self.proc_root / f".{pid}"
        coming.mkdir()
        started = int(time.monotonic() * _TICKS_PER_SECOND)
        # Fields 3 to 24: running, parent 1, ..., priority 20, nice 0, one thread, start time, size and pages.
        _write(coming / "stat", f"{pid} (worker) R 1{' 0' * 13} 20 0 1 0 {started} 0 0\n")
        _write(coming / "cgroup", f"0::{cgroup}\n")
        coming.rename(self.proc_root / str(pid))
        self._cgroups[pid] = cgroup
        self._list(cgroup)
        return pid

    def end(self, pid: int) -> None:
        """The process is gone; its cgroup stays. Raises KeyError if there is none."""
        cgroup = self._cgroups.pop(pid)
        going = self.proc_root / f".{pid}"
        (self.proc_root / str(pid)).rename(going)
        shutil.rmtree(going)
        self._list(cgroup)

    def end_cgroup(self, cgroup: str) -> tuple[int, ...]:
        """The cgroup goes, with all its processes; their pids."""
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
        _write(folder / "cgroup.procs", "".join(f"{pid}\n" for pid in self.of(cgroup)))

    def _folder(self, cgroup: str) -> Path:
        return self.cgroup_root / cgroup.lstrip("/")


def _write(file: Path, text: str) -> None:
    """At once: readers meet the text before or the text after."""
    fresh = file.with_name(f".{file.name}")
    fresh.write_text(text, encoding="ascii")
    os.replace(fresh, file)
