"""Processes of the host, by pid and start time, and their mounts, as /proc shows them. Needs the host's pid namespace. Source: proc(5)."""

import errno
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from gpumgr.common.units import Process

PROC: Final = Path("/proc")
_MOST_ENVIRONMENT_BYTES: Final = 1 << 20
#: Errors of reads below /proc/PID if the process has just ended, or is a zombie, which has no mounts.
_ENDED: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.EINVAL})


def start_time_ticks(pid: int, root: Path = PROC) -> int | None:
    """When the process began, in clock ticks since boot (field 22 of /proc/PID/stat). None if there is no such process.

    A pair of pid and start time is never used again. A zombie with running threads counts as running.
    """
    fields = _stat(pid, root)
    if len(fields) <= 19:
        return None
    ended = fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)
    return None if ended else int(fields[19])


def is_running(process: Process, root: Path = PROC) -> bool:
    """Whether the process still runs. False also if another process has its pid now."""
    pid, started = process
    return start_time_ticks(pid, root) == started


def parent_pid(pid: int) -> int | None:
    """The parent's pid (field 4 of /proc/PID/stat); None if the process is gone."""
    fields = _stat(pid, PROC)
    return int(fields[1]) if len(fields) > 1 else None


def first_stack(pid: int, root: Path = PROC) -> int | None:
    """The address at which the first thread's stack begins (field 28 of /proc/PID/stat). It changes when the process executes another
    program. None without such a process or the right to trace it."""
    fields = _stat(pid, root)
    return (int(fields[25]) or None) if len(fields) > 25 else None


def environment(pid: int, root: Path = PROC) -> bytes:
    """The environment at the process's start, at most 1 MiB: `NAME=value` texts, separated by NULs. Empty if it can't be read.

    The kernel reads the environment from the process's memory, so the process can change it, and can make this call hang.
    """
    try:
        descriptor = os.open(f"{root}/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _MOST_ENVIRONMENT_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        return b""


def _stat(pid: int, root: Path) -> list[bytes]:
    """The fields of /proc/PID/stat from the third one on; empty if the process is gone. The second field, the name, may contain any
    bytes."""
    try:
        descriptor = os.open(f"{root}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
    except OSError:
        return []
    return text.rpartition(b")")[2].split()


def mount_tables(root: Path) -> Iterator[str]:
    """Yields the text of mountinfo for each mount namespace that has a process (without CAP_SYS_PTRACE, for each process). Blocks.

    Raises OSError if a process is hidden from the agent; the error's `filename` is the unreadable file.
    """
    pids = [entry for entry in os.listdir(root) if entry.isdecimal()]
    if "1" not in pids:  # with the mount option hidepid=, /proc lists only processes that the agent may trace
        raise PermissionError(errno.EPERM, "the processes of others are hidden", str(root))
    seen: set[str] = set()
    for pid in pids:
        namespace = _mount_namespace(root / pid)
        if namespace in seen:
            continue
        try:
            yield (root / pid / "mountinfo").read_text(errors="surrogateescape")
        except OSError as error:
            if error.errno not in _ENDED:
                raise
        else:
            if namespace is not None:
                seen.add(namespace)


def mounted_root(line: str) -> str:
    """Field 4 of a line of mountinfo, still escaped: the root of the mount within its file system. "" if it is missing."""
    fields = line.split(" ", 4)
    return fields[3] if len(fields) > 3 else ""


class Mount(NamedTuple):
    """`root` is the part of the file system that is mounted at `point`. `shared`: mounts below `point` propagate to its peers. `receives`:
    later mounts of its peers or master propagate to it."""

    root: str
    point: Path
    shared: bool
    receives: bool


def mount_of(mountinfo: str, path: Path) -> Mount | None:
    """The last mount at the nearest mount point above the absolute path. Lines that can't be parsed are skipped.

    Source: proc(5), /proc/PID/mountinfo, and mount_namespaces(7).
    """
    found: Mount | None = None
    for line in mountinfo.splitlines():
        fields = [unescaped(field) for field in line.partition(" - ")[0].split()]
        if len(fields) < 5 or not path.is_relative_to(fields[4]):
            continue
        point, shared = Path(fields[4]), any(field.startswith("shared:") for field in fields[6:])
        if found is None or point.is_relative_to(found.point):
            found = Mount(fields[3], point, shared, shared or any(field.startswith("master:") for field in fields[6:]))
    return found


def unescaped(field: str) -> str:
    """Decodes a field of mounts or mountinfo, which has blanks, tabs and backslashes as octal numbers. Source: fstab(5)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _mount_namespace(process: Path) -> str | None:
    """None if the process has ended or the agent may not trace it (mountinfo needs fewer rights)."""
    try:
        return os.readlink(process / "ns/mnt")
    except OSError:
        return None


class HostProcesses:
    """A process that can't be read counts as gone."""

    def __init__(self, root: Path = PROC) -> None:
        self._root = root

    def start_time(self, pid: int) -> int | None:
        return start_time_ticks(pid, self._root)

    def start_times(self, pids: Collection[int]) -> Mapping[int, int]:
        """Maps each running pid to its start time. Blocks, so call it on a thread."""
        return {pid: time for pid in pids if (time := self.start_time(pid)) is not None}

    def runs(self, process: Process) -> bool:
        return is_running(process, self._root)
