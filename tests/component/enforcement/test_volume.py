"""Mounts of regions, as root in a mount namespace with the mounts of the host; else only what is done without them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpumgr.enforcement import container_files
from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.container_processes import mounted_names
from gpumgr.enforcement.hami_core import layout
from tests.component.enforcement.hami_core.harness import ID, make_backend, region_of, tenant
from tests.libvgpu import build

HOST = os.geteuid() == 0 and Path("/proc/self/mountinfo").read_text() == Path("/proc/1/mountinfo").read_text()
mounts = pytest.mark.skipif(not HOST, reason="needs root in the host's mount namespace")


def mounted(path: Path) -> bool:
    return path.is_mount()


def present(path: Path) -> bool:
    return os.path.lexists(path)


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
        match act:
            case "start":
                await backend.start(tenant())
            case "recover":
                await backend.recover([tenant()])
            case _:
                await backend.cleanup(ID)
        assert (mounted(folder), present(region_of(tmp_path))) == (act != "cleanup", act != "cleanup")
        await backend.close()
    assert not present(folder)


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
