"""Cgroup trees in temporary folders, read as those of a node."""

import os
import shutil
from pathlib import Path
from typing import Literal

import pytest

from gpumgr.common.errors import CriError
from gpumgr.runtime.cgroups import Cgroups, Hierarchy, container_id_in, parse_hierarchy
from tests.component.runtime.cri.node import UID, Node, container_id

Mode = Literal["v1", "v2", "hybrid"]
MODES: tuple[Mode, ...] = ("v1", "v2", "hybrid")
ID = container_id(7)
CGROUP = f"/kubepods/burstable/pod{UID}/{ID}"


@pytest.mark.parametrize("mode", MODES)
def test_all_processes_below_are_found_in_order(tmp_path: Path, mode: Mode) -> None:
    node = Node(tmp_path, mode)
    assert node.cgroups.hierarchy() == Hierarchy(mode=mode, root=node.memory)
    node.process(900, CGROUP)
    node.process(12, CGROUP)
    node.process(1000, f"{CGROUP}/docker/{container_id(8)}")
    node.process(77, f"{CGROUP}/system.slice/ssh.service")
    node.process(5, f"/kubepods/burstable/pod{UID}/{container_id(9)}")
    assert node.cgroups.pids(CGROUP) == (12, 77, 900, 1000)


@pytest.mark.parametrize("mode", MODES)
def test_a_processs_container_is_found(tmp_path: Path, mode: Mode) -> None:
    node = Node(tmp_path, mode)
    node.process(1000, f"{CGROUP}/deeper")
    assert container_id_in(node.cgroups.path_of(1000) or "") == ID
    assert node.cgroups.pid_in_container_of(1000) == 0
    node.process(1013, "/system.slice/sshd.service")
    assert container_id_in(node.cgroups.path_of(1013) or "") is None
    assert node.cgroups.pid_in_container_of(1013) == 13
    assert node.cgroups.path_of(4711) is None, "it is gone"
    assert node.cgroups.pid_in_container_of(4711) is None


def test_a_carriage_return_in_a_name_forges_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.process(12, CGROUP)
    forged = f"0::{CGROUP}/x\r0:memory:/kubepods/pod{UID}/{container_id(1)}\n"
    (node.proc / "12" / "cgroup").write_bytes(forged.encode() + b"1:name=\xff:/\n")
    (node.proc / "12" / "status").write_bytes(b"Name:\tx\rNSpid:\t1\nNSpid:\t12\t3\n")
    assert container_id_in(node.cgroups.path_of(12) or "") == ID
    assert node.cgroups.pid_in_container_of(12) == 3


def test_this_machines_own_process_is_read() -> None:
    cgroups = Cgroups(Path("/sys/fs/cgroup"))
    assert cgroups.pid_in_container_of(os.getpid()) is not None


def test_a_cgroup_that_is_gone_has_no_processes(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.cgroups.pids(CGROUP) == ()
    node.process(12, f"{CGROUP}/a")
    (node.memory / CGROUP.lstrip("/") / "between").mkdir()
    assert node.cgroups.pids(CGROUP) == (12,)


def test_processes_of_unseen_namespaces_and_doubles_are_left_out(tmp_path: Path) -> None:
    node = Node(tmp_path, "v1")
    node.process(12, CGROUP)
    (node.memory / CGROUP.lstrip("/") / "cgroup.procs").write_text("0\n30\n12\n30\n0\n")
    assert node.cgroups.pids(CGROUP) == (12, 30)


def test_a_path_never_leads_out_of_the_hierarchy(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.process(12, CGROUP)
    assert node.cgroups.pids(f"/kubepods/../kubepods/burstable/pod{UID}/{ID}") == ()


def test_without_a_hierarchy_the_setting_is_named(tmp_path: Path) -> None:
    node = Node(tmp_path)
    wrong = Cgroups(tmp_path / "elsewhere", node.proc)
    with pytest.raises(CriError, match=r"no cgroup hierarchy that counts memory.*elsewhere; set cri\.cgroup_root to where"):
        wrong.pids(CGROUP)


def test_a_root_or_a_cgroup_that_can_not_be_read_is_an_error(tmp_path: Path) -> None:
    node = Node(tmp_path)
    procs = node.memory / CGROUP.lstrip("/") / "cgroup.procs"
    procs.mkdir(parents=True)
    with pytest.raises(CriError, match=r"can't read .*cgroup\.procs: Is a directory; run gpumgr as root"):
        node.cgroups.pids(CGROUP)
    shutil.rmtree(node.root)
    with pytest.raises(CriError, match=r"can't read .*cgroup root: No such file.* host's cgroups at cri\.cgroup_root"):
        node.cgroups.pids(CGROUP)
    node.root.touch()
    with pytest.raises(CriError, match=r"can't read .*cgroup root: Not a directory.*cri\.cgroup_root"):
        node.cgroups.pids(CGROUP)


def test_without_proc_the_error_names_proc(tmp_path: Path) -> None:
    with pytest.raises(CriError, match=r"can't read .*/nowhere/mounts: No such file or directory; mount proc there"):
        Cgroups(tmp_path, tmp_path / "nowhere").hierarchy()


def test_a_root_behind_a_link_is_followed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "link").symlink_to(node.root)
    assert Cgroups(tmp_path / "link", node.proc).hierarchy() == Hierarchy(mode="v2", root=node.memory)


@pytest.mark.parametrize(
    ("mounts", "hierarchy"),
    [
        ("", None),
        ("tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n", None),
        ("cgroup2 /sys/fs/cgroup2 cgroup2 rw 0 0\n", None),
        ("short line\ncgroup2 /sys/fs/cgroup\n", None),
        ("none /sys/fs/cgroup cgroup rw,cpuset,cpu,memory 0 0\n", Hierarchy(mode="v1", root=Path("/sys/fs/cgroup"))),
        (
            "cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n",
            Hierarchy(mode="hybrid", root=Path("/sys/fs/cgroup/unified")),
        ),
    ],
)
def test_mounts_are_read(mounts: str, hierarchy: Hierarchy | None) -> None:
    assert parse_hierarchy(mounts, Path("/sys/fs/cgroup")) == hierarchy


@pytest.mark.parametrize("mode", MODES)
def test_the_memory_that_the_limits_leave_is_that_of_the_tightest_one(tmp_path: Path, mode: Mode) -> None:
    node = Node(tmp_path, mode)
    assert node.cgroups.memory_left(CGROUP) is None
    node.process(900, CGROUP)
    names = ("memory.max", "memory.current") if mode == "v2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    cache = "inactive_file" if mode == "v2" else "total_inactive_file"
    folder = node.memory / CGROUP.lstrip("/")
    for place, limit, used, cached in (
        (folder, 1000, 700, 100),
        (folder.parent, 5000, 4900, 50),
        (folder.parents[1], 9000, 1, 0),
    ):
        for name, value in zip(names, (limit, used), strict=True):
            (place / name).write_text(f"{value}\n")
        (place / "memory.stat").write_text(f"anon 5\n{cache} {cached}\n")
    assert node.cgroups.memory_left(CGROUP) == 150
    (folder.parent / names[0]).write_text("max\n" if mode == "v2" else f"{1 << 62}\n")
    assert node.cgroups.memory_left(CGROUP) == 400
