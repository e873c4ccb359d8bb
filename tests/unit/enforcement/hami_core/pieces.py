"""Regions of any layout out of words, as a container could have written them."""

import struct
from collections.abc import Callable

from gpumgr.enforcement.hami_core import layouts, seed, view
from gpumgr.enforcement.hami_core.layouts import HEAD, MAGIC, Layout
from gpumgr.enforcement.hami_core.seed import RegionLimits
from gpumgr.enforcement.hami_core.view import RegionView
from tests.shares import shared_gpu

GRANTED: RegionLimits = seed.limits([shared_gpu()])


class Pieces:
    """One region's bytes, with what was granted in it and no slot."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.content = bytearray(layout.file_bytes)
        self.content[: HEAD.size] = HEAD.pack(MAGIC, *(layout.version or (0, 0)))
        self.put(layout.limit, "<16Q", *GRANTED.memory_bytes)
        self.put(layout.sm_limit, "<16Q", *GRANTED.core_percent)
        self.put(layout.utilization_switch, "<iii", 1, 2, GRANTED.priority)

    def put(self, offset: int, form: str, *values: int) -> None:
        struct.pack_into(form, self.content, offset, *values)

    def put_uuid(self, device: int, text: bytes) -> None:
        start = self.layout.uuids + device * layouts.UUID_BYTES
        self.content[start : start + len(text)] = text

    def add(self, *, pid: int, hostpid: int = 0, status: int = 1, used: tuple[int, ...] = (0,), seqlock: int = 0) -> None:
        """One more slot, with totals by device."""
        (count,) = struct.unpack_from("<i", self.content, self.layout.proc_num)
        start, slot = self.layout.slot_at(count), self.layout.slot
        self.put(start, "<ii", pid, hostpid)
        self.put(start + slot.status, "<i", status)
        for device, total in enumerate(used):
            self.put(start + slot.used + device * slot.used_stride + layouts.USED_TOTAL, "<Q", total)
        if slot.seqlock is not None:
            self.put(start + slot.seqlock, "<Q", seqlock)
        self.put(self.layout.proc_num, "<i", count + 1)

    def view(self) -> RegionView:
        layout, content = self.layout, bytes(self.content)
        tail = content[layout.proc_num : layout.sizeof]
        slots = [content[layout.slot_at(n) : layout.slot_at(n + 1)] for n in range(view.process_count(tail))]
        return view.decode(layout, content[: layout.procs], tail, slots)


def no_pid(_pid: int) -> None:
    """A table of numbers without any process."""


def table(**numbers: int) -> Callable[[int], int | None]:
    """`p7=1007`: the process that its container calls 7 is the host's 1007."""
    return {int(name[1:]): host for name, host in numbers.items()}.get
