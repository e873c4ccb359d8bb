"""gpu-manager's own checkpoint, as it writes it and as it may be found."""

from pathlib import Path

import pytest

from gpumgr.common.errors import InputError
from gpumgr.compat.gpu_manager.running_pods import read_gpu_manager_checkpoint
from gpumgr.ledger.rebuild import AnonymousRecord

WRITTEN = (
    '{"PodGPUMapping":{"uid-b":{"main":{"Devices":["/dev/nvidia3","/dev/nvidia0"],"Cores":200,"Memory":0}},'
    '"uid-a":{"two":{"Devices":["/dev/nvidia1"],"Cores":50,"Memory":268435456},"one":{"Devices":["/dev/nvidia1"],"Cores":5,"Memory":0}}}}'
)


def read(tmp_path: Path, content: str | bytes) -> tuple[AnonymousRecord, ...]:
    path = tmp_path / "gpumanager_internal_checkpoint"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_gpu_manager_checkpoint(path)


def test_reads_what_gpu_manager_writes(tmp_path: Path) -> None:
    assert read(tmp_path, WRITTEN) == (
        AnonymousRecord(uid="uid-a", container="one", minors=(1,), cores=5, memory_blocks=0),
        AnonymousRecord(uid="uid-a", container="two", minors=(1,), cores=50, memory_blocks=1),
        AnonymousRecord(uid="uid-b", container="main", minors=(3, 0), cores=200, memory_blocks=0),
    )


def test_no_file_means_no_records(tmp_path: Path) -> None:
    assert read_gpu_manager_checkpoint(tmp_path / "missing") == ()


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"PodGPUMapping":{}}',
        '{"PodGPUMapping":null}',
        '{"PodGPUMapping":{"u":null}}',
        '{"PodGPUMapping":{"u":{"c":null}}}',
    ],
)
def test_empty_and_null_maps_hold_nothing(content: str, tmp_path: Path) -> None:
    assert read(tmp_path, content) == ()


def test_paths_that_name_no_gpu_are_left_out(tmp_path: Path) -> None:
    devices = '["/dev/nvidia", "/dev/nvidiactl", "/dev/nvidia2", "/dev/nvidia2", "nvidia4", "/dev/nvidia99999999999999"]'
    (record,) = read(tmp_path, f'{{"PodGPUMapping":{{"u":{{"c":{{"Devices":{devices},"Cores":10}}}}}}}}')
    assert record.minors == (2,)
    (record,) = read(tmp_path, '{"PodGPUMapping":{"u":{"c":{"Devices":null}}}}')
    assert record.minors == ()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"PodGPUMapping":[]}',
        '{"PodGPUMapping":{"u":{"c":{"Cores":-5}}}}',
        WRITTEN[:100],
        b"\xff\xfe",
        "[" * 100_000,
    ],
)
def test_a_corrupt_file_is_a_clear_error(content: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gpumanager_internal_checkpoint can't be decoded: "):
        read(tmp_path, content)


def test_a_folder_in_its_place_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Is a directory"):
        read_gpu_manager_checkpoint(tmp_path)
