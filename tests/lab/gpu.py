"""The host's side of the fake GPU: the file that containers map (the lab's fake/fakegpu.h)."""

import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumgr.sim.nodes import NodeDescription
from tests.e2e.processes import start_time

_MAGIC: Final = 0x46414B45
_SLOTS, _BUCKETS = 256, 64
#: fg_state up to its slots, and fg_slot.
_HEAD: Final = struct.Struct("<IIQQ96s32s32siiiiq")
_SLOT: Final = struct.Struct(f"<iiQQQii{_BUCKETS}q{_BUCKETS}q")
_HOST_PID: Final = struct.Struct("<i")
_BUCKET_MICROSECONDS: Final = 100_000
CONTEXT_BYTES: Final = 300 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """One process on the fake GPU. `sm_percent` is measured over the last second."""

    pid: int
    memory_bytes: int
    sm_percent: int


class FakeGpu:
    """Creates the file at `path`; every process that maps it shares the GPU."""

    def __init__(self, path: Path, node: NodeDescription, index: int) -> None:
        self.path = path
        memory_bytes = node.model_of(index).memory_mib << 20
        names = [text.encode() for text in (node.uuid_of(index), node.gpus[index].bus_id, node.driver_version)]
        # CUDA 12.4, 132 multiprocessors of 2048 threads, 100 ns for each block of a launch.
        head = _HEAD.pack(_MAGIC, 1, memory_bytes, CONTEXT_BYTES, *names, 12040, 132, 2048, 100, 0)
        path.write_bytes(head + bytes(_SLOT.size * _SLOTS))
        path.chmod(0o666)

    def processes(self) -> list[GpuProcess]:
        """The processes that run and have a context or memory."""
        raw, now = self.path.read_bytes(), time.monotonic_ns() // 1000 // _BUCKET_MICROSECONDS
        found = list[GpuProcess]()
        for offset in range(_HEAD.size, len(raw), _SLOT.size):
            (pid,) = _HOST_PID.unpack_from(raw, offset)
            if pid <= 0 or start_time(pid) is None:
                continue
            _, contexts, size, _, _, forced, _, *buckets = _SLOT.unpack_from(raw, offset)
            used = zip(buckets[:_BUCKETS], buckets[_BUCKETS:], strict=True)
            busy = min(100, sum(microseconds for at, microseconds in used if now - 10 <= at < now) // 10_000)
            memory_bytes = size + (CONTEXT_BYTES if contexts > 0 else 0)
            found.append(GpuProcess(pid=pid, memory_bytes=memory_bytes, sm_percent=busy if forced < 0 else forced))
        return found

    @property
    def memory_used_bytes(self) -> int:
        return sum(process.memory_bytes for process in self.processes())
