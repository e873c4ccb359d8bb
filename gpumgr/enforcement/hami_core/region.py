"""The file of a region, which a container can change in any way. Blocks for some microseconds.

The file is not mapped into memory: a process that reads a mapping of a truncated file is killed. The descriptor stays open, so that the
file is the one that the container got, and the path is compared with it at each read. The library's locks are not taken: the container
has another pid namespace and would consider the holder dead.
"""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from gpumgr.enforcement.hami_core import layouts, view
from gpumgr.enforcement.hami_core.layouts import Layout, UnknownLayout, identify
from gpumgr.enforcement.hami_core.view import RegionView
from gpumgr.files import replacing

FILE_NAME: Final = "region.cache"
#: For all users: the container's processes run as any user, and the library ends every CUDA process that can't write the file.
_MODE: Final = 0o666
#: Reads of a slot that is being written, and such reads in one pass over a region: a container could write all slots all the time.
_TRIES_PER_SLOT: Final = 10
_TRIES_PER_PASS: Final = 64
_NO_PROCESS: Final = bytes(4)
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Why a region's file can't be used: the end of a sentence that begins with "its region"."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One aligned word of 4 or 8 bytes: a single store, which is atomic for readers on x86-64 and arm64."""

    offset: int
    data: bytes


class RegionFile:
    """An open region, for one thread at a time.

    Its layout stays that of the first read, even if the container writes another version later.
    """

    def __init__(self, path: Path, descriptor: int, layout: Layout | None) -> None:
        """Owns the descriptor. `layout` None: the first read identifies it."""
        found = os.fstat(descriptor)
        self.path = path
        self._layout = layout
        self._descriptor = descriptor
        self._identity = (found.st_dev, found.st_ino)

    @classmethod
    def create(cls, folder: Path, layout: Layout, content: bytes) -> Self:
        """Replaces the file in `folder`, which exists; zero pages take no memory. Raises OSError."""
        path = folder / FILE_NAME
        with replacing(path, mode=_MODE, durable=False) as new:  # on a tmpfs
            _fill(new, content)
            descriptor = os.dup(new)
        return cls(path, descriptor, layout)

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
        return cls(folder / FILE_NAME, descriptor, None)

    def close(self) -> None:
        """May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self) -> RegionView | Unreadable:
        """Reads header, tail, and the slots in use. Raises nothing for any content."""
        try:
            size = self._checked_size()
            layout = self._layout = self._layout or identify(size, self._read(0, min(size, layouts.HEAD.size)))
            if size != layout.file_bytes:
                raise _Unfit(f"it has {size} bytes instead of {layout.file_bytes}")
            header = self._read(0, layout.procs)
            tail = self._read(layout.proc_num, layout.sizeof - layout.proc_num)
            slots, torn = self._read_slots(layout, view.process_count(tail))
        except (_Unfit, UnknownLayout) as error:
            return Unreadable(reason=f"is not valid: {error}")
        except OSError as error:
            return Unreadable(reason=f"can't be read ({error.strerror or error})")
        return view.decode(layout, header, tail, slots, torn)

    def write(self, writes: Iterable[Write]) -> bool:
        """Returns whether all was written. A changed file is not written to (that would extend a truncated one)."""
        try:
            for each in writes:
                if self._layout is None or self._checked_size() != self._layout.file_bytes:
                    return False
                os.pwrite(self._descriptor, each.data, each.offset)
        except (OSError, _Unfit):
            return False
        return True

    def _checked_size(self) -> int:
        """Bytes of the file. Raises _Unfit if it is another one or has another name; OSError."""
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
        return found.st_size

    def _read(self, offset: int, size_bytes: int) -> bytes:
        """Exactly `size_bytes` bytes. Raises _Unfit, OSError."""
        data = os.pread(self._descriptor, size_bytes, offset)
        if len(data) != size_bytes:
            raise _Unfit(f"it ends at byte {offset + len(data)}")
        return data

    def _read_slots(self, layout: Layout, count: int) -> tuple[list[bytes], list[int]]:
        """The first `count` slots, and which of them were being written at every read. Raises _Unfit, OSError."""
        size = layout.slot.size_bytes
        block = self._read(layout.procs, count * size)
        slots = [block[start : start + size] for start in range(0, len(block), size)]
        torn = []
        tries = _TRIES_PER_PASS
        for index, raw in enumerate(slots):
            settled = self._settled(layout, index, raw)
            for _ in range(min(_TRIES_PER_SLOT, tries)):
                if settled:
                    break
                tries -= 1
                slots[index] = self._read(layout.slot_at(index), size)
                settled = self._settled(layout, index, slots[index])
            if not settled:
                torn.append(index)
        return slots, torn

    def _settled(self, layout: Layout, index: int, raw: bytes) -> bool:
        """Whether the slot was not written while it was read, as far as the layout shows it."""
        before = view.seqlock_of(layout, raw)
        if layout.slot.seqlock is None or before is None:
            return True
        if before % 2:
            return False
        if raw[: layouts.SLOT_HOSTPID] == _NO_PROCESS:
            return True
        return int.from_bytes(self._read(layout.slot_at(index) + layout.slot.seqlock, 8), "little") == before


class _Unfit(Exception):
    """The file is not the one that was made."""


def _fill(descriptor: int, content: bytes) -> None:
    """Writes `content`, leaving holes where whole pages are zero. Raises OSError."""
    os.ftruncate(descriptor, len(content))
    page = os.sysconf("SC_PAGESIZE")
    nothing = bytes(page)
    for start in range(0, len(content), page):
        piece = content[start : start + page]
        if piece != nothing[: len(piece)]:
            os.pwrite(descriptor, piece, start)
