"""One GPU's folder."""

import os
from pathlib import Path

from gpumgr.enforcement.mps.folders import GpuFolder, Share, gpu_folders, socket_path_bytes


def test_shares_are_kept_and_what_is_unreadable_is_still_named(tmp_path: Path) -> None:
    folder = GpuFolder(tmp_path / "mps/GPU-1")
    assert folder.allocations() == []
    folder.make()
    folder.put("a1", Share(cores=30, memory_bytes=1 << 30))
    folder.put("a1", Share(cores=40, memory_bytes=1 << 30))
    folder.put("b2", Share(cores=1, memory_bytes=1))
    (folder.root / "tenants/b2").write_text("{")
    assert folder.allocations() == ["a1", "b2"]
    assert folder.shares() == {"a1": Share(cores=40, memory_bytes=1 << 30)}
    folder.drop("a1")
    folder.drop("a1")
    assert folder.allocations() == ["b2"]


def test_clients_of_any_user_have_access_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = GpuFolder(tmp_path / "mps/GPU-1")
        folder.make()
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o7777 for path in (folder.root.parent, folder.root, folder.pipe, folder.shm)}
    assert modes == {folder.root.parent: 0o755, folder.root: 0o755, folder.pipe: 0o755, folder.shm: 0o1777}


def test_folders_in_the_pipe_folder_stay_because_containers_have_them_mounted(tmp_path: Path) -> None:
    folder = GpuFolder(tmp_path / "GPU-1")
    folder.make()
    own = folder.namespace("a1")
    own.mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (own / "control").touch()
    (folder.pipe / "control").touch()
    (folder.pipe / "link").symlink_to(outside)
    inode = own.stat().st_ino
    folder.clear_pipe()
    assert [path for path in folder.pipe.rglob("*") if not path.is_dir() or path.is_symlink()] == []
    assert own.stat().st_ino == inode
    assert (outside / "file").exists()


def test_only_gpus_have_folders(tmp_path: Path) -> None:
    (tmp_path / "GPU-1").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "GPU-file").touch()
    assert [uuid for uuid, _ in gpu_folders(tmp_path)] == ["GPU-1"]
    assert list(gpu_folders(tmp_path / "missing")) == []
    assert list(gpu_folders(tmp_path / "GPU-file")) == []


def test_a_folder_that_is_gone_has_nothing_left_to_remove(tmp_path: Path) -> None:
    folder = GpuFolder(tmp_path / "GPU-1")
    folder.make()
    folder.remove()
    folder.remove()
    assert (folder.root.exists(), folder.allocations()) == (False, [])


def test_the_default_place_leaves_room_for_sockets() -> None:
    assert socket_path_bytes(Path("/run/gpumgr/mps")) <= 107
    assert socket_path_bytes(Path("/var/lib/kubelet/plugins/gpumgr/run/mps")) > 107
