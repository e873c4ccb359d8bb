"""Files that a container shares with the agent and can change in any way. All functions block.

Such a file is not mapped into memory, since a process that reads a mapping of a truncated file is killed. Its descriptor stays open, so
that the agent uses the file that the container got.

A container can enlarge its file, so each folder is a tmpfs of its own, of limited size. The host must see this tmpfs, since the container
runtime on the host mounts the file into the container. So the agent runs in the host's mount namespace, or in a pod with "Bidirectional"
propagation of run_dir, or it asks systemd to mount. Source: mount(2), mount_namespaces(7).
"""

import ctypes
import os
import stat
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, Self

import structlog

from gpumgr.common.files import replacing
from gpumgr.enforcement.mps.launcher import best_method, host_command

#: The container's processes run as any user.
FOR_ALL: Final = 0o666
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SharedFile:
    """For one thread at a time. All methods raise OSError, also if the container has damaged the file; the text says how."""

    def __init__(self, path: Path, descriptor: int, size_bytes: int) -> None:
        """Owns the descriptor."""
        found = os.fstat(descriptor)
        self.path, self.descriptor, self.size_bytes = path, descriptor, size_bytes
        self._identity = found.st_dev, found.st_ino

    @classmethod
    def create(cls, path: Path, size_bytes: int, parts: Mapping[int, bytes], *, mode: int = FOR_ALL) -> Self:
        """Replaces the file. `parts`: offset -> bytes; the rest is zero and takes no memory."""
        with replacing(path, mode=mode, durable=False) as new:  # on a tmpfs
            os.ftruncate(new, size_bytes)
            for offset, data in parts.items():
                os.pwrite(new, data, offset)
            descriptor = os.dup(new)
        return cls(path, descriptor, size_bytes)

    @classmethod
    def open(cls, path: Path, size_bytes: int) -> Self:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return cls(path, os.open(path.name, _FLAGS, dir_fd=parent), size_bytes)
        finally:
            os.close(parent)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def cut(self) -> int:
        """Removes what the container appended; returns the number of bytes."""
        more = self.check() - self.size_bytes
        if more:
            os.ftruncate(self.descriptor, self.size_bytes)
        return more

    def extend(self) -> int:
        """Appends zeros for what the container cut off; returns the number of bytes."""
        less = self.size_bytes - self.check(short=True)
        if less > 0:
            os.ftruncate(self.descriptor, self.size_bytes)
        return max(less, 0)

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        data = os.pread(self.descriptor, size_bytes, offset)
        if len(data) != size_bytes:
            raise OSError(f"it ends at byte {offset + len(data)}")
        return data

    def write(self, offset: int, data: bytes) -> None:
        """Writes the bytes. An aligned word of 4 or 8 bytes is written by a single store, which is atomic for readers on x86-64 and
        arm64."""
        self.check()  # a write would extend a truncated file
        os.pwrite(self.descriptor, data, offset)

    def check(self, *, short: bool = False) -> int:
        """Returns the size in bytes. Raises OSError if the path names another file, the file has a second name, or the file is too short
        (allowed with `short`)."""
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is not a regular file")
        if found.st_nlink > 1:
            raise OSError(f"its file has {found.st_nlink} names")
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            raise OSError("its file was deleted") from None
        if (there.st_dev, there.st_ino) != self._identity:
            raise OSError("another file was put in its place")
        if found.st_size < self.size_bytes and not short:
            raise OSError(f"it has {found.st_size} bytes instead of {self.size_bytes}")
        return found.st_size


#: Room for the limiter's files (2.2 MB if full); HAMi-core's region is smaller.
_OPTIONS: Final = "mode=711,size=2560k,nr_inodes=8"
_NOSUID_NODEV_NOEXEC: Final = 2 | 4 | 8
_DETACH: Final = 2
#: More than the agent ever mounts on one folder.
_MOST_MOUNTS: Final = 8
_SYSTEMD_SECONDS: Final = 10.0

log = structlog.get_logger(__name__)


class BoundedFolders:
    """A tmpfs for each allocation. If the agent can't mount, there is only a plain folder. An enlarged file there uses space of run_dir
    until the agent cuts it."""

    def __init__(self) -> None:
        self._logged = False

    def renew(self, folder: Path) -> None:
        """Mounts an empty tmpfs at the folder, or leaves it plain. Raises OSError.

        A former tmpfs stays while its container has a file of it mounted. The mount's source contains the allocation's id, so that
        `mounted_names` finds the id in the mount table of each process with a file of the tmpfs.
        """
        self.remove(folder)
        source = f"gpumgr-{folder.name}"
        reason = "mounts of the agent do not reach the host"
        for mount in (
            partial(_call, "mount", source.encode(), os.fsencode(folder), b"tmpfs", _NOSUID_NODEV_NOEXEC, _OPTIONS.encode()),
            partial(_ask_systemd, "mount", "-t", "tmpfs", "-o", f"nosuid,nodev,noexec,{_OPTIONS}", source, str(folder)),
        ):
            try:
                mount()
                if _on_host(folder):
                    return
                self.remove(folder)
            except OSError as error:
                reason = str(error)
        if not self._logged:
            log.warning("container_files_not_bounded", reason=reason)
        self._logged = True

    def remove(self, folder: Path) -> None:
        """Raises OSError."""
        if not folder.exists():  # `_on_host` would find another mechanism's mount of this name
            return
        for _ in range(_MOST_MOUNTS):
            if not folder.is_mount():
                break
            try:
                _call("umount2", os.fsencode(folder), _DETACH)
            except PermissionError:
                _ask_systemd("umount", "--lazy", str(folder))
        if _on_host(folder):  # the agent's own changes do not reach the host
            _ask_systemd("umount", "--lazy", str(folder))


def _on_host(folder: Path) -> bool:
    """False also if the agent may not read the host's mounts."""
    try:
        return f" gpumgr-{folder.name} " in Path("/proc/1/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return False


def _call(name: str, *arguments: bytes | int) -> None:
    """Raises OSError."""
    if ctypes.CDLL(None, use_errno=True)[name](*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _ask_systemd(*command: str) -> None:
    """Raises OSError."""
    argv = host_command("systemd", command) if best_method() == "systemd" else None
    if argv is None:
        raise PermissionError("the agent may not mount, and systemd does not run: mount run_dir with Bidirectional propagation")
    try:
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SYSTEMD_SECONDS)
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
