"""gpu-manager's running pods: the doctor foresees what can hold the agent back, with the same two files."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpumgr.cli.examination.examine import CheckResult
from gpumgr.cli.examination.kubelet import look_at_take_over
from gpumgr.common.units import CORE_RESOURCE
from gpumgr.kubelet.deviceplugin.kubelet_checkpoint import FILE_NAME
from gpumgr.ledger.checkpoint.store import SqliteCheckpoint
from gpumgr.ledger.ledger import Change
from gpumgr.settings import load_settings
from tests.allocations import allocated

from .test_command import write_settings

THEIRS, OURS = (f"{CORE_RESOURCE}-1", f"{CORE_RESOURCE}-2"), ("0badc0de-c00", "0badc0de-c01")


def kubelet_knows(folder: Path, *uids: str, ids: Sequence[str] = THEIRS, resource: str = CORE_RESOURCE) -> None:
    (folder / "plugins").mkdir(exist_ok=True)
    entries = [{"PodUID": uid, "ContainerName": "main", "ResourceName": resource, "DeviceIDs": {"0": [*ids]}} for uid in uids]
    (folder / "plugins" / FILE_NAME).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))


def gpu_manager_knows(folder: Path, *uids: str, device: str = "/dev/nvidia0") -> None:
    record = {"main": {"Devices": [device], "Cores": 30, "Memory": 1 << 28}}
    (folder / "gpu-manager.json").write_text(json.dumps({"PodGPUMapping": dict.fromkeys(uids, record)}))


async def look(folder: Path) -> CheckResult:
    settings = load_settings(write_settings(folder), environ={}, overrides={})
    return await look_at_take_over(settings)


async def test_without_gpu_manager_all_is_well(folder: Path) -> None:
    assert (await look(folder)).message == "no container has GPUs from gpu-manager, according to the kubelet"
    kubelet_knows(folder, "u1", ids=OURS)
    assert (await look(folder)).state == "ok"
    kubelet_knows(folder, "u1", resource="nvidia.com/gpu")
    assert (await look(folder)).state == "ok"


async def test_containers_that_are_in_its_checkpoint_are_taken_over(folder: Path) -> None:
    kubelet_knows(folder, "u1", "u2")
    gpu_manager_knows(folder, "u1", "u2", "gone")
    found = await look(folder)
    assert (found.state, found.message) == ("ok", "2 containers have GPUs from gpu-manager, and it is known which")


async def test_those_that_our_checkpoint_has_were_taken_over(folder: Path) -> None:
    kubelet_knows(folder, "u1")
    store = SqliteCheckpoint.open(folder)
    taken = allocated(id="0" * 16, uid="u1", container="main", gpus=("0badc0de",), cores={"0badc0de": 1}, anonymous=True)
    await store.save(Change(put=(taken,)))
    assert await store.close()
    assert (await look(folder)).state == "ok"


@pytest.mark.parametrize("device", [None, "/dev/null"])
async def test_pods_without_a_record_are_named_with_the_remedy(folder: Path, device: str | None) -> None:
    kubelet_knows(folder, *(f"u{n}" for n in range(8)))
    gpu_manager_knows(folder, "u1")
    if device is not None:
        gpu_manager_knows(folder, *(f"u{n}" for n in range(8)), device=device)
    found = await look(folder)
    first, more = ("u0 (main), pod uid u2", "2") if device is None else ("u0 (main), pod uid u1", "3")
    assert (found.state, found.message.startswith(f"pod uid {first} (main), ")) == ("warning", True)
    assert found.message.endswith(
        f" and {more} more have GPUs from gpu-manager, and {folder}/gpu-manager.json is missing or does not say which: no GPU is offered "
        "while one of them runs"
    )
    assert "gpuManager.takeOver=true" in str(found.remedy)


@pytest.mark.parametrize("known", [["u1"], []])
async def test_a_checkpoint_of_gpu_managers_that_can_not_be_understood(folder: Path, known: list[str]) -> None:
    kubelet_knows(folder, *known)
    (folder / "gpu-manager.json").write_text("{")
    found = await look(folder)
    assert (found.state, "while one of them runs" in found.message) == ("warning", bool(known))
    assert f"gpu-manager's checkpoint {folder}/gpu-manager.json can't be decoded: " in found.message
    assert found.remedy


async def test_a_kubelets_file_that_can_not_be_read_is_a_warning(folder: Path) -> None:
    kubelet_knows(folder)
    (folder / "plugins" / FILE_NAME).write_text("{")
    found = await look(folder)
    assert (found.state, "can't be read" in found.message) == ("warning", True)
