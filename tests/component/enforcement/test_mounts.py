"""What processes have mounted, and the mounts of regions. As root they are the kernel's, in a mount namespace with the host's mounts; else
a folder like /proc is read, and only what is done without mounts is tested."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpumgr.enforcement import container_files
from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.container_processes import mounted_names
from gpumgr.enforcement.hami_core import layout
from tests.component.enforcement.hami_core.harness import ID, make_backend, region_of, tenant
from tests.component.enforcement.tracing import look
from tests.libvgpu import build


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


# -- mounts of regions --------------------------------------------------------------------------------------------------------


HOST = os.geteuid() == 0 and Path("/proc/self/mountinfo").read_text() == Path("/proc/1/mountinfo").read_text()
mounts = pytest.mark.skipif(not HOST, reason="needs root in the host's mount namespace")


def there(folder: Path, file: Path) -> tuple[bool, bool]:
    """Whether the folder is a mount, and whether the file exists."""
    return folder.is_mount(), os.path.lexists(file)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of one container; what is mounted there is unmounted."""
    made = tmp_path / "run" / "hami-core" / ID
    made.mkdir(parents=True)
    yield made
    BoundedFolders().remove(made)


@mounts
def test_a_container_takes_no_more_than_its_own_room(folder: Path) -> None:
    BoundedFolders().renew(folder)
    (folder / "region.cache").write_bytes(bytes(layout.FILE_BYTES))
    with pytest.raises(OSError, match="No space left"), (folder / "region.cache").open("ab") as file:
        file.write(bytes(1 << 20))


@mounts
def test_each_start_has_an_empty_one_and_the_former_container_keeps_its_file(folder: Path) -> None:
    volumes = BoundedFolders()
    volumes.renew(folder)
    (folder / "region.cache").write_text("former")
    with (folder / "region.cache").open() as kept:
        volumes.renew(folder)
        assert os.listdir(folder) == []
        assert kept.read() == "former"
    assert Path("/proc/self/mountinfo").read_text().count(f"{folder} ") == 1


@pytest.fixture
def own_name(folder: Path) -> Iterator[Path]:
    """Tests that run at the same time see one another's mounts, so this folder has a name of its own."""
    made = folder.with_name(f"{os.getpid():016x}")
    made.mkdir()
    yield made
    BoundedFolders().remove(made)


@mounts
def test_a_file_in_a_container_shows_that_it_lives(own_name: Path) -> None:
    BoundedFolders().renew(own_name)
    (own_name / "region.cache").touch()
    assert mounted_names([own_name.name]) == frozenset()
    command = f"mount --bind {own_name}/region.cache /etc/hostname && echo there && read line"
    pipe = subprocess.PIPE
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", command], stdin=pipe, stdout=pipe, text=True) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "there\n"
        BoundedFolders().remove(own_name)  # a restart of the agent, or another start, does not hide it
        assert mounted_names([own_name.name]) == {own_name.name}
        container.communicate("\n")
    assert mounted_names([own_name.name]) == frozenset()


@mounts
async def test_a_restarted_agent_takes_over_and_removes_it(tmp_path: Path, folder: Path) -> None:
    library = tmp_path / "libvgpu.so"
    build(library)
    for act in ("start", "recover", "cleanup"):
        backend = make_backend(tmp_path, library, volumes=BoundedFolders())
        if act == "start":
            await backend.start(tenant())
        elif act == "recover":
            await backend.recover([tenant()])
        else:
            await backend.cleanup(ID)
        assert there(folder, region_of(tmp_path)) == (act != "cleanup", act != "cleanup")
        await backend.close()
    assert there(folder, folder) == (False, False)


def test_without_the_right_to_mount_the_folder_stays_plain_and_that_is_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("the agent may not mount")

    monkeypatch.setattr(container_files, "_call", refuse)
    monkeypatch.setattr(container_files, "_ask_systemd", refuse)
    volumes = BoundedFolders()
    with capture_logs() as lines:
        volumes.renew(folder)
        volumes.renew(folder)
    assert [(line["event"], line["reason"]) for line in lines] == [("container_files_not_bounded", "the agent may not mount")]
    assert not folder.is_mount()


def test_in_a_sandbox_systemd_mounts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(container_files, "_call", lambda *_: (_ for _ in ()).throw(PermissionError("not permitted")))
    monkeypatch.setattr(container_files, "_ask_systemd", lambda *command: asked.append(command[0]))
    BoundedFolders().renew(folder)
    assert asked == ["mount"]
