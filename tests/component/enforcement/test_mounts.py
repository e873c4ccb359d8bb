"""Mounted folders of processes: read from the kernel with and without the right to trace, as root; else from a folder like /proc."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumgr.enforcement.container_processes import mounted_names
from tests.component.enforcement.tracing import look

ID = "00112233445566ff"


def process(proc: Path, pid: int, *, mounts: str = "", namespace: str | None = None) -> Path:
    """A process in a folder like /proc; without `namespace` one that may not be traced. Returns its mountinfo."""
    folder = proc / str(pid)
    (folder / "ns").mkdir(parents=True)
    if namespace is not None:
        (folder / "ns" / "mnt").symlink_to(namespace)
    (folder / "mountinfo").write_text(f"1 2 0:1 {mounts or '/'} /etc/vcuda ro - ext4 /dev/x rw\n")
    return folder / "mountinfo"


def see_the_kernels(folder: Path) -> None:
    tenants = folder / ID
    tenants.mkdir()
    for rights in (["SYS_PTRACE"], []):
        assert look(tenants, rights).stdout.split() == [ID]
    for hidepid in ("noaccess", "ptraceable"):
        assert look(tenants, ["SYS_PTRACE"], hidepid=hidepid).stdout.split() == [ID]
        blind = look(tenants, [], hidepid=hidepid)
        assert (blind.stdout, "PermissionError" in blind.stderr) == ("", True)


def see_a_folders(proc: Path) -> None:
    process(proc, 1, namespace="mnt:[1]")
    closed = process(proc, 2, mounts=f"/vm/{ID}")
    assert mounted_names([ID], proc) == {ID}
    closed.chmod(0)
    with pytest.raises(PermissionError):
        mounted_names([ID], proc)


@pytest.mark.parametrize("see", [see_the_kernels if os.geteuid() == 0 else see_a_folders])
def test_what_may_not_be_traced_is_read_all_the_same_and_what_is_hidden_is_an_error(
    see: Callable[[Path], None], tmp_path: Path
) -> None:
    see(tmp_path)


def test_who_ended_is_passed_over(tmp_path: Path) -> None:
    process(tmp_path, 1, namespace="mnt:[1]")
    for pid in (2, 3):
        (tmp_path / str(pid)).mkdir()
    assert mounted_names([ID], tmp_path) == frozenset()
    process(tmp_path, 4, namespace="mnt:[2]", mounts=f"/vm/{ID}")
    assert mounted_names([ID, "0" * 16], tmp_path) == {ID}


def test_the_hosts_own_mount_of_a_file_system_does_not_count_and_a_file_of_it_does(tmp_path: Path) -> None:
    host, tenant = process(tmp_path, 1, namespace="mnt:[1]"), process(tmp_path, 2, namespace="mnt:[2]")
    host.write_text(f"1 2 0:1 / /run/gpumgr/hami-core/{ID} rw - tmpfs gpumgr-{ID} rw\n")
    assert mounted_names([ID], tmp_path) == frozenset()
    tenant.write_text(f"1 2 0:1 /region.cache /tmp/cudevshr.cache rw - tmpfs gpumgr-{ID} rw\n")
    assert mounted_names([ID], tmp_path) == {ID}


def test_a_proc_without_the_first_process_hides_the_others(tmp_path: Path) -> None:
    process(tmp_path, 7, namespace="mnt:[7]")
    with pytest.raises(PermissionError, match="the processes of others are hidden"):
        mounted_names([ID], tmp_path)
