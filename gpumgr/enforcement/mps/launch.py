"""How the daemon's first process is started so that it outlives the agent, with the GPU's own folder as its /dev/shm.

systemd    in a transient service: processes of the agent's own service end with it (KillMode=mixed), and its sandbox neither lets
           it mount nor make namespaces.
host       the same from a pod, by the host's own programs: the command enters the mounts of the host's first process. The container's
           processes end with it too, and neither systemd's programs nor its sockets are in there.
namespace  in a mount namespace of its own; where the host is not run by systemd. Unmounts on the host reach it ("slave"), or it
           would hold pods' volumes for ever.
plain      neither; an agent that is not root can do no more. The daemon keeps the host's /dev/shm.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

Launch = Literal["systemd", "host", "namespace", "plain"]

#: All shared memory of the containers on one GPU; it counts as theirs when they use it.
SHM_BYTES: Final = 1 << 30
#: Mounts are all that stands between: sockets are found by their paths, and the pod has the host's processes (hostPID).
_ENTER: Final = ("nsenter", "--target", "1", "--mount", "--")
_BIND: Final = 'mount --bind "$0" /dev/shm && exec "$@"'


def best(*, in_pod: bool = False) -> Launch:
    """What this process can do on this host. In a pod there is but one way; whether it is open is program.find's to say."""
    if in_pod:
        return "host"
    if os.geteuid() != 0:
        return "plain"
    booted = Path("/run/systemd/system").is_dir()  # sd_booted(3)
    return "systemd" if booted and shutil.which("systemd-run") else "namespace"


def on_host(launch: Launch) -> tuple[str, ...]:
    """What goes before a command that must be run where the daemons are."""
    return _ENTER if launch == "host" else ()


def daemon_command(launch: Launch, uuid: str, shm: Path, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """`command` goes into the background by itself. The servers are not ended with it: work that runs goes on."""
    match launch:
        case "systemd":
            unit = ["systemd-run", "--quiet", "--collect", f"--unit=gpumgr-mps-{uuid}", "--service-type=forking"]
            unit += ["--property=KillMode=process", f"--property=BindPaths={shm}:/dev/shm"]
            return [*unit, *(f"--setenv={key}={value}" for key, value in environment.items()), "--", *command]
        case "host":
            return [*on_host(launch), *daemon_command("systemd", uuid, shm, environment, command)]
        case "namespace":
            return ["unshare", "--mount", "--propagation", "slave", "--", "/bin/sh", "-c", _BIND, str(shm), *command]
        case "plain":
            return list(command)


def mount_command(launch: Launch, shm: Path) -> list[str] | None:
    """Gives the folder a limited size, in the host's own mount namespace; None: it stays a folder."""
    options = f"nosuid,nodev,noexec,mode=1777,size={SHM_BYTES}"
    return _outside(launch, ["mount", "-t", "tmpfs", "-o", options, "gpumgr-mps", str(shm)])


def unmount_command(launch: Launch, shm: Path) -> list[str] | None:
    return _outside(launch, ["umount", str(shm)])


def _outside(launch: Launch, command: Sequence[str]) -> list[str] | None:
    if launch == "plain":
        return None
    before = ["systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--"] if launch == "systemd" else []
    return [*on_host(launch), *before, *command]
