"""A region's file, shared with a container that may do anything to it. Blocks for some microseconds, never for longer.

It is never mapped: a mapper of a truncated file is killed. The descriptor is kept, so that what is read and written is the file that
the container got, and the path is compared with it at each look. No lock of the library's is ever taken: the container sees another
numbering of processes and would take the holder for dead.
"""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from gpumgr.enforcement.hami_core import layouts, view
from gpumgr.enforcement.hami_core.layouts import Layout, UnknownLayout, identify
from gpumgr.enforcement.hami_core.view import RegionView

FILE_NAME: Final = "region.cache"
_NEW_NAME: Final = ".region.cache.new"
#: For everybody: the container's processes run as any user. A container's library ends every CUDA process that can't write it.
_MODE: Final = 0o666
#: Looks at a slot that is being written, and such looks in one pass over a region: a container could keep all slots in motion.
_TRIES_PER_SLOT: Final = 10
_TRIES_PER_PASS: Final = 64
_NOBODY: Final = bytes(4)
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Why nothing in a region's file is believed: the end of a sentence that begins with "its region"."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One aligned word of 4 or 8 bytes: a single store, which no reader sees in halves on x86-64 and arm64."""

    offset: int
    data: bytes


class RegionFile:
    """An open region. Not for two threads at once; `close` ends it.

    Its layout stays what it was at the first look: a container that writes another version, or none, changes nothing by that.
    """

    def __init__(self, path: Path, descriptor: int, layout: Layout | None) -> None:
        """Takes the descriptor over. `layout` None: the first look tells."""
        found = os.fstat(descriptor)
        self.path = path
        self._layout = layout
        self._descriptor = descriptor
        self._identity = (found.st_dev, found.st_ino)

    @classmethod
    def create(cls, folder: Path, layout: Layout, content: bytes) -> Self:
        """A new file in `folder`, which exists, in place of what is there; zero pages take no memory. Raises OSError."""
        new = folder / _NEW_NAME
        with suppress(FileNotFoundError):
            new.unlink()
        descriptor = os.open(new, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _fill(descriptor, content)
            os.fchmod(descriptor, _MODE)  # whatever the umask is
            os.rename(new, folder / FILE_NAME)
            return cls(folder / FILE_NAME, descriptor, layout)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, folder: Path) -> "Self | Unreadable":
        """The file that an earlier life of the agent made in `folder`."""
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
        """One look: header, tail, and as many slots as it says. Never raises, whatever the bytes are."""
        try:
            size = self._checked_size()
            layout = self._layout = self._layout or identify(size, self._read(0, min(size, layouts.HEAD.size)))
            if size != layout.file_bytes:
                raise _Unfit(f"it has {size} bytes instead of {layout.file_bytes}")
            header = self._read(0, layout.procs)
            tail = self._read(layout.proc_num, layout.sizeof - layout.proc_num)
            slots, torn = self._read_slots(layout, view.process_count(tail))
        except (_Unfit, UnknownLayout) as error:
            return Unreadable(reason=f"is not to be believed: {error}")
        except OSError as error:
            return Unreadable(reason=f"can't be read ({error.strerror or error})")
        return view.decode(layout, header, tail, slots, torn)

    def write(self, writes: Iterable[Write]) -> bool:
        """Whether all was written. A file that is not what it was is left alone (writing would stretch a truncated one)."""
        try:
            for each in writes:
                if self._layout is None or self._checked_size() != self._layout.file_bytes:
                    return False
                os.pwrite(self._descriptor, each.data, each.offset)
        except (OSError, _Unfit):
            return False
        return True

    def _checked_size(self) -> int:
        """Bytes of the file. Raises _Unfit if it is not, or not only, the one that was made; OSError."""
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _Unfit("it is no regular file")
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
        """Exactly so many bytes. Raises _Unfit, OSError."""
        data = os.pread(self._descriptor, size_bytes, offset)
        if len(data) != size_bytes:
            raise _Unfit(f"it ends at byte {offset + len(data)}")
        return data

    def _read_slots(self, layout: Layout, count: int) -> tuple[list[bytes], list[int]]:
        """The first `count` slots, and which of them were in motion to the end. Raises _Unfit, OSError."""
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
        """Whether nobody wrote the slot while it was read, as far as its layout tells."""
        before = view.seqlock_of(layout, raw)
        if layout.slot.seqlock is None or before is None:
            return True
        if before % 2:
            return False
        if raw[: layouts.SLOT_HOSTPID] == _NOBODY:
            return True
        return int.from_bytes(self._read(layout.slot_at(index) + layout.slot.seqlock, 8), "little") == before


class _Unfit(Exception):
    """The file is not what it was."""


def _fill(descriptor: int, content: bytes) -> None:
    """Writes `content`, leaving holes where whole pages are zero. Raises OSError."""
    os.ftruncate(descriptor, len(content))
    page = os.sysconf("SC_PAGESIZE")
    nothing = bytes(page)
    for start in range(0, len(content), page):
        piece = content[start : start + page]
        if piece != nothing[: len(piece)]:
            os.pwrite(descriptor, piece, start)
