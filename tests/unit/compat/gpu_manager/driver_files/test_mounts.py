"""Versions that processes have mounted."""

import os
from pathlib import Path

import pytest

from gpumgr.common.errors import DriverFilesError
from gpumgr.compat.gpu_manager.driver_files.manager import versions_in, versions_in_use

LINES = """22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
90 22 254:0 /etc/gpu-manager/vdriver/.versions/aa11/nvidia /usr/local/nvidia ro,relatime master:1 - ext4 /dev/vda rw
91 22 254:1 /@/vdriver/.versions/bb22.damaged/origin//deleted /usr/local/nvidia ro - btrfs /dev/vdb rw
92 22 0:40 / /mnt/.versions/cc33/nvidia rw - tmpfs tmpfs rw
short line
"""


def process(proc: Path, pid: int, namespace: str, mountinfo: str | None) -> None:
    (proc / str(pid) / "ns").mkdir(parents=True)
    (proc / str(pid) / "ns" / "mnt").symlink_to(namespace)
    if mountinfo is not None:
        (proc / str(pid) / "mountinfo").write_text(mountinfo)


def test_all_processes_are_read_even_if_one_ends(tmp_path: Path) -> None:
    process(tmp_path, 1, "mnt:[1]", "1 1 0:1 / / rw - ext4 a rw\n")
    process(tmp_path, 7, "mnt:[2]", None)
    process(tmp_path, 8, "mnt:[2]", LINES)
    process(tmp_path, 9, "mnt:[3]", "1 1 0:1 /x/.versions/dd44/nvidia /usr/local/nvidia ro - ext4 a rw\n")
    (tmp_path / "10").mkdir()
    (tmp_path / "sys").mkdir()
    assert versions_in_use(tmp_path) == {"aa11", "bb22.damaged", "dd44"}


def test_the_kernels_own_files_can_be_read() -> None:
    process_mounts = Path(f"/proc/{os.getpid()}/mountinfo").read_text()
    assert versions_in(process_mounts) == frozenset()


def test_a_process_that_hides_its_mounts_is_an_error(tmp_path: Path) -> None:
    process(tmp_path, 1, "mnt:[1]", None)
    (tmp_path / "1" / "mountinfo").mkdir()
    with pytest.raises(DriverFilesError, match="1/mountinfo: Is a directory; the agent must run as root"):
        versions_in_use(tmp_path)


def test_a_proc_that_hides_processes_is_an_error(tmp_path: Path) -> None:
    process(tmp_path, 5, "mnt:[1]", LINES)
    with pytest.raises(DriverFilesError, match="the processes of others are hidden"):
        versions_in_use(tmp_path)


def test_mounts_of_a_process_whose_namespace_is_hidden_count(tmp_path: Path) -> None:
    for pid in (1, 4):
        process(tmp_path, pid, "mnt:[1]", LINES.replace("aa11", f"aa1{pid}"))
        (tmp_path / str(pid) / "ns" / "mnt").unlink()
    assert {"aa11", "aa14"} <= versions_in_use(tmp_path)
