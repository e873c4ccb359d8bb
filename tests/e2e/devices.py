"""Fake NVIDIA device nodes, for a machine that has none. What exists is never touched."""

import json
import os
import stat
from pathlib import Path

FRONTEND_MAJOR = 195
UVM_MAJOR = 511


def _wanted(gpus: int) -> dict[str, tuple[int, int]]:
    nodes = {f"/dev/nvidia{index}": (FRONTEND_MAJOR, index) for index in range(gpus)}
    return nodes | {
        "/dev/nvidiactl": (FRONTEND_MAJOR, 255),
        "/dev/nvidia-uvm": (UVM_MAJOR, 0),
        "/dev/nvidia-uvm-tools": (UVM_MAJOR, 1),
    }


def make_devices(gpus: int, record: Path) -> None:
    """Makes the nodes that are missing; `record` remembers them, so that a later run can remove them too."""
    wanted = {path: numbers for path, numbers in _wanted(gpus).items() if not os.path.lexists(path)}
    record.write_text(json.dumps(wanted))
    for path, (major, minor) in wanted.items():
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(path, 0o666)


def remove_devices(record: Path) -> None:
    """Removes the nodes that `record` remembers, unless others have replaced them."""
    if not record.exists():
        return
    for path, numbers in json.loads(record.read_text()).items():
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(*numbers):
            os.unlink(path)
    record.unlink()
