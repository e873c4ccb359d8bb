"""The file of a region. The library's locks are not taken: the container has another pid namespace and would consider the holder dead."""

import ctypes
import mmap
import platform
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from gpumgr.enforcement.hami_core import content, layout
from gpumgr.enforcement.hami_core.content import RegionView
from gpumgr.enforcement.shared_file import SharedFile

FILE_NAME: Final = "region.cache"
#: futex(2): the call's number, and waking processes that share the mapping.
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE: Final = 1


class RegionFile(SharedFile):
    """The library ends every CUDA process that can't write the file."""

    @classmethod
    def create_in(cls, folder: Path, data: bytes) -> Self:
        """Replaces the file in `folder`, which exists; its slots, between the header and the tail, are all zero."""
        parts = {0: data[: layout.PROCS], layout.PROC_NUM: data[layout.PROC_NUM :]}
        return cls.create(folder / FILE_NAME, layout.FILE_BYTES, parts)

    @classmethod
    def open_in(cls, folder: Path) -> Self:
        return cls.open(folder / FILE_NAME, layout.FILE_BYTES)

    def read(self) -> RegionView:
        """Reads header, tail, and the slots in use, of any content."""
        self.check()
        return content.decode(self.read_at)

    def wake(self, semaphore: int) -> None:
        """Wakes one waiter of a semaphore that was written to. The memory is mapped for its address only, and not read."""
        page = semaphore // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with suppress(OSError, ValueError), mmap.mmap(self.descriptor, layout.SIZEOF - page, offset=page) as mapped:
            word = ctypes.c_uint32.from_buffer(mapped, semaphore - page)
            ctypes.CDLL(None).syscall(_FUTEX[platform.machine()], ctypes.byref(word), _FUTEX_WAKE, 1)
            del word  # the mapping can be closed then
