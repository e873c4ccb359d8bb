"""Processes of the host, by pid and start time: what /proc tells of them. Needs the host's pid namespace."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from gpumgr.allocator.quarantine import Process


class HostProcesses:
    """Reads `root` (normally /proc); whatever can't be read is a process that is gone."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root

    def start_time(self, pid: int) -> int | None:
        """Clock ticks since boot when this process began (field 22 of /proc/PID/stat, proc(5)); None if there is no such process."""
        try:
            descriptor = os.open(f"{self._root}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                text = os.read(descriptor, 4096)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        fields = text.rpartition(b")")[2].split()
        if len(fields) <= 19:
            return None
        # A zombie with threads is a process whose first thread has ended: it goes on.
        ended = fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)
        return None if ended else int(fields[19])

    def start_times(self, pids: Collection[int]) -> Mapping[int, int]:
        """Of those that still are. Blocks: made for a thread."""
        return {pid: time for pid in pids if (time := self.start_time(pid)) is not None}

    def runs(self, process: Process) -> bool:
        pid, started = process
        return self.start_time(pid) == started
