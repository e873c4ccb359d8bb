"""gpu-manager's running pods: the doctor foresees what holds the agent back, with the same two files and a container runtime."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpumgr.cli.examination.examine import CheckResult
from gpumgr.cli.examination.takeover import look_at_take_over
from gpumgr.common.units import CORE_RESOURCE
from gpumgr.kubelet.deviceplugin.kubelet_checkpoint import FILE_NAME
from gpumgr.ledger.checkpoint.store import SqliteCheckpoint
from gpumgr.ledger.ledger import Change
from gpumgr.settings import load_settings
from tests.allocations import allocated
from tests.cri_api import cri

from .conftest import serving
from .test_command import write_settings

LIST = "/runtime.v1.RuntimeService/ListContainers"
THEIRS, OURS = (f"{CORE_RESOURCE}-1", f"{CORE_RESOURCE}-2"), ("0badc0de-c00", "0badc0de-c01")


def kubelet_knows(folder: Path, *uids: str, ids: Sequence[str] = THEIRS, resource: str = CORE_RESOURCE) -> None:
    (folder / "plugins").mkdir(exist_ok=True)
    entries = [{"PodUID": uid, "ContainerName": "main", "ResourceName": resource, "DeviceIDs": {"0": [*ids]}} for uid in uids]
    (folder / "plugins" / FILE_NAME).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))


def gpu_manager_knows(folder: Path, *uids: str, device: str = "/dev/nvidia0") -> None:
    record = {"main": {"Devices": [device], "Cores": 30, "Memory": 1 << 28}}
    (folder / "gpu-manager.json").write_text(json.dumps({"PodGPUMapping": dict.fromkeys(uids, record)}))


def runtime_shows(running: Sequence[str], ended: Sequence[str] = ()) -> dict[str, Any]:
    """What a runtime answers: a container of the pod team/UID for each."""
    states = [(uid, 1) for uid in running] + [(uid, 2) for uid in ended]
    containers = [
        cri.Container(
            id=uid,
            state=state,
            labels={
                "io.kubernetes.pod.uid": uid,
                "io.kubernetes.pod.namespace": "team",
                "io.kubernetes.pod.name": f"of-{uid}",
                "io.kubernetes.container.name": "main",
            },
        )
        for uid, state in states
    ]
    return {LIST: cri.ListContainersResponse(containers=containers).SerializeToString()}


async def look(folder: Path) -> CheckResult:
    settings = load_settings(write_settings(folder), environ={}, overrides={})
    return await look_at_take_over(settings, timeout_seconds=2)


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


async def test_running_pods_without_any_record_are_an_error_and_named(folder: Path) -> None:
    kubelet_knows(folder, "u1", "u2", "u3")
    gpu_manager_knows(folder, "u1")
    with serving(folder / "cri.sock", runtime_shows(["u1", "u2"], ended=["u3"])):
        found = await look(folder)
    assert (found.state, found.message) == (
        "error",
        "nothing would be offered: team/of-u2 (main) hold GPUs from gpu-manager, and "
        f"{folder}/gpu-manager.json is missing or does not say which",
    )
    assert "gpuManager.takeOver=true" in str(found.remedy)
    gpu_manager_knows(folder, "u1", "u2", device="/dev/null")
    with serving(folder / "cri.sock", runtime_shows(["u1", "u2"])):
        found = await look(folder)
    assert "team/of-u1 (main), team/of-u2 (main) hold" in found.message


async def test_a_runtime_that_does_not_answer_proves_no_end(folder: Path) -> None:
    kubelet_knows(folder, *(f"u{n}" for n in range(7)))
    found = await look(folder)
    assert found.state == "warning"
    assert "pod uid u4 (main) and 2 more had GPUs" in found.message
    assert "whether they run still can't be known" in found.message


async def test_pods_that_ended_are_still_named_by_the_kubelet_and_no_error(folder: Path) -> None:
    """Nor is the agent kept from its start by them: it gets the kubelet to look."""
    kubelet_knows(folder, "u1", "u2")
    with serving(folder / "cri.sock", runtime_shows([], ended=["u1"])):
        found = await look(folder)
    assert found.state == "warning"
    assert found.message.startswith("team/of-u1 (main), pod uid u2 (main) had GPUs from gpu-manager")


@pytest.mark.parametrize(("known", "state"), [(["u1"], "error"), ([], "warning")])
async def test_a_checkpoint_of_gpu_managers_that_can_not_be_understood(folder: Path, known: list[str], state: str) -> None:
    kubelet_knows(folder, *known)
    (folder / "gpu-manager.json").write_text("{")
    with serving(folder / "cri.sock", runtime_shows(known)):
        found = await look(folder)
    assert found.state == state
    assert f"gpu-manager's checkpoint {folder}/gpu-manager.json can't be understood: " in found.message
    assert found.remedy


async def test_a_kubelets_file_that_can_not_be_read_is_a_warning(folder: Path) -> None:
    kubelet_knows(folder)
    (folder / "plugins" / FILE_NAME).write_text("{")
    found = await look(folder)
    assert (found.state, "can't be read" in found.message) == ("warning", True)
