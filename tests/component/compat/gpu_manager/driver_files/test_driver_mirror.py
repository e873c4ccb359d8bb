"""The mirror of a node's driver, from a root with a real loader cache to libraries that a process loads."""

import json
import os
import stat
from pathlib import Path

import pytest

from gpumgr.common.errors import DriverFilesError, SettingsError
from gpumgr.compat.gpu_manager.driver_files.manager import DriverFiles
from tests.component.compat.gpu_manager.driver_files.conftest import Mirror
from tests.component.compat.gpu_manager.driver_files.host import (
    CUDA,
    DRIVER,
    MACHINE,
    ML,
    NEXT_DRIVER,
    PTX,
    SHIM,
    Driver,
    call_who,
)
from tests.unit.compat.gpu_manager.driver_files.elves import elf


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every path -> inode, mtime, mode: what changes when a file is touched."""
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {name: (status.st_ino, status.st_mtime_ns, status.st_mode) for name, status in found.items()}


def share_of(files: DriverFiles) -> Path:
    assert files.share_dir is not None, files.share_error
    return files.share_dir


def write_conf(tmp_path: Path, *libraries: str) -> None:
    volumes = [
        {"name": name, "components": {"binaries": ["nvidia-smi"], "libraries": list(libraries)}} for name in ("nvidia", "origin")
    ]
    (tmp_path / "volume.conf").write_text(json.dumps({"volume": volumes}))


async def test_a_share_loads_the_shim_which_finds_the_driver_and_a_whole_gpu_gets_the_driver_unmodified(
    mirror: Mirror, tmp_path: Path, root: Path
) -> None:
    files = await mirror().ensure(DRIVER)
    assert (files.driver_version, files.share_error, files.problems) == (DRIVER, None, ())
    share, whole = tmp_path / "vdriver" / "nvidia", tmp_path / "vdriver" / "origin"
    assert (files.share_dir, files.whole_dir) == (share, whole)
    names = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", f"libcuda.so.{DRIVER}", f"libnvidia-ml.so.{DRIVER}")
    assert call_who(share / "lib64", *names, "libnvidia-ptxjitcompiler.so.1") == [SHIM, SHIM, SHIM, CUDA, ML, PTX]
    assert stat.S_IMODE((share / "bin" / "gpu-client").stat().st_mode) == 0o755
    assert call_who(whole / "lib64", "libcuda.so.1", "libcuda.so", "libnvidia-ml.so") == [CUDA, CUDA, ML]
    assert sorted(os.listdir(whole / "bin")) == ["nvidia-debugdump", "nvidia-smi"]
    assert (whole / "lib64" / f"libcuda.so.{DRIVER}").samefile(root / "usr" / "lib64" / f"libcuda.so.{DRIVER}")
    before = tree(tmp_path / "vdriver")
    assert await mirror().ensure(DRIVER) == files
    assert tree(tmp_path / "vdriver") == before, "what is current is not touched"


async def test_a_new_shim_is_a_new_share_volume_and_the_same_whole_one(mirror: Mirror, driver: Driver) -> None:
    files = await mirror().ensure(DRIVER)
    assert files.whole_dir is not None
    before = share_of(files).resolve(), files.whole_dir.resolve()
    await mirror(library_path=driver.libraries[DRIVER]["libnvidia-ml"]).ensure(DRIVER)
    assert share_of(files).resolve() != before[0]
    assert files.whole_dir.resolve() == before[1]
    assert call_who(share_of(files) / "lib64", "libcuda.so.1") == [ML]


async def test_the_root_with_the_loaded_drivers_libraries_counts(
    mirror: Mirror, tmp_path: Path, root: Path, driver: Driver
) -> None:
    driver.install(tmp_path / "old", NEXT_DRIVER)
    files = await mirror(driver_roots=(tmp_path / "old", root)).ensure(DRIVER)
    assert call_who(share_of(files) / "lib64", f"libcuda.so.{DRIVER}") == [CUDA]
    with pytest.raises(DriverFilesError, match=rf"libcuda\.so\.{DRIVER} for {MACHINE}.*there is .*libcuda\.so\.{NEXT_DRIVER}"):
        await mirror(driver_roots=(tmp_path / "old",)).ensure(DRIVER)


async def test_without_a_shim_no_share_volume_is_offered_and_none_is_changed(mirror: Mirror, tmp_path: Path) -> None:
    files = await mirror(library_path=None).ensure(DRIVER)
    assert files.share_dir is None
    assert (files.share_error or "").startswith("vcuda.library_path is not set")
    assert files.whole_dir is not None
    assert call_who(files.whole_dir / "lib64", "libcuda.so.1") == [CUDA]
    assert not (tmp_path / "vdriver" / "nvidia").exists()

    share = share_of(await mirror().ensure(DRIVER)).resolve()
    assert (await mirror(library_path=None).ensure(DRIVER)).share_dir is None
    assert (tmp_path / "vdriver" / "nvidia").resolve() == share
    assert call_who(share / "lib64", "libcuda.so.1") == [SHIM]


async def test_what_is_wrong_with_the_shim_is_said(mirror: Mirror, tmp_path: Path) -> None:
    async def error(**more: object) -> str:
        return (await mirror(**more).ensure(DRIVER)).share_error or ""

    other = tmp_path / "other.so"
    other.write_bytes(elf("i386"))
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    assert "none.so: No such file" in await error(library_path=tmp_path / "none.so")
    assert "is not a regular file" in await error(library_path=tmp_path)
    assert f"{other} is not a 64-bit little-endian ELF file" in await error(library_path=other)
    assert f"{script} is not an ELF file" in await error(library_path=script)
    assert f"{'00' * 32} is set: put the right file there" in await error(library_sha256="00" * 32)
    assert "vcuda.client_path is not set" in await error(client_path=None)
    assert "vcuda.client_path" in await error(client_path=tmp_path / "none")


async def test_an_installed_client_is_taken_if_none_is_given(mirror: Mirror, root: Path) -> None:
    installed = root / "usr" / "bin" / "gpu-client"
    installed.write_bytes(b"#!/bin/sh\n")
    installed.chmod(0o755)
    assert (share_of(await mirror(client_path=None).ensure(DRIVER)) / "bin" / "gpu-client").read_bytes() == b"#!/bin/sh\n"


async def test_entries_that_catch_nothing_are_problems(mirror: Mirror, tmp_path: Path, root: Path) -> None:
    conf = tmp_path / "volume.conf"
    write_conf(tmp_path, "libcuda.so", "libnvidia-ml.so", "libcuda-control.so", "libnvidia-gone.so")
    assert (await mirror().ensure(DRIVER)).problems == (
        f"{conf}: volume 'nvidia': nothing found below {root} for libnvidia-gone.so",
        f"{conf}: volume 'origin': nothing found below {root} for libcuda-control.so, libnvidia-gone.so",
    )


async def test_a_list_without_the_hijacked_libraries_makes_no_share_volume(mirror: Mirror, tmp_path: Path) -> None:
    write_conf(tmp_path, "libcuda.so")
    files = await mirror().ensure(DRIVER)
    assert files.share_dir is None
    assert f"no libnvidia-ml.so.{DRIVER}" in (files.share_error or "")


async def test_a_list_without_a_volume_for_shares_makes_none(mirror: Mirror, tmp_path: Path) -> None:
    volumes = [{"name": "first", "base": str(tmp_path / "first"), "components": {"libraries": ["libcuda.so"]}}]
    (tmp_path / "volume.conf").write_text(json.dumps({"volume": volumes}))
    files = await mirror().ensure(DRIVER)
    assert (files.share_dir, files.whole_dir) == (None, tmp_path / "vdriver" / "origin")
    assert "has no volume named 'nvidia'" in (files.share_error or "")
    assert not (tmp_path / "first").exists()


async def test_a_list_without_a_volume_for_whole_gpus_makes_none(mirror: Mirror, tmp_path: Path) -> None:
    volume = {"name": "nvidia", "base": str(tmp_path), "components": {"libraries": ["libcuda.so", "libnvidia-ml.so"]}}
    (tmp_path / "volume.conf").write_text(json.dumps({"volume": [volume]}))
    files = await mirror().ensure(DRIVER)
    assert (files.share_dir, files.whole_dir) == (tmp_path / "vdriver" / "nvidia", None)


async def test_containers_get_the_folders_that_the_settings_name(mirror: Mirror, tmp_path: Path) -> None:
    share_dir, whole_dir = tmp_path / "limited" / "gpu", tmp_path / "whole" / "gpu"
    clock = [1_000_000.0]
    mirrored = mirror(share_dir=share_dir, whole_dir=whole_dir, wall_clock=lambda: clock[0])
    files = await mirrored.ensure(DRIVER)
    assert (files.share_dir, files.whole_dir, files.problems) == (share_dir, whole_dir, ())
    assert call_who(share_dir / "lib64", "libcuda.so.1", f"libcuda.so.{DRIVER}") == [SHIM, CUDA]
    assert call_who(whole_dir / "lib64", "libcuda.so.1") == [CUDA]
    assert not (tmp_path / "vdriver").exists()
    clock[0] += 10_000
    assert await mirrored.prune() == (), "what the folders lead to stays"


async def test_two_volumes_in_one_place_are_refused(mirror: Mirror, tmp_path: Path) -> None:
    same = tmp_path / "vdriver" / "nvidia"
    with pytest.raises(SettingsError, match=f"driver_share_dir and container.driver_whole_dir are both {same}: set different"):
        await mirror(whole_dir=same).ensure(DRIVER)
    assert not same.exists()


async def test_a_base_that_cannot_be_written(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DriverFilesError, match=r"can't be mirrored in .*the folder must be writable"):
        await mirror(share_dir=tmp_path / "file" / "nvidia").ensure(DRIVER)
