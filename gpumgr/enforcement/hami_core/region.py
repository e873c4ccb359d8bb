"""HAMi-core's region as a file. The agent never takes the region's locks: a container does not see the agent, which would seem a dead
holder."""

import ctypes
import mmap
import platform
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from gpumgr.enforcement.container_files import SharedFile
from gpumgr.enforcement.hami_core import content, layout
from gpumgr.enforcement.hami_core.content import RegionView

FILE_NAME: Final = "region.cache"
#: futex(2): the number of the system call, and the operation that wakes processes that share the mapping.
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE: Final = 1


class RegionFile(SharedFile):
    """All users may write the file, since the library ends every CUDA process that can't."""

    @classmethod
    def create_in(cls, folder: Path, data: bytes) -> Self:
        """Replaces the file in `folder`, which must exist; the slots, between the header and the tail, are all zero."""
        parts = {0: data[: layout.PROCS], layout.PROC_NUM: data[layout.PROC_NUM :]}
        return cls.create(folder / FILE_NAME, layout.FILE_BYTES, parts)

    @classmethod
    def open_in(cls, folder: Path) -> Self:
        return cls.open(folder / FILE_NAME, layout.FILE_BYTES)

    def read(self) -> RegionView:
        """Reads the header, the tail, and the slots in use. They may have any content."""
        self.check()
        return content.decode(self.read_at)

    def wake(self, semaphore: int) -> None:
        """Wakes one process that waits for this semaphore; write it first. The file is mapped only because futex needs an address; the
        mapping is not read."""
        page = semaphore // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with suppress(OSError, ValueError), mmap.mmap(self.descriptor, layout.SIZEOF - page, offset=page) as mapped:
            word = ctypes.c_uint32.from_buffer(mapped, semaphore - page)
            ctypes.CDLL(None).syscall(_FUTEX[platform.machine()], ctypes.byref(word), _FUTEX_WAKE, 1)
            del word  # otherwise the mapping can't be closed
