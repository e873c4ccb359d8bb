"""Versions of the mirror: created beside the old ones, switched atomically, kept while a container uses them."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from gpumgr.common.errors import DriverFilesError
from gpumgr.compat.gpu_manager.driver_files.discovery import inspect
from gpumgr.compat.gpu_manager.driver_files.mirror import build, prune, switch
from gpumgr.compat.gpu_manager.driver_files.volumes import VolumePlan, plan_volume
from tests.component.compat.gpu_manager.driver_files.conftest import Mirror
from tests.component.compat.gpu_manager.driver_files.host import (
    CUDA,
    DRIVER,
    MACHINE,
    NEXT_CUDA,
    NEXT_DRIVER,
    SHIM,
    Driver,
    call_who,
)

_HOLDER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    print(library.who(), ctypes.CDLL(line.strip()).who(), flush=True)
"""


def plan_of(folder: Path) -> VolumePlan:
    libraries = [inspect(path, path.name) for path in sorted(folder.iterdir()) if not path.is_symlink()]
    return plan_volume("origin", libraries=libraries, binaries=[], machine=MACHINE, driver_version=DRIVER)


def library_in(folder: Path, content: bytes | Path) -> Path:
    folder.mkdir(exist_ok=True)
    target = folder / "libnvcuvid.so.1"
    target.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return target


@pytest.fixture
def other_file_system() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpumgr-test-", dir="/dev/shm") as name:
        yield Path(name)


def mount(proc: Path, version: Path) -> None:
    """A process of a container that has the version mounted."""
    (proc / "77" / "ns").mkdir(parents=True)
    (proc / "77" / "ns" / "mnt").symlink_to("mnt:[77]")
    (proc / "77" / "mountinfo").write_text(f"90 22 254:0 {version} /usr/local/nvidia ro,relatime - ext4 /dev/vda rw\n")


async def test_a_process_keeps_its_version_through_a_new_driver(mirror: Mirror, root: Path, proc: Path, driver: Driver) -> None:
    clock = [1_000_000.0]
    mirrored = mirror(wall_clock=lambda: clock[0])
    share = (await mirrored.ensure(DRIVER)).share_dir
    assert share is not None
    old = share.resolve()
    mount(proc, old)
    command = [sys.executable, "-c", _HOLDER, str(old / "lib64" / "libcuda.so.1")]
    holder = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"ready\n"
    driver.install(root, NEXT_DRIVER)
    await mirrored.ensure(NEXT_DRIVER)
    clock[0] += 10_000
    removed = await mirrored.prune(grace_seconds=60)
    # It can still call what it has, and load what it has not yet.
    said, _ = await holder.communicate(f"{old}/lib64/libcuda.so.{DRIVER}\n".encode())
    assert said == f"{SHIM} {CUDA}\n".encode()
    assert len(removed) == 1, "the old version of the other volume, which no process has mounted"
    assert call_who(share / "lib64", "libcuda.so.1", f"libcuda.so.{NEXT_DRIVER}") == [SHIM, NEXT_CUDA]

    shutil.rmtree(proc / "77")
    assert await mirrored.prune(grace_seconds=60) == (), "it was in use a moment ago"
    clock[0] += 61
    assert await mirrored.prune(grace_seconds=60) == (old.parent.name,)
    assert not old.exists()
    assert call_who(share / "lib64", "libcuda.so.1") == [SHIM]


async def test_nothing_is_removed_while_mounts_cannot_be_seen(mirror: Mirror, proc: Path, root: Path, driver: Driver) -> None:
    mirrored = mirror(wall_clock=lambda: 9e9)
    await mirrored.ensure(DRIVER)
    driver.install(root, NEXT_DRIVER)
    share = (await mirrored.ensure(NEXT_DRIVER)).share_dir
    assert share is not None
    (proc / "5" / "ns").mkdir(parents=True)
    (proc / "5" / "ns" / "mnt").symlink_to("mnt:[5]")
    (proc / "5" / "mountinfo").mkdir()
    versions = sorted(os.listdir(share.parent / ".versions"))
    with pytest.raises(
        DriverFilesError,
        match=r"can't read the mounts of all processes: .*/5/mountinfo: Is a directory; the agent must",
    ):
        await mirrored.prune(grace_seconds=0)
    assert sorted(os.listdir(share.parent / ".versions")) == versions


async def test_gpu_managers_folder_is_set_aside_once(mirror: Mirror, tmp_path: Path) -> None:
    old = tmp_path / "vdriver" / "nvidia" / "lib64"
    old.mkdir(parents=True)
    (old / "libcuda.so.1").write_text("theirs")
    with structlog.testing.capture_logs() as lines:
        await mirror().ensure(DRIVER)
        await mirror().ensure(DRIVER)
    kept = tmp_path / "vdriver" / "nvidia.gpu-manager"
    assert [line["kept"] for line in lines if line["event"] == "driver_folder_set_aside"] == [str(kept)]
    assert (kept / "lib64" / "libcuda.so.1").read_text() == "theirs"
    assert (tmp_path / "vdriver" / "nvidia").is_symlink()


def test_an_update_may_be_cut_off_at_every_step(tmp_path: Path, driver: Driver) -> None:
    library_in(tmp_path / "old", driver.shim)
    library_in(tmp_path / "new", driver.libraries[DRIVER]["libcuda"])
    command = [
        sys.executable,
        "-m",
        "tests.component.compat.gpu_manager.driver_files.crash",
        str(tmp_path),
        str(tmp_path / "work"),
        MACHINE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 15


def test_a_damaged_version_is_made_anew_and_the_old_one_kept(tmp_path: Path, driver: Driver) -> None:
    library_in(tmp_path / "lib", driver.shim)
    base = tmp_path / "base"
    drawn = plan_of(tmp_path / "lib")
    assert build(drawn, base)
    assert not build(drawn, base)
    place = base / ".versions" / drawn.version
    (place / "origin" / "lib64" / "libnvcuvid.so.1").unlink()
    with structlog.testing.capture_logs() as lines:
        assert build(drawn, base)
    assert [line["event"] for line in lines] == ["driver_files_damaged"]
    assert call_who(place / "origin" / "lib64", "libnvcuvid.so.1") == [SHIM]
    assert (base / ".versions" / f"{drawn.version}.damaged").is_dir()


def test_where_no_hard_link_can_be_it_copies(tmp_path: Path, other_file_system: Path, driver: Driver) -> None:
    source = library_in(other_file_system, driver.shim)
    source.chmod(0o640)
    drawn = plan_of(other_file_system)
    build(drawn, tmp_path)
    switch(drawn, tmp_path / "origin", now_seconds=0.0)
    copy = tmp_path / "origin" / "lib64" / source.name
    assert copy.stat().st_ino != source.stat().st_ino or copy.stat().st_dev != source.stat().st_dev
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_mode & 0o7777 == 0o644


def test_a_program_with_more_rights_is_copied_without_them(tmp_path: Path, driver: Driver) -> None:
    source = library_in(tmp_path / "lib", driver.shim)
    source.chmod(0o4755)
    drawn = plan_of(tmp_path / "lib")
    build(drawn, tmp_path / "base")
    copy = tmp_path / "base" / ".versions" / drawn.version / "origin" / "lib64" / source.name
    assert copy.stat().st_mode & 0o7777 == 0o755
    assert not copy.samefile(source)


def test_a_file_that_changes_while_it_is_mirrored_stops_the_build(tmp_path: Path, driver: Driver) -> None:
    source = library_in(tmp_path / "lib", driver.shim)
    drawn = plan_of(tmp_path / "lib")
    source.write_bytes(driver.shim.read_bytes() + b"more")
    with pytest.raises(DriverFilesError, match="changed while it was mirrored"):
        build(drawn, tmp_path / "base")
    assert os.listdir(tmp_path / "base" / ".versions") == []


def test_half_removed_versions_are_removed_and_a_mirror_that_was_never_made_has_none(tmp_path: Path) -> None:
    assert prune(tmp_path / "none", (), grace_seconds=0, now_seconds=0) == ()
    (tmp_path / ".versions" / ".removing-abc" / "origin").mkdir(parents=True)
    prune(tmp_path, (), grace_seconds=1e12, now_seconds=0)
    assert os.listdir(tmp_path / ".versions") == []


@pytest.mark.parametrize("mask", [0o077, 0o022])
def test_folders_are_open_to_all_with_any_umask(tmp_path: Path, driver: Driver, mask: int) -> None:
    library_in(tmp_path / "lib", driver.shim)
    drawn = plan_of(tmp_path / "lib")
    before = os.umask(mask)
    try:
        build(drawn, tmp_path / "base")
    finally:
        os.umask(before)
    version = tmp_path / "base" / ".versions" / drawn.version
    assert {path.stat().st_mode & 0o777 for path in (version, *version.rglob("*")) if path.is_dir()} == {0o755}
