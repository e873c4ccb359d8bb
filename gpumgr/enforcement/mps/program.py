"""NVIDIA's control program: where it is, and whether its daemons can be started where it is.

From a pod that is the host (launch.py), and more is needed than the program: the pod must be able to enter the host's mounts, and to see
what is mounted there later.
"""

import asyncio
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumgr.enforcement.mps.control import Control, shown
from gpumgr.enforcement.mps.errors import MpsError, Unanswered
from gpumgr.enforcement.mps.launch import Launch, on_host

_COMES_WITH: Final = "it comes with the driver (package nvidia-compute-utils); set mps.control_program"
#: Run on the host with the program's name and the folder of the daemons: a line for each answer, its name first.
_LOOK: Final = """
echo mounts "$(readlink /proc/self/ns/mnt)"
test -d /run/systemd/system && echo systemd-run "$(command -v systemd-run)"
echo program "$(command -v "$0")"
echo folder "$(stat -c %d:%i "$1")"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What tells a pod from its host. `mounts`: its mount namespace; `folder`: device and inode of the daemons' folder, None if there is
    none; `hears`: what the host mounts below that folder later is seen in it."""

    mounts: str
    folder: str | None
    hears: bool


async def find(name: str, launch: Launch, run_dir: Path, *, timeout_seconds: float) -> Control:
    """`name`: a path, or what PATH finds; `run_dir`: the folder of the daemons. Raises MpsError; Unanswered if it may be well later."""
    if launch != "host":
        path = await asyncio.to_thread(shutil.which, name)
        if path is None:
            raise MpsError(f"NVIDIA's MPS control program {name!r} was not found; {_COMES_WITH}")
        return Control(Path(path), timeout_seconds=timeout_seconds)
    before = on_host(launch)
    if await asyncio.to_thread(shutil.which, before[0]) is None:
        raise MpsError(f"MPS daemons are started on the host by {before[0]}, which this image lacks; add it (package util-linux)")
    control = Control(Path(name), timeout_seconds=timeout_seconds, before=before)
    try:
        _, said = await control.converse(["/bin/sh", "-c", _LOOK, name, str(run_dir)], {}, "")
    except Unanswered as error:
        raise Unanswered(
            f"the host did not answer the agent's pod within {timeout_seconds:g} s; look whether its file systems answer"
        ) from error
    own = await asyncio.to_thread(_look_here, run_dir)
    if (reason := obstacle(said, own, name, run_dir)) is not None:
        raise MpsError(reason)
    return Control(Path(parse_look(said)["program"]), timeout_seconds=timeout_seconds, before=before)


def obstacle(said: str, own: Here, name: str, run_dir: Path) -> str | None:
    """Why daemons can't be started on the host of this pod. `said`: what the look at the host printed."""
    host = parse_look(said)
    if "mounts" not in host:
        return (
            f"MPS daemons would end with the agent's pod, and it can't enter the host's mounts to start them there: {shown(said)}; "
            "give the pod privileged: true (of its capabilities SYS_ADMIN, SYS_CHROOT and SYS_PTRACE are needed) and hostPID: true"
        )
    if host["mounts"] == own.mounts:
        return "MPS daemons would end with the agent's pod, and it does not see the host's processes; give the pod hostPID: true"
    if not host.get("systemd-run"):
        return (
            "MPS daemons would end with the agent's pod, and only a host that systemd runs can start them outside of it; "
            "run the agent on the host itself, or limit by another mechanism"
        )
    if not host.get("program"):
        return f"NVIDIA's MPS control program {name!r} was not found on the host; {_COMES_WITH}"
    if own.folder is None or host.get("folder") != own.folder:
        return f"{run_dir} of the agent's pod is not the host's; mount it by hostPath, at the same path"
    if not own.hears:
        return (
            f"shared memory of MPS, which is mounted below {run_dir} on the host, would not be seen in the agent's pod; "
            "set mps.enabled in the chart's values, or mountPropagation: HostToContainer for that volume"
        )
    return None


def parse_look(said: str) -> Mapping[str, str]:
    """What the look at the host printed, by name; other lines are complaints."""
    lines = (line.partition(" ") for line in said.splitlines())
    return {name: value for name, _, value in lines if name in ("mounts", "systemd-run", "program", "folder")}


def hears(mountinfo: str, folder: Path) -> bool:
    """Whether mounts below this folder come in from where it was mounted from. Source: mount_namespaces(7), "shared" and "master" among
    the optional fields of /proc/PID/mountinfo."""
    found = (len("/"), False)
    for line in mountinfo.splitlines():
        fields, _, _ = line.partition(" - ")
        point, *options = [_plain(field) for field in fields.split()[4:]]
        if folder.is_relative_to(point) and len(point) >= found[0]:  # of several at one point the last one counts
            found = len(point), any(option.startswith(("shared:", "master:")) for option in options)
    return found[1]


def _look_here(folder: Path) -> Here:
    """Raises OSError."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        status = None
    return Here(
        mounts=os.readlink("/proc/self/ns/mnt"),
        folder=f"{status.st_dev}:{status.st_ino}" if status else None,
        hears=hears(Path("/proc/self/mountinfo").read_text(), folder.resolve()),
    )


def _plain(text: str) -> str:
    """Blanks, tabs and backslashes are octal there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
