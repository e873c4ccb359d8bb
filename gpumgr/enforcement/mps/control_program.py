"""Finds NVIDIA's control program and checks whether daemons can be started with it.

An agent in a pod starts them on the host (see launcher). It must be able to enter the host's mount namespace, and mounts that the host
makes later must propagate into the pod.
"""

import asyncio
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumgr.common.errors import MpsError, MpsTransientError
from gpumgr.enforcement.mps.control import ControlProgram, shown
from gpumgr.enforcement.mps.launcher import LaunchMethod, host_prefix

_COMES_WITH: Final = "it comes with the driver (package nvidia-compute-utils); set mps.control_program"
#: Run on the host with the program's name and the folder of the daemons: prints a line for each fact, with its name first.
_PROBE: Final = """
echo mounts "$(readlink /proc/self/ns/mnt)"
test -d /run/systemd/system && echo systemd-run "$(command -v systemd-run)"
echo program "$(command -v "$0")"
echo folder "$(stat -c %d:%i "$1")"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnView:
    """How the agent sees the daemons' folder. `mounts`: its mount namespace; `folder`: device and inode of the folder, None if it is
    missing; `receives_mounts`: later mounts of the host below the folder propagate to the agent."""

    mounts: str
    folder: str | None
    receives_mounts: bool


async def find_control_program(name: str, method: LaunchMethod, run_dir: Path, *, timeout_seconds: float) -> ControlProgram:
    """`name`: a path, or a name to search in PATH; `run_dir`: the folder of the daemons. Raises MpsError, MpsTransientError."""
    if method != "host":
        path = await asyncio.to_thread(shutil.which, name)
        if path is None:
            raise MpsError(f"NVIDIA's MPS control program {name!r} was not found; {_COMES_WITH}")
        return ControlProgram(Path(path), timeout_seconds=timeout_seconds)
    before = host_prefix(method)
    if await asyncio.to_thread(shutil.which, before[0]) is None:
        raise MpsError(f"MPS daemons are started on the host by {before[0]}, which this image lacks; add it (package util-linux)")
    control = ControlProgram(Path(name), timeout_seconds=timeout_seconds, before=before)
    try:
        _, output = await control.communicate(["/bin/sh", "-c", _PROBE, name, str(run_dir)], {}, "")
    except MpsTransientError as error:
        raise MpsTransientError(
            f"the host did not answer the agent's pod within {timeout_seconds:g} s; check whether its file systems answer"
        ) from error
    own = await asyncio.to_thread(_own_view, run_dir)
    if (reason := obstacle(output, own, name, run_dir)) is not None:
        raise MpsError(reason)
    return ControlProgram(Path(parse_probe(output)["program"]), timeout_seconds=timeout_seconds, before=before)


def obstacle(output: str, own: OwnView, name: str, run_dir: Path) -> str | None:
    """Why daemons can't be started on the host of this pod; None if they can. `output`: of the probe on the host."""
    host = parse_probe(output)
    if "mounts" not in host:
        return (
            f"MPS daemons would end with the agent's pod, and it can't enter the host's mount namespace to start them: {shown(output)}; "
            "give the pod privileged: true (of its capabilities SYS_ADMIN, SYS_CHROOT and SYS_PTRACE are needed) and hostPID: true"
        )
    if host["mounts"] == own.mounts:
        return "MPS daemons would end with the agent's pod, and it does not see the host's processes; give the pod hostPID: true"
    if not host.get("systemd-run"):
        return (
            "MPS daemons would end with the agent's pod, and only a host with systemd can start them outside of it; "
            "run the agent on the host itself, or use another mechanism"
        )
    if not host.get("program"):
        return f"NVIDIA's MPS control program {name!r} was not found on the host; {_COMES_WITH}"
    if own.folder is None or host.get("folder") != own.folder:
        return f"{run_dir} of the agent's pod is not the host's; mount it by hostPath, at the same path"
    if not own.receives_mounts:
        return (
            f"shared memory of MPS, which is mounted below {run_dir} on the host, would not be visible in the agent's pod; "
            "set mps.enabled in the chart's values, or mountPropagation: HostToContainer for that volume"
        )
    return None


def parse_probe(output: str) -> Mapping[str, str]:
    """The facts of the probe by name; other lines are error messages."""
    lines = (line.partition(" ") for line in output.splitlines())
    return {name: value for name, _, value in lines if name in ("mounts", "systemd-run", "program", "folder")}


def receives_mounts(mountinfo: str, folder: Path) -> bool:
    """Whether later mounts below this folder propagate from the namespace that it comes from. Source: mount_namespaces(7), "shared"
    and "master" in the optional fields of /proc/PID/mountinfo."""
    found = (len("/"), False)
    for line in mountinfo.splitlines():
        fields, _, _ = line.partition(" - ")
        point, *options = [_plain(field) for field in fields.split()[4:]]
        if folder.is_relative_to(point) and len(point) >= found[0]:  # of several mounts at one point the last one counts
            found = len(point), any(option.startswith(("shared:", "master:")) for option in options)
    return found[1]


def _own_view(folder: Path) -> OwnView:
    """Raises OSError."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        status = None
    return OwnView(
        mounts=os.readlink("/proc/self/ns/mnt"),
        folder=f"{status.st_dev}:{status.st_ino}" if status else None,
        receives_mounts=receives_mounts(Path("/proc/self/mountinfo").read_text(), folder.resolve()),
    )


def _plain(text: str) -> str:
    """Blanks, tabs and backslashes are octal in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
