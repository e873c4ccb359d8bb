"""One GPU's folder and its record, and the node's protocol."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from gpumgr.common.errors import MpsError
from gpumgr.enforcement.mps.commands import ControlFeatures, MpsProtocol, ProtocolSetting, choose_protocol
from gpumgr.enforcement.mps.folders import (
    DaemonRecords,
    GpuFolder,
    Record,
    Share,
    gpu_folders,
    read_protocol,
    read_record,
    socket_path_bytes,
    write_protocol,
)


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


def test_a_folder_that_is_gone_has_nothing_left_to_remove(tmp_path: Path) -> None:
    folder = GpuFolder(tmp_path / "GPU-1")
    folder.drop("a1")
    folder.remove()
    assert folder.allocations() == []


def test_the_default_place_leaves_room_for_sockets() -> None:
    assert socket_path_bytes(Path("/run/gpumgr/mps")) <= 107
    assert socket_path_bytes(Path("/var/lib/kubelet/plugins/gpumgr/run/mps")) > 107


UUID = "GPU-0fe1c342"


def test_a_record_is_kept_over_restarts_until_it_is_dropped(tmp_path: Path) -> None:
    records = DaemonRecords(tmp_path)
    records.begin(UUID, Path("/run/a"))
    records.set_former_mode(UUID, 2)
    again = DaemonRecords(tmp_path)
    assert [(record.folder, record.former_mode) for uuid in again.uuids() if (record := again.of(uuid))] == [("/run/a", 2)]
    for _ in range(2):
        again.drop(UUID)
    assert (again.uuids(), DaemonRecords(tmp_path).uuids()) == ([], [])


def test_a_boot_ends_what_was_before(tmp_path: Path) -> None:
    DaemonRecords(tmp_path).begin(UUID, Path("/run/a"), former_mode=0)
    path = tmp_path / UUID
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot": "another"}))
    records = DaemonRecords(tmp_path)
    assert records.of(UUID) is None
    records.begin(UUID, Path("/run/b"))
    record = DaemonRecords(tmp_path).of(UUID)
    assert record is not None
    assert (record.folder, record.former_mode) == ("/run/b", None)


SHARE = Share(cores=30, memory_bytes=4 << 30, older=(((17, 345), 8 << 30),))
#: Each record, and its file as this version writes it.
WRITTEN: dict[msgspec.Struct, str] = {
    SHARE: '{"cores":30,"memory_bytes":4294967296,"older":[[[17,345],8589934592]],"former_bytes":null}',
    Record(
        boot="b", folder="/run/gpumgr/mps/GPU-1", former_mode=0
    ): '{"boot":"b","folder":"/run/gpumgr/mps/GPU-1","former_mode":0}',
}


@pytest.mark.parametrize("record", WRITTEN)
def test_a_record_has_the_same_form_in_all_versions_and_may_have_more_fields_in_a_newer_one(
    tmp_path: Path, record: msgspec.Struct
) -> None:
    assert msgspec.json.encode(record).decode() == WRITTEN[record]
    for text in (WRITTEN[record], json.dumps(json.loads(WRITTEN[record]) | {"version": 2, "limits": {"cores": 1}})):
        (tmp_path / "record").write_text(text)
        assert read_record(tmp_path / "record", type(record)) == record


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"', '{"cores":[1],"memory_bytes":1,"boot":1,"folder":"/run/a"}'])
def test_a_record_that_can_not_be_decoded_is_reported_and_only_its_name_counts(tmp_path: Path, text: str) -> None:
    folder = GpuFolder(tmp_path / "mps/GPU-1")
    folder.make()
    folder.put("a1", SHARE)
    share, record = folder.root / "tenants/b2", tmp_path / UUID
    for path in (share, record, tmp_path / "another"):
        path.write_text(text)
    with capture_logs() as logs:
        assert (folder.allocations(), folder.shares()) == (["a1", "b2"], {"a1": SHARE})
        assert DaemonRecords(tmp_path).uuids() == []
    assert [(line["event"], line["path"]) for line in logs] == [("mps_record_unreadable", str(each)) for each in (share, record)]


OLD: ControlFeatures = {2: ""}
NEW: ControlFeatures = {2: "", 3: "--multiuser"}


@pytest.mark.parametrize(
    ("setting", "features", "kept", "chosen"),
    [
        ("auto", OLD, None, 2),
        ("auto", NEW, None, 3),
        ("2", NEW, None, 2),
        ("3", NEW, None, 3),
        ("auto", NEW, 2, 2),  # containers of this node use it
        ("3", NEW, 2, 2),
        ("2", NEW, 3, 3),
    ],
)
def test_choice(setting: ProtocolSetting, features: ControlFeatures, kept: MpsProtocol | None, chosen: MpsProtocol) -> None:
    assert choose_protocol(setting, features, kept) == chosen


def test_a_protocol_that_the_program_lacks_is_refused_with_what_to_do() -> None:
    with pytest.raises(MpsError, match=r"protocol 3 .* set it to auto"):
        choose_protocol("3", OLD, None)
    with pytest.raises(MpsError, match=r"protocol 3 .* drain the node"):
        choose_protocol("auto", OLD, 3)


def test_it_is_kept_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert read_protocol(folder) is None
    write_protocol(folder, 3)
    assert read_protocol(folder) == 3
    (folder / "mps_protocol").write_text("seven\n")
    assert read_protocol(folder) is None
