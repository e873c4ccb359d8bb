"""Whether a process has mounted an allocation's folder, from the kernel's mountinfo."""

import os
import subprocess
from pathlib import Path

from gpumgr.enforcement.container_processes import has_mounted
from tests.unit.compat.gpu_manager.vcuda.tenants import ALLOCATION

#: A container's, shortened: the folder lies on the root's file system; another mount bears the name in its source only.
TABLE = f"""\
22 1 0:30 / / rw - overlay overlay rw,lowerdir=/a
23 22 254:1 /etc/gpu-manager/vm/{{name}} /etc/vcuda ro,relatime shared:1 - ext4 /dev/vda1 rw
24 22 0:40 / /x rw - tmpfs {ALLOCATION} rw
25 22
"""


def process(proc: Path, number: int, table: str) -> None:
    (proc / str(number)).mkdir(parents=True)
    (proc / str(number) / "mountinfo").write_text(table)


def test_the_mounts_name_the_folder(tmp_path: Path) -> None:
    process(tmp_path, 7, TABLE.format(name=ALLOCATION))
    process(tmp_path, 8, TABLE.format(name="0" * 16))
    process(tmp_path, 9, TABLE.format(name=f"{ALLOCATION}/below"))
    process(tmp_path, 10, "")
    assert [has_mounted(pid, ALLOCATION, tmp_path) for pid in (7, 8, 9, 10)] == [True, False, False, False]


def test_who_is_gone_has_nothing(tmp_path: Path) -> None:
    assert not has_mounted(7, ALLOCATION, tmp_path)


def test_a_real_mount_of_a_real_process(tmp_path: Path) -> None:
    """In a mount namespace of its own; without the right to make one, in a user's."""
    folder = tmp_path / ALLOCATION
    folder.mkdir()
    script = f"mount --bind {folder} /mnt && echo ready && read line"
    rights = ["-m"] if os.geteuid() == 0 else ["-rm"]
    with subprocess.Popen(["unshare", *rights, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        if child.stdout.readline() == b"ready\n":  # some hosts give users no namespaces; the tables above replace it there
            assert has_mounted(child.pid, ALLOCATION)
            assert not has_mounted(child.pid, "0" * 16)
        child.stdin.close()
    assert not has_mounted(os.getpid(), ALLOCATION)
