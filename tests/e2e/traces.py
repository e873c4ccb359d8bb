"""Removes every trace of a run: containers, mounts, cgroups, sockets, folders. Only what a harness made.

It serves the end of a run and, with the same steps, the start of the next one after a run that was killed.
"""

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from .places import AGENT_STATE, BOOT_ID, CGROUPS, CONTAINER_LOGS, CONTAINERD_SOCKET, DEVICE_PLUGINS, POD_LOGS, STATE
from .processes import end_recorded, kill_and_wait

RECORD = STATE / "processes"
_DEVICES = STATE / "devices.json"
_FRONTEND_MAJOR, _UVM_MAJOR = 195, 511
#: Folders outside STATE that this run made, one a line, parents first.
FOLDERS = STATE / "folders"


class OccupiedError(Exception):
    """Another kubelet lives on this machine: its folder of device plugins is needed."""


def make_devices(gpus: int) -> None:
    """Makes the NVIDIA device nodes that this machine lacks, and remembers them, so that a later run can remove them too."""
    nodes = {f"/dev/nvidia{index}": (_FRONTEND_MAJOR, index) for index in range(gpus)}
    nodes |= {
        "/dev/nvidiactl": (_FRONTEND_MAJOR, 255),
        "/dev/nvidia-uvm": (_UVM_MAJOR, 0),
        "/dev/nvidia-uvm-tools": (_UVM_MAJOR, 1),
    }
    missing = {path: numbers for path, numbers in nodes.items() if not os.path.lexists(path)}
    _DEVICES.write_text(json.dumps(missing))
    for path, numbers in missing.items():
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*numbers))
        os.chmod(path, 0o666)


def _remove_devices() -> None:
    """Unless others have replaced them."""
    for path, numbers in json.loads(_DEVICES.read_text()).items() if _DEVICES.exists() else ():
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(*numbers):
                os.unlink(path)


def claim_folders() -> None:
    """Makes the folders that lie outside STATE and remembers which of them are new."""
    made: list[Path] = []
    for wanted in (DEVICE_PLUGINS, CONTAINER_LOGS, AGENT_STATE):
        made += [path for path in reversed([wanted, *wanted.parents]) if not path.exists()]
        FOLDERS.write_text("".join(f"{path}\n" for path in made))
        wanted.mkdir(parents=True, exist_ok=True)


def check_free() -> None:
    """Raises OccupiedError where a kubelet that is not ours runs, or ran with pods that still do."""
    if not STATE.exists() and (_answers(DEVICE_PLUGINS / "kubelet.sock") or any(_cgroups())):
        raise OccupiedError("this machine has a kubelet of its own; the end-to-end tests need one without")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def remove() -> None:
    """Removes what this run, or a killed one before it, made. Nothing where STATE is missing."""
    if not STATE.exists():
        return
    end_recorded(RECORD)
    _end_containers()
    _unmount()
    _remove_cgroups()
    _remove_devices()
    _remove_links()
    for name in ("kubelet.sock", "kubelet_internal_checkpoint"):
        (DEVICE_PLUGINS / name).unlink(missing_ok=True)
    if FOLDERS.exists():
        for path in reversed([Path(line) for line in FOLDERS.read_text().splitlines()]):
            _remove_folder(path)
    shutil.rmtree(STATE)


def lose_power() -> None:
    """What ends with a node's power, with kubelet and runtime killed before: containers, mounts, cgroups, memory."""
    _end_containers()
    _unmount()
    _remove_cgroups()
    for folder in (STATE / "containerd" / "state", STATE / "runc"):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_folder(path: Path) -> None:
    """Removes a folder that we made: the agent's and the kubelet's with all that is in it, others when empty."""
    if path in (AGENT_STATE, DEVICE_PLUGINS):
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.rmdir()
    except OSError:
        return


def _cgroups() -> Iterator[Path]:
    """The kubelet's tree of cgroups in each hierarchy that is mounted (v1, v2 or both)."""
    for root in (CGROUPS, *CGROUPS.glob("*")):
        if (root / "kubepods").is_dir():
            yield root / "kubepods"


def live_containers(uid: str) -> int:
    """How many of a pod's containers have processes now, the sandbox not counted."""
    with contextlib.suppress(FileNotFoundError):  # the pod's cgroup was removed
        for tree in _cgroups():
            for pod in (*tree.glob(f"pod{uid}"), *tree.glob(f"*/pod{uid}")):
                return max(0, sum(any(_processes(path)) for path in pod.glob("*/cgroup.procs")) - 1)
    return 0


def _processes(path: Path) -> Iterator[int]:
    """What a cgroup.procs names; nothing where the cgroup is removed."""
    with contextlib.suppress(OSError):
        yield from (int(pid) for pid in path.read_text().split() if pid != "0")


def processes_below(folder: Path) -> set[int]:
    """Process ids in a cgroup and in the cgroups below it, which may be removed at the same time."""
    return {pid for group, _, _ in os.walk(folder) for pid in _processes(Path(group) / "cgroup.procs")}


def _shims() -> Iterator[int]:
    """Process ids of the shims of our containerd, identified by the address of its socket."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(CONTAINERD_SOCKET) in words and b"containerd-shim" in words[0]:
            yield int(path.name)


def _shim_sockets() -> Iterator[str]:
    """Paths of their sockets, which containerd 1.6 and 2.x record in files of different names."""
    tasks = "containerd*/state/*runtime.v2.task/k8s.io/*"
    for path in STATE.glob(f"{tasks}/bootstrap.json"):
        yield str(json.loads(path.read_text())["address"]).removeprefix("unix://")
    for path in STATE.glob(f"{tasks}/address"):
        yield path.read_text().removeprefix("unix://")


def _end_containers() -> None:
    sockets = list(_shim_sockets())
    inside = {pid for tree in _cgroups() for pid in processes_below(tree)}
    kill_and_wait([*_shims()])
    kill_and_wait([*inside])
    while (
        late := {pid for tree in _cgroups() for pid in processes_below(tree)} - inside
    ):  # made by one of those at the last moment
        inside |= late
        kill_and_wait([*late])
    for name in sockets:
        Path(name).unlink(missing_ok=True)
    for folder in map(Path, ("/run/containerd/s", "/run/containerd/fifo", "/run/containerd")):
        _remove_folder(folder)


def _unmount() -> None:
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(f"{STATE}/") or mount == str(BOOT_ID):
            subprocess.run(["umount", "--lazy", mount], check=False, stderr=subprocess.DEVNULL)


def _remove_cgroups() -> None:
    """Again and again for a while: a process that was killed stays in its cgroup until it is gone."""
    deadline = time.monotonic() + 30
    while any(_cgroups()):
        for tree in _cgroups():
            for folder, _, _ in os.walk(tree, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _remove_links() -> None:
    for link in CONTAINER_LOGS.glob("*.log"):
        if link.is_symlink() and os.readlink(link).startswith(f"{POD_LOGS}/"):
            link.unlink()
