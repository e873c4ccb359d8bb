"""Reads the host's cgroups, and from /proc the cgroups of processes; `cgroup_path` has the rules for their paths.

Needs the host's pid and cgroup namespaces (a service of the host has both). Sources: cgroups(7), proc(5), and the kernel's
Documentation/admin-guide/cgroup-v2.rst for threaded cgroups.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from gpumgr.common.errors import CriError
from gpumgr.runtime.cgroup_path import memory_path, parse_nspid

Mode = Literal["v1", "v2", "hybrid"]

#: The files with a cgroup's limit and use of memory, and the name of the page cache in memory.stat.
_MEMORY_FILES: Final = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("memory.max", "memory.current", "inactive_file"),
}
#: The cgroup was removed while it was read (ENOENT, ENODEV), or it is threaded, so that its parent lists its processes (EOPNOTSUPP).
_NOTHING_THERE: Final = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """The cgroup hierarchy of a node. `root`: the mount point of the hierarchy that counts memory; `Container.cgroup` is a path below it.
    v2 has one hierarchy for all controllers, and v1 has one for each controller. hybrid is v1 with an additional v2 hierarchy, which has
    few controllers or none.
    """

    mode: Mode
    root: Path


def parse_hierarchy(mounts: str, cgroup_root: Path) -> Hierarchy | None:
    """/proc/mounts -> the hierarchy mounted at or below `cgroup_root`; None if no hierarchy there can count memory."""
    memory = unified = None
    v1 = False
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) < 4 or fields[2] not in ("cgroup", "cgroup2"):
            continue
        point = _unescape(fields[1])
        if not PurePosixPath(point).is_relative_to(cgroup_root):
            continue
        if fields[2] == "cgroup2":
            unified = unified or point
        else:
            v1 = True
            memory = memory or (point if "memory" in fields[3].split(",") else None)
    root = memory or unified
    if root is None:
        return None
    return Hierarchy(mode="v2" if not v1 else "hybrid" if unified else "v1", root=Path(root))


def _unescape(field: str) -> str:
    """fstab(5): blanks and backslashes are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


class Cgroups:
    """Reads below `cgroup_root` (normally /sys/fs/cgroup) and `proc_root`. All files are small, and in the kernel's memory."""

    def __init__(self, cgroup_root: Path, proc_root: Path = Path("/proc")) -> None:
        self._cgroup_root = cgroup_root
        self._proc_root = proc_root
        self._hierarchy: Hierarchy | None = None

    def hierarchy(self) -> Hierarchy:
        """The hierarchy of this node, which does not change until the next boot. Raises CriError if there is none."""
        if self._hierarchy is None:
            mounts = self._proc_root / "mounts"
            try:
                text = _text(mounts)
            except OSError as error:
                raise CriError(f"can't read {mounts}: {error.strerror}; mount proc there") from error
            self._hierarchy = parse_hierarchy(text, self._cgroup_root.resolve())
        if self._hierarchy is None:
            raise CriError(
                f"no cgroup hierarchy that counts memory is mounted at or below {self._cgroup_root}; "
                "set cri.cgroup_root to where the host's cgroups are mounted (normally /sys/fs/cgroup)"
            )
        return self._hierarchy

    def path_of(self, pid: int) -> str | None:
        """The cgroup of a process, as in `Container.cgroup`; None if the process is gone."""
        text = self._of_process(pid, "cgroup")
        return memory_path(text) if text is not None else None

    def nspid_of(self, pid: int) -> int | None:
        """The pid of a process in the innermost of its pid namespaces; None if the process is gone."""
        text = self._of_process(pid, "status")
        return parse_nspid(text) if text is not None else None

    def pids(self, cgroup: str) -> tuple[int, ...]:
        """The host's pids of all processes in `cgroup` (a path as in `Container.cgroup`) and below, ascending; none if the cgroup is
        gone. Raises CriError if the hierarchy or a cgroup in it can't be read.
        """
        root = self.hierarchy().root
        folder = root / cgroup.lstrip("/")
        if ".." in folder.parts:
            return ()
        try:
            if not folder.is_dir():
                os.scandir(root).close()
            # The kernel lists 0 for a process in a pid namespace that is not visible here.
            return tuple(sorted({pid for each in _and_below(folder) for pid in _processes(each) if pid > 0}))
        except OSError as error:
            raise CriError(
                f"can't read {error.filename}: {error.strerror}; run gpumgr as root, with the host's cgroups at cri.cgroup_root "
                f"({self._cgroup_root})"
            ) from error

    def memory_left(self, cgroup: str) -> int | None:
        """How many bytes the limits of the cgroup and of those above it leave, without the page cache that the kernel can drop; None: there
        is no limit. Raises CriError if there is no hierarchy."""
        hierarchy, left = self.hierarchy(), list[int]()
        limit, usage, cache = _MEMORY_FILES["v2" if hierarchy.mode == "v2" else "v1"]
        folder = hierarchy.root / cgroup.lstrip("/")
        while folder != hierarchy.root and folder.is_relative_to(hierarchy.root):
            with suppress(OSError, ValueError):  # there is no limit, or the cgroup is gone
                stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
                left.append(int(_text(folder / limit)) - int(_text(folder / usage)) + int(stat.get(cache, "0")))
            folder = folder.parent
        return max(0, min(left)) if left else None

    def _of_process(self, pid: int, name: str) -> str | None:
        try:
            return _text(self._proc_root / str(pid) / name)
        except OSError:  # the process is gone; ESRCH if it ended while the file was read
            return None


def _text(file: Path) -> str:
    """The file's bytes as text, read without universal newlines, which would end a line at a carriage return in a name. Raises
    OSError."""
    return file.read_bytes().decode(errors="surrogateescape")


def _and_below(folder: Path) -> Iterator[Path]:
    """`folder` and all folders below it. Folders that are removed in the meantime are left out. Raises OSError."""
    waiting = [folder]
    while waiting:
        at = waiting.pop()
        try:
            with os.scandir(at) as entries:
                waiting.extend(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                continue
            raise
        yield at


def _processes(folder: Path) -> Iterator[int]:
    """The processes of one cgroup; v1 may list a process twice. Raises OSError."""
    try:
        text = (folder / "cgroup.procs").read_text()
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return
        # If the read fails (not the open), the error has no file name.
        raise OSError(error.errno, error.strerror, str(folder / "cgroup.procs")) from error
    yield from (int(line) for line in text.split() if line.isdecimal())
