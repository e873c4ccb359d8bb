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
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from gpumgr.enforcement.hami_core import layout, view
from gpumgr.enforcement.hami_core.view import RegionView
from gpumgr.files import replacing

FILE_NAME: Final = "region.cache"
#: For all users: the container's processes run as any user, and the library ends every CUDA process that can't write the file.
_MODE: Final = 0o666
#: futex(2): the call's number, and waking processes that share the mapping.
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE: Final = 1
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Why a region's file can't be used: the end of a sentence that begins with "its region"."""

    reason: str


class RegionFile:
    """An open region, for one thread at a time."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Owns the descriptor."""
        found = os.fstat(descriptor)
        self.path, self._descriptor, self._identity = path, descriptor, (found.st_dev, found.st_ino)

    @classmethod
    def create(cls, folder: Path, content: bytes) -> Self:
        """Replaces the file in `folder`, which exists; its slots, all zero, take no memory. Raises OSError."""
        path = folder / FILE_NAME
        with replacing(path, mode=_MODE, durable=False) as new:  # on a tmpfs
            os.ftruncate(new, len(content))  # the slots between the header and the tail stay a hole
            os.pwrite(new, content[: layout.PROCS], 0)
            os.pwrite(new, content[layout.PROC_NUM :], layout.PROC_NUM)
            descriptor = os.dup(new)
        return cls(path, descriptor)

    @classmethod
    def open(cls, folder: Path) -> "Self | Unreadable":
        """The file that an earlier process of the agent made in `folder`."""
        try:
            parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                descriptor = os.open(FILE_NAME, _FLAGS, dir_fd=parent)
            finally:
                os.close(parent)
        except OSError as error:
            return Unreadable(reason=f"file can't be opened ({error.strerror or error})")
        return cls(folder / FILE_NAME, descriptor)

    def close(self) -> None:
        """May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self) -> RegionView | Unreadable:
        """Reads header, tail, and the slots in use. Raises nothing for any content."""
        try:
            self._check()
            header, tail = self._read(0, layout.PROCS), self._read(layout.PROC_NUM, layout.SIZEOF - layout.PROC_NUM)
            slots = self._read(layout.PROCS, view.process_count(tail) * layout.SLOT_BYTES)
        except _Unfit as error:
            return Unreadable(reason=f"is not valid: {error}")
        except OSError as error:
            return Unreadable(reason=f"can't be read ({error.strerror or error})")
        return view.decode(header, tail, slots)

    def cut(self) -> int:
        """Removes what the container appended; returns how many bytes that were."""
        with suppress(OSError, _Unfit):
            self._check()
            more = os.fstat(self._descriptor).st_size - layout.FILE_BYTES
            if more > 0:
                os.ftruncate(self._descriptor, layout.FILE_BYTES)
                return more
        return 0

    def write(self, offset: int, data: bytes) -> bool:
        """Returns whether the aligned word of 4 or 8 bytes was written: a single store, which is atomic for readers on x86-64 and arm64.
        A changed file is not written to (that would extend a truncated one)."""
        try:
            self._check()
            os.pwrite(self._descriptor, data, offset)
        except (OSError, _Unfit):
            return False
        return True

    def wake(self, semaphore: int) -> None:
        """Wakes one waiter of a semaphore that was written to. The memory is mapped for its address only, and not read."""
        page = semaphore // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with suppress(OSError, ValueError), mmap.mmap(self._descriptor, layout.SIZEOF - page, offset=page) as mapped:
            word = ctypes.c_uint32.from_buffer(mapped, semaphore - page)
            ctypes.CDLL(None).syscall(_FUTEX[platform.machine()], ctypes.byref(word), _FUTEX_WAKE, 1)
            del word  # the mapping can be closed then

    def _check(self) -> None:
        """Raises _Unfit if the file is another one, or has another name or size; OSError."""
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _Unfit("it is not a regular file")
        if found.st_nlink > 1:
            raise _Unfit(f"its file has {found.st_nlink} names")
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            raise _Unfit("its file was deleted") from None
        if (there.st_dev, there.st_ino) != self._identity:
            raise _Unfit("another file was put in its place")
        if found.st_size < layout.FILE_BYTES:
            raise _Unfit(f"it has {found.st_size} bytes instead of {layout.FILE_BYTES}")

    def _read(self, offset: int, size_bytes: int) -> bytes:
        """Exactly `size_bytes` bytes. Raises _Unfit, OSError."""
        data = os.pread(self._descriptor, size_bytes, offset)
        if len(data) != size_bytes:
            raise _Unfit(f"it ends at byte {offset + len(data)}")
        return data


class _Unfit(Exception):
    """The file is not the one that was made."""
