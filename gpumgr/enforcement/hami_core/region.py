"""The file of a region, which a container can change in any way. Blocks for some microseconds.

The file is not mapped into memory: a process that reads a mapping of a truncated file is killed. The descriptor stays open, so that the
file is the one that the container got, and the path is compared with it at each read. The library's locks are not taken: the container
has another pid namespace and would consider the holder dead.
"""

import ctypes
import mmap
import os
import platform
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from gpumgr.common.files import replacing
from gpumgr.enforcement.hami_core import content, layout
from gpumgr.enforcement.hami_core.content import RegionView

FILE_NAME: Final = "region.cache"
#: For all users: the container's processes run as any user, and the library ends every CUDA process that can't write the file.
_MODE: Final = 0o666
#: futex(2): the call's number, and waking processes that share the mapping.
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE: Final = 1
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RegionFile:
    """An open region, for one thread at a time. All methods raise OSError: also if the container has spoilt the file, with a text that
    says how. Nothing is read from or written to such a file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Owns the descriptor."""
        found = os.fstat(descriptor)
        self.path, self._descriptor, self._identity = path, descriptor, (found.st_dev, found.st_ino)

    @classmethod
    def create(cls, folder: Path, content: bytes) -> Self:
        """Replaces the file in `folder`, which exists; its slots, all zero, take no memory."""
        path = folder / FILE_NAME
        with replacing(path, mode=_MODE, durable=False) as new:  # on a tmpfs
            os.ftruncate(new, len(content))  # the slots between the header and the tail stay a hole
            os.pwrite(new, content[: layout.PROCS], 0)
            os.pwrite(new, content[layout.PROC_NUM :], layout.PROC_NUM)
            descriptor = os.dup(new)
        return cls(path, descriptor)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The file that an earlier process of the agent made in `folder`."""
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return cls(folder / FILE_NAME, os.open(FILE_NAME, _FLAGS, dir_fd=parent))
        finally:
            os.close(parent)

    def close(self) -> None:
        """May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self) -> RegionView:
        """Reads header, tail, and the slots in use, of any content."""
        self._check()
        return content.decode(self._read)

    def cut(self) -> int:
        """Removes what the container appended; returns how many bytes that were."""
        more = self._check() - layout.FILE_BYTES
        if more:
            os.ftruncate(self._descriptor, layout.FILE_BYTES)
        return more

    def write(self, offset: int, data: bytes) -> None:
        """Writes an aligned word of 4 or 8 bytes: a single store, which is atomic for readers on x86-64 and arm64."""
        self._check()  # a write would extend a truncated file
        os.pwrite(self._descriptor, data, offset)

    def wake(self, semaphore: int) -> None:
        """Wakes one waiter of a semaphore that was written to. The memory is mapped for its address only, and not read."""
        page = semaphore // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with suppress(OSError, ValueError), mmap.mmap(self._descriptor, layout.SIZEOF - page, offset=page) as mapped:
            word = ctypes.c_uint32.from_buffer(mapped, semaphore - page)
            ctypes.CDLL(None).syscall(_FUTEX[platform.machine()], ctypes.byref(word), _FUTEX_WAKE, 1)
            del word  # the mapping can be closed then

    def _check(self) -> int:
        """The file's size in bytes. Raises OSError if the file is another one, or has another name, or is too short."""
        found = os.fstat(self._descriptor)
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
        if found.st_size < layout.FILE_BYTES:
            raise OSError(f"it has {found.st_size} bytes instead of {layout.FILE_BYTES}")
        return found.st_size

    def _read(self, offset: int, size_bytes: int) -> bytes:
        data = os.pread(self._descriptor, size_bytes, offset)
        if len(data) != size_bytes:
            raise OSError(f"it ends at byte {offset + len(data)}")
        return data
