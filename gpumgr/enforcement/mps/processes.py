"""Finds a daemon and its servers in /proc, by the daemon's pipe folder in their environment.

Drivers 470 and 535 write no pid file. Then the daemon is the process that listens at the control socket (SO_PEERCRED, unix(7)). Servers of
protocol 3 have a pipe folder of their own, below the daemon's.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from gpumgr.common.errors import MpsError
from gpumgr.common.proc import PROC, environment, is_running, start_time_ticks
from gpumgr.common.units import Process
from gpumgr.enforcement import cuda_client
from gpumgr.enforcement.mps.commands import SERVER

_PID_FILE: Final = "nvidia-cuda-mps-control.pid"
#: Only root can connect to this socket.
_SOCKET: Final = "control_privileged"
_STARTS_DAEMON: Final = frozenset({b"-d", b"-f", b"--daemon", b"--foreground"})
CLIENT: Final = Path(cuda_client.__file__)
_SERVER_PROGRAM: Final = b"nvidia-cuda-mps-server"
_CONTAINER_ID: Final = re.compile(rb"[0-9a-f]{64}")
POLL_SECONDS: Final = 0.05


def find_daemon(pipe: Path, known: Process | None = None) -> Process | None:
    """The daemon of this folder; None if it does not run. `known`: the last daemon; without a pid file, another one is looked for only
    after its end. Raises MpsError if a daemon without a pid file accepts no connections."""
    try:
        pid = int((pipe / _PID_FILE).read_text())
    except FileNotFoundError:
        if known is not None and is_running(known) and uses_pipe_folder(known[0], pipe):
            return known
        pid = _listener_of(pipe / _SOCKET)
    except (OSError, ValueError):
        return None
    started = start_time_ticks(pid)
    return (pid, started) if started is not None and uses_pipe_folder(pid, pipe) else None


def _listener_of(path: Path) -> int:
    """The pid of the process that listens at this socket; 0 if none does. Raises MpsError if its queue of connections is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except BlockingIOError:
            raise MpsError(
                f"the MPS daemon of {path.parent} accepts no connections: end the process that listens there"
            ) from None
        except OSError:
            return 0
        pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)


async def wait_for_exit(process: Process, patience_seconds: float) -> bool:
    deadline = time.monotonic() + patience_seconds
    while is_running(process):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


async def end(process: Process, patience_seconds: float) -> bool:
    """Ends the process by SIGTERM or SIGKILL, each with this patience; returns whether it has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        send_signal(process, number)
        if await wait_for_exit(process, patience_seconds):
            return True
    return False


def identified(pids: Iterable[int]) -> set[Process]:
    """The processes with these pids that run."""
    return {(pid, ticks) for pid in pids if (ticks := start_time_ticks(pid)) is not None}


def uses_pipe_folder(pid: int, pipe: Path) -> bool:
    """Whether the process was started with this pipe folder. Never call it for a process in a container, which may have the same
    environment: callers take pids from the daemon's file, socket or answers, or exclude containers first."""
    variables = environment(pid, PROC).split(b"\0")
    return any(b"CUDA_MPS_PIPE_DIRECTORY=" + os.fsencode(each) in variables for each in (pipe, pipe / SERVER))


def daemon_of_others(uuid: str) -> tuple[int, str] | None:
    """(pid, pipe folder) of a daemon for this GPU that another program on the host started. Processes in containers do not count, since a
    tenant can give its process any name."""
    own = ("mps", uuid, "pipe")
    for proc in PROC.iterdir():
        if not proc.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # First, because a tenant can make any read of its process's memory hang.
            if _in_container(proc):
                continue
            program, *words = (proc / "cmdline").read_bytes().split(b"\0")
            if os.path.basename(program) != b"nvidia-cuda-mps-control" or _STARTS_DAEMON.isdisjoint(words):
                continue
            lines = (proc / "environ").read_bytes().split(b"\0")
            settings = dict(os.fsdecode(line).partition("=")[::2] for line in lines)
            pipe = settings.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
            visible = settings.get("CUDA_VISIBLE_DEVICES", uuid).split(",")
            # gpumgr knows its own daemons by their records.
            if Path(pipe).parts[-3:] == own or not any(each.startswith("GPU-") and uuid.startswith(each) for each in visible):
                continue
            return int(proc.name), pipe
    return None


def _in_container(proc: Path) -> bool:
    """Whether the process is in another container than the agent's. Without cgroupsPerQOS a runtime may put containers below any cgroup,
    such as /system.slice or /k8s.io. Raises OSError."""
    text, own = (proc / "cgroup").read_bytes(), b""
    with contextlib.suppress(OSError):
        own = (PROC / "self/cgroup").read_bytes()
    return text != own and (b"kubepods" in text or any(each not in own for each in _CONTAINER_ID.findall(text)))


def is_server(pid: int, pipes: Collection[Path]) -> bool:
    """Whether the process is the server of a daemon with one of these pipe folders, or the client with which gpumgr tests a daemon. False
    in containers, where a process can have any name and environment, and for a server that has begun to exit."""
    try:
        # First, because a tenant can make any read of its process's memory hang.
        if _in_container(PROC / str(pid)):
            return False
        program, *words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    ours = os.path.basename(program) == _SERVER_PROGRAM or os.fsencode(CLIENT) in words
    return ours and any(uses_pipe_folder(pid, pipe) for pipe in pipes)


def user_of(pid: int) -> int | None:
    """The effective user id on the host; None if the process is gone."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "status").read_bytes().splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[2])
    return None


def send_signal(process: Process, number: signal.Signals) -> None:
    """Does nothing if the process is gone."""
    if is_running(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process[0], number)
