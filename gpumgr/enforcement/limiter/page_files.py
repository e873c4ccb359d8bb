"""A container's pages: files through which agent, arbiter and library communicate. Methods block for microseconds."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple, Self

from gpumgr.enforcement.container_files import FOR_ALL, SharedFile
from gpumgr.enforcement.limiter import pages
from gpumgr.enforcement.limiter.pages import SLOT_BYTES, Limits, PageLimits, Slot, Turn, TurnGpu, Use, UseHead

#: The limits are read-only in the container, and its processes run as any user.
_MODES: Final = {"limits": 0o644, "use": FOR_ALL, "turn": FOR_ALL}


def page_path(folder: Path, page: str) -> Path:
    return folder / f"{page}.{pages.VERSION}"


class CountedOnGpu(NamedTuple):
    """The library's count for the container on one GPU. `changes`: how often `reserved_bytes` changed."""

    reserved_bytes: int
    changes: int


class PageFiles:
    """The open pages of one start of a container, for one thread at a time. `written`: the limits in them, in the pages' order. `new`: this
    process made them. All methods raise OSError, also if the container has damaged a file; the text says how."""

    def __init__(self, files: dict[str, SharedFile], *, new: bool) -> None:
        """Takes over the files."""
        self.limits, self.use, self.turn = (files[page] for page in pages.LAYOUTS)
        self._files, self.new = files, new
        try:
            self.written: Sequence[PageLimits] = pages.decode_limits(self.limits.read_at(0, self.limits.size_bytes))
        except ValueError as error:
            raise OSError(f"the page 'limits' can't be read: {error}") from error

    @classmethod
    def create(cls, folder: Path, limits: Sequence[PageLimits]) -> Self:
        """Replaces the files in the folder. Also raises ValueError as `encode_limits` does."""
        heads = {"limits": pages.encode_limits(limits), "use": pages.HEAD, "turn": pages.HEAD}

        def make(page: str, size_bytes: int) -> SharedFile:
            return SharedFile.create(page_path(folder, page), size_bytes, {0: heads[page]}, mode=_MODES[page])

        return cls._of(make, new=True)

    @classmethod
    def open(cls, folder: Path) -> Self:
        return cls._of(lambda page, size_bytes: SharedFile.open(page_path(folder, page), size_bytes), new=False)

    @classmethod
    def _of(cls, make: Callable[[str, int], SharedFile], *, new: bool) -> Self:
        files: dict[str, SharedFile] = {}
        with ExitStack() as on_error:
            for page, layout in pages.LAYOUTS.items():
                files[page] = make(page, ctypes.sizeof(layout))
                on_error.callback(files[page].close)
            made = cls(files, new=new)
            on_error.pop_all()
        return made

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def mend(self) -> Iterator[str]:
        """Restores size and head of the pages `limits` and `use`, and yields what was wrong. The arbiter restores `turn`."""
        for page, file in (("limits", self.limits), ("use", self.use)):
            if less := file.extend():
                yield f"{less} bytes of the page {page!r} were cut off"
            if more := file.cut():
                yield f"the page {page!r} was {more} bytes longer"
            if file.read_at(0, len(pages.HEAD)) != pages.HEAD:
                file.write(0, pages.HEAD[:4])
                file.write(4, pages.HEAD[4:])
                yield f"the head of the page {page!r} was changed"

    def put_limits(self, wanted: Sequence[PageLimits]) -> list[str]:
        """Writes the fields that differ from these limits, and returns their names."""
        words = pages.limits_words(self.limits.read_at(0, self.limits.size_bytes), wanted)
        for _, offset, data in words:
            self.limits.write(offset, data)
        self.written = wanted
        return [name for name, _, _ in words]

    def in_turns(self) -> Sequence[bool]:
        """For each GPU, whether launches need a turn. They need none without a limit of cores, or while `passes` is set (by the arbiter, if
        the container is alone on the GPU and its ceiling is 100)."""
        return [bool(gpu.share) and not gpu.passes for gpu in self._read_limits().gpu[: len(self.written)]]

    def counts(self) -> Sequence[CountedOnGpu]:
        return [CountedOnGpu(each.reserved_bytes, each.changes) for each in self._read_head().gpu[: len(self.written)]]

    @property
    def suspended(self) -> bool:
        return bool(self._read_limits().suspend)

    def suspend(self) -> None:
        """Makes CUDA calls wait and ask for a resume. A call that has just passed the check enters the driver within 100 ms."""
        self.use.write(UseHead.resume_requests.offset, bytes(4))
        self.limits.write(Limits.suspend.offset, (1).to_bytes(4, "little"))

    def resume(self) -> None:
        """Lets calls continue. The driver must have unlocked all processes of the container."""
        self.limits.write(Limits.suspend.offset, bytes(4))

    @property
    def resume_requested(self) -> bool:
        """Whether a call has waited since `suspend`. The container can forge it."""
        return bool(self._read_head().resume_requests)

    def slots(self) -> Sequence[Slot]:
        used = min(self._read_head().slots, pages.SLOTS)
        return pages.decode_slots(self.use.read_at(Use.slot.offset, used * SLOT_BYTES), len(self.written))

    def _read_limits(self) -> Limits:
        return Limits.from_buffer_copy(self.limits.read_at(0, self.limits.size_bytes))

    def _read_head(self) -> UseHead:
        return UseHead.from_buffer_copy(self.use.read_at(0, ctypes.sizeof(UseHead)))

    def free(self, slot: Slot) -> None:
        """Frees the slot (record) of an ended process. The process's memory stays counted until a reservation would fail; then the
        library subtracts it."""
        at = Use.slot.offset + slot.index * SLOT_BYTES
        now = pages.decode_slots(self.use.read_at(at, SLOT_BYTES), 0)
        if [(each.pid, each.stack) for each in now] != [(slot.pid, slot.stack)]:  # the slot was taken anew
            return
        self.use.write(at, pages.HALF_FREED)  # no other process takes the slot until it is empty
        word = Turn.gpu.offset + TurnGpu.word.offset + 4 * slot.index
        for gpu in range(len(self.written)):
            self.turn.write(word + gpu * ctypes.sizeof(TurnGpu), bytes(4))
        self.use.write(at + 8, bytes(SLOT_BYTES - 8))  # all but pid and state
        self.use.write(at, bytes(8))
