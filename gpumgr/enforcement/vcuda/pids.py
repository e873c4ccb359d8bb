"""`pids.config`: the host's pids of one container's processes, as libcuda-control.so reads them.

An array of int32 without a header. The library reads at most 1,024 of them, searches by halves (so they must ascend), and counts only
the GPU memory of those it finds; with an empty file it counts nothing and so limits nothing.
"""

import struct
from collections.abc import Collection
from typing import Final

MOST_PIDS: Final = 1024
_PID_BYTES: Final = 4

#: Stands in the file before the container has a process: the host's init never ends, so its number is nobody else's, and never uses a GPU.
INIT_PID: Final = 1


def chosen_pids(pids: Collection[int], first: Collection[int] = ()) -> tuple[int, ...]:
    """Those that the file gets, ascending. Of more than 1,024 those in `first` (who use the GPU) go before others, low before high."""
    distinct = set(pids)
    if len(distinct) > MOST_PIDS:
        preferred = set(first)
        distinct = set(sorted(distinct, key=lambda pid: (pid not in preferred, pid))[:MOST_PIDS])
    return tuple(sorted(distinct))


def pack_pids(pids: Collection[int], first: Collection[int] = ()) -> bytes:
    """The file's content; see `chosen_pids`. Raises ValueError without a pid: an empty file would lift the limit."""
    chosen = chosen_pids(pids, first)
    if not chosen:
        raise ValueError("pids.config must name at least one process")
    return struct.pack(f"<{len(chosen)}i", *chosen)


def unpack_pids(content: bytes) -> tuple[int, ...]:
    """The pids in a file; empty if it is damaged."""
    if len(content) % _PID_BYTES:
        return ()
    return struct.unpack(f"<{len(content) // _PID_BYTES}i", content)
