"""HAMi-core's shared region as the host sees it (layout 1.2)."""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumgr.enforcement.hami_core import layout

from .container import PROGRAMS, Container

#: Of a slot: bytes used on the first device (u64).
_SLOT_USED: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    pid: int
    host_pid: int
    used_bytes: int


class Region:
    """`path` on the host."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def word(self, offset: int, form: str = "Q") -> int:
        with self.path.open("rb") as file:
            return int(struct.unpack("<" + form, os.pread(file.fileno(), struct.calcsize(form), offset))[0])

    @property
    def limit_bytes(self) -> int:
        return self.word(layout.LIMIT)

    @property
    def core_limit_percent(self) -> int:
        return self.word(layout.SM_LIMIT)

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def slots(self) -> list[Slot]:
        starts = [layout.slot_at(index) for index in range(max(0, min(self.word(layout.PROC_NUM, "i"), layout.SLOTS)))]
        return [
            Slot(
                pid=self.word(start + layout.SLOT_PID, "i"),
                host_pid=self.word(start + layout.SLOT_HOSTPID, "i"),
                used_bytes=self.word(start + _SLOT_USED),
            )
            for start in starts
        ]

    def wrong_host_pids(self, container: Container) -> list[str]:
        """Slots of running processes that do not have the process's pid on the host."""
        true = container.host_pids()
        return [
            f"{slot.host_pid} instead of {true[slot.pid]}"
            for slot in self.slots()
            if slot.pid in true and true[slot.pid] != slot.host_pid
        ]


async def tamper(container: Container, *words: object) -> None:
    """Writes as root in the container: OFFSET FORMAT VALUE, repeated, or "size" BYTES."""
    process = await container.exec("/usr/bin/python3", f"{PROGRAMS}/tamper_region.py", *map(str, words))
    status, _ = await process.output()
    assert status == 0, f"tampering failed: {process.stderr()}"


def raised() -> tuple[object, ...]:
    """64 GiB and 100 %."""
    return layout.LIMIT, "Q", 64 << 30, layout.SM_LIMIT, "Q", 100
