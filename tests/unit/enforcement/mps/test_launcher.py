"""How daemons and trial clients are started, and their shared memory mounted."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpumgr.enforcement.mps import launcher
from gpumgr.enforcement.mps.launcher import LaunchMethod

SHM = Path("/run/gpumgr/mps/GPU-1/shm")
COMMAND = ("/usr/bin/nvidia-cuda-mps-control", "-d")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "GPU-1"}
ENTER = ["nsenter", "--target", "1", "--mount", "--"]
UNIT = ["systemd-run", "--quiet", "--collect"]
BIND = f"--property=BindPaths={SHM}:/dev/shm"
SET = "--setenv=CUDA_VISIBLE_DEVICES=GPU-1"
SERVICE = [*UNIT, "--unit=gpumgr-mps-GPU-1", "--service-type=forking", "--property=KillMode=process", BIND, SET, "--", *COMMAND]
OWN_MOUNTS = ["unshare", "--mount", "--propagation", "slave", "--", "/bin/sh", "-c", launcher._BIND, str(SHM), *COMMAND]
WAITING = [*UNIT, "--wait", "--pipe"]
MOUNT = ["mount", "-t", "tmpfs", "-o", "nosuid,nodev,noexec,mode=1777,size=1073741824", "gpumgr-mps", str(SHM)]


@pytest.mark.parametrize(
    ("method", "daemon", "client", "before_mount"),
    [
        ("systemd", SERVICE, [*WAITING, "--property=RuntimeMaxSec=60", BIND, SET, "--", *COMMAND], [*WAITING, "--"]),
        ("host", [*ENTER, *SERVICE], OWN_MOUNTS, ENTER),
        ("namespace", OWN_MOUNTS, OWN_MOUNTS, []),
        ("plain", [*COMMAND], [*COMMAND], None),  # without root nothing is mounted
    ],
)
def test_commands_of_each_method(
    method: LaunchMethod, daemon: list[str], client: list[str], before_mount: Sequence[str] | None
) -> None:
    assert launcher.daemon_command(method, "GPU-1", SHM, ENVIRONMENT, COMMAND) == daemon
    assert launcher.client_command(method, SHM, ENVIRONMENT, COMMAND) == client
    mount, unmount = (launcher.shm_command(method, SHM, mounted=mounted) for mounted in (True, False))
    assert mount == (None if before_mount is None else [*before_mount, *MOUNT])
    assert unmount == (None if before_mount is None else [*before_mount, "umount", str(SHM)])


def test_from_a_pod_daemons_are_started_on_the_host() -> None:
    assert launcher.best_method(in_pod=True) == "host"
    assert [*launcher.host_prefix("host")] == ENTER
    assert launcher.host_prefix("plain") == ()
