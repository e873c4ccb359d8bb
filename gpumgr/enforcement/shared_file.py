"""A file that a container shares with the agent, and can change in any way. The methods block for some microseconds.

The file is not mapped into memory: a process that reads a mapping of a truncated file is killed. The descriptor stays open, so that the
agent uses the file that the container got. Each access checks that the path still names this file.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from gpumgr.common.files import replacing

#: For all users: the container's processes run as any user.
FOR_ALL: Final = 0o666
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SharedFile:
    """For one thread at a time. All methods raise OSError, also if the container has damaged the file; the text says how. Such a file is
    neither read nor written."""

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
        """The file that an earlier process of the agent made."""
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return cls(path, os.open(path.name, _FLAGS, dir_fd=parent), size_bytes)
        finally:
            os.close(parent)

    def close(self) -> None:
        """Closes the descriptor. Further calls do nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def cut(self) -> int:
        """Removes what the container appended; returns how many bytes that were."""
        more = self.check() - self.size_bytes
        if more:
            os.ftruncate(self.descriptor, self.size_bytes)
        return more

    def extend(self) -> int:
        """Appends what the container cut off, as zeros; returns how many bytes that were."""
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
        """Writes an aligned word of 4 or 8 bytes: a single store, which is atomic for readers on x86-64 and arm64."""
        self.check()  # a write would extend a truncated file
        os.pwrite(self.descriptor, data, offset)

    def check(self, *, short: bool = False) -> int:
        """Returns the file's size in bytes. Raises OSError if the path names another file, if the file has a second name, or if it is too
        short (allowed with `short`)."""
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
