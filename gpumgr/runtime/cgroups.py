"""Reads the host's cgroups, and finds the container and the pod of a process by its cgroup.

Needs the host's pid and cgroup namespaces (a service of the host has both). Sources: cgroups(7), proc(5), and the kernel's
Documentation/admin-guide/cgroup-v2.rst for threaded cgroups.

`memory_path`, `container_id_in` and `own_cgroup` are pure, and accept any text. The names of the kubelet's cgroups (pkg/kubelet/cm) are
as follows. `<uid>` is the pod's UID; for a static pod it is the hash of the pod's file, as 32 hex digits.

    cgroupfs driver   [...]/kubepods[/burstable|/besteffort]/pod<uid>/<id>                    (CRI-O: /crio-<id>)
    systemd driver    [...]/kubepods[-burstable|-besteffort]-pod<uid, _ for ->.slice/cri-containerd-<id>.scope   (crio-, docker-)
    mixed drivers     [...]/kubepods[-burstable|-besteffort]-pod<uid, _ for ->.slice:cri-containerd:<id>
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import msgspec

from gpumgr.common.errors import CriError
from gpumgr.common.proc import unescaped

_CONTAINER: Final = re.compile(r"[/:](?:(?:cri-containerd|crio|docker)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?(?![^/])")
_NSPID: Final = re.compile(r"^NSpid:[ \t0-9]*[ \t](?P<pid>[0-9]{1,10})[ \t]*$", re.MULTILINE)


def memory_path(text: str) -> str | None:
    """/proc/PID/cgroup -> the path in the hierarchy that counts memory: v1's if there is one, else the unified one."""
    unified = None
    # A cgroup's name has no newline, but may have any other character that ends a line for Python.
    for line in text.split("\n"):
        hierarchy, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not path.startswith("/"):
            continue
        path = path.removesuffix(" (deleted)")
        if "memory" in controllers.split(","):
            return path
        if hierarchy == "0" and not controllers:
            unified = path
    return unified


def container_id_in(path: str) -> str | None:
    """The id of the kubelet's container that `path` names. The node can be a container itself, and a container can run containers, so the
    outermost container below the kubelet's cgroup counts. If the kubelet names no parent cgroup (cgroupsPerQOS false), the runtime chooses
    one, such as /system.slice, /k8s.io or /docker. Then the outermost container in the path counts."""
    found = _CONTAINER.search(path, max(0, path.find("kubepods"))) or _CONTAINER.search(path)
    return found["id"] if found else None


def own_cgroup(path: str, container_id: str) -> str | None:
    """Cuts the container's cgroup out of the path of one of its processes; None if the path lacks the id."""
    above, found, _ = path.partition(container_id)
    return above + found + path[len(above) + len(found) :].partition("/")[0] if found else None


def parse_nspid(text: str) -> int | None:
    """/proc/PID/status -> the pid in the innermost pid namespace."""
    found = _NSPID.search(text)
    return int(found["pid"]) if found else None


Mode = Literal["v1", "v2", "hybrid"]

#: The files with a cgroup's limit and use of memory, and the name of the page cache in memory.stat.
_MEMORY_FILES: Final = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("memory.max", "memory.current", "inactive_file"),
}
#: The cgroup was removed while it was read (ENOENT, ENODEV), or it is threaded (EOPNOTSUPP): then its parent lists its processes.
_NOTHING_THERE: Final = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """`root`: the mount point of the hierarchy that counts memory; `Container.cgroup` is a path below it. v1 has one hierarchy for each
    controller, v2 one for all. hybrid is v1 with an additional v2 hierarchy, which has few controllers or none."""

    mode: Mode
    root: Path


def parse_hierarchy(mounts: str, cgroup_root: Path) -> Hierarchy | None:
    """/proc/mounts -> the hierarchy at or below `cgroup_root`; None if none there can count memory."""
    memory = unified = None
    v1 = False
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) < 4 or fields[2] not in ("cgroup", "cgroup2"):
            continue
        point = unescaped(fields[1])
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


class Cgroups:
    """Reads below `cgroup_root` (normally /sys/fs/cgroup) and `proc_root`. No read waits for a disk."""

    def __init__(self, cgroup_root: Path, proc_root: Path = Path("/proc")) -> None:
        self._cgroup_root = cgroup_root
        self._proc_root = proc_root
        self._hierarchy: Hierarchy | None = None

    def hierarchy(self) -> Hierarchy:
        """The hierarchy of this node, read once: it does not change until the next boot. Raises CriError if there is none."""
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
        """The cgroup of a process; None if the process is gone."""
        text = self._of_process(pid, "cgroup")
        return memory_path(text) if text is not None else None

    def pid_in_container_of(self, pid: int) -> int | None:
        """The pid of a process in its innermost pid namespace; None if the process is gone."""
        text = self._of_process(pid, "status")
        return parse_nspid(text) if text is not None else None

    def pids(self, cgroup: str) -> tuple[int, ...]:
        """The host's pids of all processes in `cgroup` and below, ascending; none if it is gone. Raises CriError if a cgroup can't be
        read."""
        root = self.hierarchy().root
        folder = root / cgroup.lstrip("/")
        if ".." in folder.parts:
            return ()
        try:
            if not folder.is_dir():
                os.scandir(root).close()
            # The kernel lists 0 for a process in a pid namespace that is not visible here.
            folders = os.walk(folder, onerror=_raise_unless_gone)
            return tuple(sorted({pid for each, _, _ in folders for pid in _processes(Path(each)) if pid > 0}))
        except OSError as error:
            raise CriError(
                f"can't read {error.filename or folder}: {error.strerror}; run gpumgr as root, with the host's cgroups at cri.cgroup_root "
                f"({self._cgroup_root})"
            ) from error

    def memory_left(self, cgroup: str) -> int | None:
        """The bytes that can still be used within the limits of the cgroup and its ancestors; None without a limit. Page cache that the
        kernel can drop counts as free. Raises CriError if there is no hierarchy."""
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
    """Reads bytes, because universal newlines would end a line at a carriage return in a name. Raises OSError."""
    return file.read_bytes().decode(errors="surrogateescape")


def _raise_unless_gone(error: OSError) -> None:
    if error.errno not in _NOTHING_THERE:
        raise error


def _processes(folder: Path) -> Iterator[int]:
    """v1 may list a process twice. Raises OSError."""
    try:
        text = (folder / "cgroup.procs").read_text()
    except OSError as error:
        _raise_unless_gone(error)
    else:
        yield from (int(line) for line in text.split() if line.isdecimal())
