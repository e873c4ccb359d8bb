"""Other programs on the node that conflict with the agent: other device plugins for the same GPUs, and a second gpumgr."""

import fcntl
import os
from pathlib import Path
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, aside, error, ok, skipped, warning
from gpumgr.kubelet.deviceplugin.other_plugins import answering, problem_and_remedy

IF_HUNG: Final = "look whether the file system of the device plugins' folder answers"


async def look_at_plugins(folder: Path) -> CheckResult:
    """Other device plugins for these GPUs."""
    if not await aside(folder.is_dir):
        return skipped(f"{folder} is no folder")
    found = await aside(lambda: answering(folder))
    if found:
        return error(*problem_and_remedy(found))
    return ok(f"no other plugin for NVIDIA's GPUs answers in {folder}")


async def look_at_agent(lock_path: Path, folder: Path, *, before_start: bool) -> CheckResult:
    """Whether a gpumgr agent runs on this node. `before_start`: one is about to start, so none may run."""
    holder = await aside(lambda: _holder(lock_path))
    if holder is not None:
        running = f"runs on this node ({holder}holds {lock_path})"
        if not before_start:
            return ok(f"it {running}")
        return error(
            f"another gpumgr {running}",
            "let one go: `systemctl disable --now gpumgr`, or keep the DaemonSet off this node by its nodeSelector",
        )
    if await aside(lambda: _holder(folder)) is not None:
        message = f"another gpumgr with another process.lock_path than {lock_path} serves {folder}"
        if before_start:
            return error(message, "let one of the two go, or they would take the kubelet's sockets from one another")
        return warning(message, "ask with its settings: gpumgr doctor --config FILE")
    return ok("none runs on this node")


def _holder(path: Path) -> str | None:
    """The process that holds a lock on a file or folder, as text with a trailing comma; "" if it is not known, None if there is none.

    The check takes a shared lock for an instant. An agent that starts in that instant ends with code 3 and is started again.
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
