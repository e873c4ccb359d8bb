"""Command lines that start a GPU's MPS daemon so that it outlives the agent, with the GPU's own folder as its /dev/shm.

systemd    in a transient service: the agent's own service ends its processes (KillMode=mixed) and allows neither mounts nor namespaces
host       the same from a pod, in the mount namespace of the host's first process: a pod has no systemd, and its processes end with it
namespace  in a mount namespace of its own, on a host without systemd; unmounts on the host propagate into this namespace ("slave"), so
           that it does not keep pods' volumes mounted
plain      as a plain process with the host's /dev/shm, if the agent is not root
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

LaunchMethod = Literal["systemd", "host", "namespace", "plain"]

#: For the shared memory of all containers on one GPU; the kernel accounts it to the container that uses it.
SHM_BYTES: Final = 1 << 30
#: After this time systemd ends a trial's CUDA program for which the agent no longer waits.
_CLIENT_SECONDS: Final = 60
#: The mount namespace is enough: sockets are found by their paths, and the pod has the host's processes (hostPID).
_ENTER: Final = ("nsenter", "--target", "1", "--mount", "--")
_UNIT: Final = ("systemd-run", "--quiet", "--collect")
_WAIT: Final = ("--wait", "--pipe")
_BIND: Final = 'mount --bind "$0" /dev/shm && exec "$@"'


def best_method(*, in_pod: bool = False) -> LaunchMethod:
    """`find_control_program` checks whether the method works in a pod."""
    if in_pod:
        return "host"
    if os.geteuid() != 0:
        return "plain"
    booted = Path("/run/systemd/system").is_dir()  # sd_booted(3)
    return "systemd" if booted and shutil.which("systemd-run") else "namespace"


def host_prefix(launch: LaunchMethod) -> tuple[str, ...]:
    return _ENTER if launch == "host" else ()


def daemon_command(
    launch: LaunchMethod, uuid: str, shm: Path, environment: Mapping[str, str], command: Sequence[str]
) -> list[str]:
    """`command` starts the daemon, which goes into the background. Servers outlive it."""
    match launch:
        case "systemd":
            options = f"--unit=gpumgr-mps-{uuid}", "--service-type=forking", "--property=KillMode=process"
            return _as_unit(options, shm, environment, command)
        case "host":
            return [*host_prefix(launch), *daemon_command("systemd", uuid, shm, environment, command)]
        case "namespace":
            return ["unshare", "--mount", "--propagation", "slave", "--", "/bin/sh", "-c", _BIND, str(shm), *command]
        case "plain":
            return list(command)


def client_command(launch: LaunchMethod, shm: Path, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Makes a CUDA program run with the daemon's /dev/shm. If the agent is in a pod, the program runs in the pod, since the host may lack
    it."""
    if launch == "systemd":
        return _as_unit((*_WAIT, f"--property=RuntimeMaxSec={_CLIENT_SECONDS}"), shm, environment, command)
    return daemon_command("namespace" if launch == "host" else launch, "", shm, environment, command)


def shm_command(launch: LaunchMethod, shm: Path, *, mounted: bool) -> list[str] | None:
    """The command that mounts a tmpfs of limited size on the host, or unmounts it. None: the folder stays plain."""
    options = f"nosuid,nodev,noexec,mode=1777,size={SHM_BYTES}"
    return host_command(
        launch, ["mount", "-t", "tmpfs", "-o", options, "gpumgr-mps", str(shm)] if mounted else ["umount", str(shm)]
    )


def host_command(launch: LaunchMethod, command: Sequence[str]) -> list[str] | None:
    """Makes `command` run in the mount namespace of the host. None: the agent may not mount."""
    if launch == "plain":
        return None
    before = [*_UNIT, *_WAIT, "--"] if launch == "systemd" else []
    return [*host_prefix(launch), *before, *command]


def _as_unit(options: Sequence[str], shm: Path, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    variables = [f"--setenv={key}={value}" for key, value in environment.items()]
    return [*_UNIT, *options, f"--property=BindPaths={shm}:/dev/shm", *variables, "--", *command]
