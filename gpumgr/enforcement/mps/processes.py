"""The daemon and its servers as /proc shows them. A pid counts as ours only if its environment names our pipe folder."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

#: pid and start time, in clock ticks since boot: together they never recur.
Process = tuple[int, int]

_PID_FILE: Final = "nvidia-cuda-mps-control.pid"
_PROC: Final = Path("/proc")
_POLL_SECONDS: Final = 0.05


def find_daemon(pipe: Path) -> Process | None:
    """The daemon that serves this folder, if it lives."""
    try:
        pid = int((pipe / _PID_FILE).read_text())
    except (OSError, ValueError):
        return None
    started = start_time(pid)
    return (pid, started) if started is not None and belongs(pid, pipe) else None


def start_time(pid: int) -> int | None:
    """None: there is no such process, or it has ended (proc(5): state is field 3, start time field 22)."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()  # a program's name need not be text
    except OSError:
        return None
    return int(fields[19]) if len(fields) > 19 and fields[0] not in (b"Z", b"X") else None


def lives(process: Process) -> bool:
    return start_time(process[0]) == process[1]


async def gone(process: Process, patience_seconds: float) -> bool:
    """Waits for its end; False: it is still there."""
    deadline = time.monotonic() + patience_seconds
    while lives(process):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


def belongs(pid: int, pipe: Path) -> bool:
    """Started with this pipe folder, as the daemon and its servers are. A container's own processes may name it too, but they are
    never asked about: pids come from the daemon's file, its children and its answers."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"CUDA_MPS_PIPE_DIRECTORY=" + os.fsencode(pipe) in environment


def children(pid: int) -> tuple[int, ...]:
    """Of all its threads; servers are the daemon's children."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return tuple(sorted(found))


def user_of(pid: int) -> int | None:
    """Effective user id, as the host counts."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_bytes().splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[2])
    return None


def send(process: Process, number: signal.Signals) -> None:
    """Nothing happens if the process is gone."""
    if lives(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process[0], number)
