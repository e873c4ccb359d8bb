"""A region out of words, as a container could have written them."""

import struct
from collections.abc import Callable

from gpumgr.enforcement.hami_core import layout
from gpumgr.enforcement.hami_core.region import RegionLimits, RegionView, decode, limits, seed
from tests.shares import shared_gpu

GRANTED: RegionLimits = limits([shared_gpu()])


class Pieces:
    """One region's bytes: at first a seed."""

    def __init__(self) -> None:
        self.content = bytearray(seed(GRANTED))

    def put(self, offset: int, form: str, *values: int | bytes) -> None:
        struct.pack_into(form, self.content, offset, *values)

    def add(self, *, pid: int, hostpid: int = 0, status: int = 1, seqlock: int = 0) -> None:
        """One more slot."""
        (count,) = struct.unpack_from("<i", self.content, layout.PROC_NUM)
        self.put(layout.slot_at(count), "<ii", pid, hostpid)
        self.put(layout.slot_at(count) + layout.SLOT_STATUS, "<i4xQ", status, seqlock)
        self.put(layout.PROC_NUM, "<i", count + 1)

    def view(self) -> RegionView:
        return decode(lambda offset, size: bytes(self.content[offset : offset + size]))


def table(**numbers: int | tuple[int, ...]) -> Callable[[int], tuple[int, ...]]:
    """`p7=1007`: the process that its container calls 7 is the host's 1007."""
    hosts = {int(name[1:]): host if isinstance(host, tuple) else (host,) for name, host in numbers.items()}
    return lambda pid: hosts.get(pid, ())
