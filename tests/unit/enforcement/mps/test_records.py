"""What is on record of each GPU with a daemon."""

import json
from pathlib import Path

import pytest

from gpumgr.enforcement.mps.folders import DaemonRecords

UUID = "GPU-0fe1c342"


def test_a_record_is_kept_over_restarts_until_it_is_dropped(tmp_path: Path) -> None:
    records = DaemonRecords(tmp_path / "mps")
    assert (records.uuids(), records.of(UUID)) == ([], None)
    records.begin(UUID, Path("/run/a"))
    records.set_former_mode(UUID, 2)
    records.begin(UUID, Path("/run/b"))
    again = DaemonRecords(tmp_path / "mps")
    assert again.uuids() == [UUID]
    record = again.of(UUID)
    assert record is not None
    assert (record.folder, record.former_mode) == ("/run/a", 2)
    again.drop(UUID)
    again.drop(UUID)
    assert (again.uuids(), DaemonRecords(tmp_path / "mps").uuids()) == ([], [])


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


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"'])
def test_what_is_no_record_counts_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / UUID).write_text(text)
    (tmp_path / "another").write_text("{}")
    assert DaemonRecords(tmp_path).uuids() == []
