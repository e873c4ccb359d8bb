"""Who else is on the node: agents that give out the same GPUs, and another gpumgr."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpumgr.doctor.examine import aside
from gpumgr.doctor.finding import Finding, error, ok, skipped, warning

IF_HUNG: Final = "look whether the file system of the device plugins' folder answers"
#: gpu-manager's sockets in the device plugins' folder. NVIDIA's plugin has nvidia-gpu.sock, nvidia-mig-1g.10gb.sock and the like, before
#: 0.13 nvidia.sock, GKE's nvidiaGPU-TIME.sock; HAMi's is made of NVIDIA's and has the same names.
_GPU_MANAGER: Final = frozenset({"vcore.sock", "vmemory.sock"})
_NVIDIA: Final = "nvidia"
#: A socket that takes no more connections for now belongs to somebody who lives.
_BUSY: Final = (errno.EAGAIN, errno.EINPROGRESS)


async def look_at_plugins(folder: Path) -> Finding:
    """Other device plugins for these GPUs: each gives out all of them, so that two give out everything twice. A socket that was left
    behind and that nobody answers at counts for nothing."""
    name = "plugins"
    if not await aside(folder.is_dir):
        return skipped(name, f"{folder} is no folder")
    found = await aside(lambda: answering(folder))
    managers = [path for path in found if path.name in _GPU_MANAGER]
    if managers:
        return error(
            name,
            f"gpu-manager answers at {_listed(managers)}: it gives out the same GPUs, under the same resources",
            "stop it first; `gpumgr migrate gpu-manager` says how, and what becomes of its pods",
        )
    if found:
        return error(
            name,
            f"NVIDIA's device plugin, or HAMi's, answers at {_listed(found)}: gpumgr does not know which of these GPUs it gives out, "
            "and gives them out again",
            "keep it off this node (the nodeSelector of its DaemonSet; `gpumgr migrate hami` for HAMi), and delete the pods that have "
            "their GPUs from it",
        )
    return ok(name, f"no other plugin for NVIDIA's GPUs answers in {folder}")


async def look_at_agent(lock_path: Path, folder: Path, *, before_start: bool) -> Finding:
    """Whether a gpumgr runs here. `before_start`: one is about to start, so that there must be none."""
    name = "agent"
    holder = await aside(lambda: _holder(lock_path))
    if holder is not None:
        told = f"runs on this node ({holder}holds {lock_path})"
        if not before_start:
            return ok(name, f"it {told}")
        return error(
            name,
            f"another gpumgr {told}",
            "let one go: `systemctl disable --now gpumgr`, or keep the DaemonSet off this node by its nodeSelector",
        )
    if await aside(lambda: _holder(folder)) is not None:
        message = f"another gpumgr, whose process.lock_path is not {lock_path}, serves {folder}"
        if before_start:
            return error(name, message, "let one of the two go, or they would take the kubelet's sockets from one another")
        return warning(name, message, "ask with its settings: gpumgr doctor --config FILE")
    return ok(name, "none runs on this node")


def answering(folder: Path) -> tuple[Path, ...]:
    """Sockets of such plugins at which somebody answers; none if the folder can't be read."""
    try:
        return tuple(path for path in _others(folder) if _answers(path))
    except OSError:
        return ()


def _others(folder: Path) -> Iterator[Path]:
    for name in sorted(os.listdir(folder)):
        if name in _GPU_MANAGER or (name.lower().startswith(_NVIDIA) and name.endswith(".sock")):
            yield folder / name


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except OSError as problem:
            return problem.errno in _BUSY
        return True


def _listed(paths: list[Path] | tuple[Path, ...]) -> str:
    return " and ".join(map(str, paths))


def _holder(path: Path) -> str | None:
    """Who holds a file or folder locked, as words with a comma behind; "" if that is not known, None if nobody does.

    To ask is to share the lock for an instant: an agent that starts in that very instant ends with code 3 and is started again.
    """
    try:
        held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = "" if path.is_dir() else os.pread(held, 32, 0).decode(errors="replace").strip()
        return f"pid {pid}, " if pid else ""
    finally:
        os.close(held)
    return None
