"""Finds other programs that allocate the node's GPUs: other device plugins, and another gpumgr agent, which a lock excludes.

A plugin is found by its socket in the kubelet's folder, because the kubelet's API does not list plugins, and not every plugin's device ids
name GPUs.

An agent takes the locks before it listens. The kernel releases a lock when its holder ends. The lock file is never removed: if it were, an
agent could lock the removed file and another agent a new one.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

import structlog

from gpumgr.common.aio import until_tick
from gpumgr.common.errors import AlreadyRunning, GpumgrError
from gpumgr.common.unix_socket import is_served

BY_SYSTEMD: Final = " (systemd)"


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks the kubelet's plugin folder, because two agents may be configured with different lock files. Does nothing if the folder does
    not exist.

    Raises AlreadyRunning if another process holds the lock.
    """
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield
        return
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunning(f"another gpumgr agent serves {folder}; stop it before starting this one") from error
        yield
    finally:
        os.close(held)


@contextlib.contextmanager
def lock_node(path: Path) -> Iterator[None]:
    """Locks the file `path`, which contains the holder's pid, and BY_SYSTEMD if systemd runs it. Raises AlreadyRunning if another process
    holds the lock, GpumgrError if the file can't be opened."""
    held = _locked(path)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock is held, but the message of a second agent lacks the pid
            os.ftruncate(held, 0)
            os.pwrite(held, f"{os.getpid()}{BY_SYSTEMD if 'NOTIFY_SOCKET' in os.environ else ''}\n".encode(), 0)
        yield
    finally:
        os.close(held)


def holder(path: Path) -> str | None:
    """The text "pid N, " for the process that holds a lock on this file or folder; "" if its pid is not known; None without a lock. Takes a
    shared lock for an instant. An agent that starts at this instant ends with code 3, and is started again."""
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


def _locked(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise GpumgrError(f"can't open the lock file {path}: {error.strerror or error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(file, 32, 0).decode(errors="replace").strip()
        os.close(file)
        raise AlreadyRunning(
            f"another gpumgr agent (pid {holder or 'unknown'}) runs on this node: it holds {path}; stop it before starting this one",
            pid=holder or None,
        ) from error
    return file


log = structlog.get_logger(__name__)

POLL_SECONDS: Final = 10.0
#: gpu-manager's sockets in the device plugin folder. NVIDIA's plugin has nvidia-gpu.sock, nvidia-mig-1g.10gb.sock and similar names (before
#: 0.13 nvidia.sock), HAMi's plugin the same names, GKE's nvidiaGPU-TIME.sock.
_GPU_MANAGER: Final = frozenset({"vcore.sock", "vmemory.sock"})


class OtherDevicePlugins:
    """Logs when another device plugin for the same GPUs appears, and when it is gone. `folder`: the kubelet's device plugin folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logged: tuple[Path, ...] = ()

    async def with_same_names(self, *, nvidia: bool) -> str | None:
        """Why the agent must not register yet, with the remedy; None without a reason. The reason is gpu-manager, or with `nvidia` (the
        agent offers nvidia.com/gpu) any other plugin."""
        found = [path for path in await asyncio.to_thread(answering, self._folder) if nvidia or path.name in _GPU_MANAGER]
        return "; ".join(problem_and_remedy(found)) if found else None

    async def run(self) -> NoReturn:
        while True:
            await self.check()
            await asyncio.sleep(until_tick(POLL_SECONDS))

    async def check(self) -> None:
        found = await asyncio.to_thread(answering, self._folder)
        if found == self._logged:
            return
        self._logged = found
        if found:
            problem, remedy = problem_and_remedy(found)
            log.warning("gpus_given_out_twice", problem=problem, remedy=remedy)
        else:
            log.info("gpus_given_out_once", reason=f"no other plugin for NVIDIA's GPUs answers in {self._folder} now")


def answering(folder: Path) -> tuple[Path, ...]:
    """The sockets of other plugins on which a process accepts connections; () if the folder can't be read."""
    with contextlib.suppress(OSError):
        return tuple(path for path in sorted(folder.iterdir()) if _is_others(path.name) and _answers(path))
    return ()


def problem_and_remedy(found: Sequence[Path]) -> tuple[str, str]:
    """What the plugins at these sockets do to this node, and the remedy."""
    managers = [path for path in found if path.name in _GPU_MANAGER]
    if managers:
        return (
            f"gpu-manager answers at {_listed(managers)}: it allocates the same GPUs under the same resource names",
            "stop it first; `gpumgr migrate gpu-manager` shows how, and what happens to its pods",
        )
    return (
        f"NVIDIA's device plugin, or HAMi's, answers at {_listed(found)}: it allocates these GPUs as nvidia.com/gpu (or the resource name "
        "in its settings); gpumgr can't see which pods have them, and allocates them again",
        "keep it off this node (the nodeSelector of its DaemonSet; `gpumgr migrate hami` for HAMi), and delete the pods that have "
        "their GPUs from it",
    )


def _is_others(name: str) -> bool:
    return name in _GPU_MANAGER or (name.lower().startswith("nvidia") and name.endswith(".sock"))


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_served(path)
    return False


def _listed(paths: Sequence[Path]) -> str:
    return " and ".join(map(str, paths))
