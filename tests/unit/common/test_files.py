"""Replacement of files, by the system calls that it makes, and file identity."""

import os
import stat
from pathlib import Path

import pytest

from gpumgr.common.files import FileIdentity, replace_file, replacing, temporary_of
from gpumgr.enforcement.mps.folders import read_protocol, write_protocol


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The real os.fsync and os.replace, recorded: what is synced, and what is renamed to which name."""
    made: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        made.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        made.append(("replace", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return made


def synced(path: Path) -> list[tuple[str, str]]:
    """File, then name, then folder: after a power loss at any point between, the old file or the new one is there."""
    return [("fsync", str(temporary_of(path))), ("replace", str(path)), ("fsync", str(path.parent))]


def test_a_durable_replacement_syncs_the_file_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    path = tmp_path / "record"
    path.write_text("old")
    replace_file(path, "new ü")
    assert calls == synced(path)
    assert path.read_bytes() == b"new \xc3\xbc"


def test_the_mps_protocol_is_durable(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    write_protocol(tmp_path / "state", 3)
    assert calls == synced(tmp_path / "state" / "mps_protocol")
    assert read_protocol(tmp_path / "state") == 3


def test_a_replacement_that_need_not_be_durable_is_a_rename_alone(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    replace_file(tmp_path / "record", b"new", durable=False)
    assert calls == [("replace", str(tmp_path / "record"))]


@pytest.mark.parametrize("mode", [0o600, 0o666, 0o755])
def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        replace_file(tmp_path / "record", b"", mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "record").stat().st_mode) == mode


def write_half(path: Path) -> None:
    with replacing(path) as descriptor:
        os.write(descriptor, b"half")
        raise OSError("disk full")


def test_a_failure_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"):
        write_half(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"new")
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["folder", "record"]


def test_a_temporary_file_of_a_killed_process_is_replaced_and_never_followed(tmp_path: Path) -> None:
    path, other = tmp_path / "record", tmp_path / "other"
    other.write_text("not ours")
    temporary_of(path).symlink_to(other)
    replace_file(path, b"new")
    assert (path.read_text(), other.read_text()) == ("new", "not ours")
    assert sorted(os.listdir(tmp_path)) == ["other", "record"]


def test_every_change_of_content_changes_the_identity_and_a_hard_link_does_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert FileIdentity.at(path) is None
    path.write_text("one")
    first = FileIdentity.at(path)
    os.link(path, tmp_path / "link")
    path.chmod(0o600)
    assert FileIdentity.at(path) == FileIdentity.at(tmp_path / "link") == first
    path.write_text("longer")
    second = FileIdentity.at(path)
    replace_file(path, b"longer")
    assert len({first, second, FileIdentity.at(path)}) == 3
