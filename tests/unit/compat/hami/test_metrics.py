"""HAMi's gauges: both names of each, their labels, its units."""

import pytest
from msgspec.structs import replace

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.ids import ALL_CORES
from gpumgr.placement.pods import ContainerSpec, PodView
from tests.unit.ledger.samples import container, report_of, sample
from tests.unit.web.metrics.pages import families, full_picture, metrics_of
from tests.unit.web.metrics.pictures import BLOCKS, allocation, uuid_of, view_of

WEB, TRAIN = ("team", "web"), ("team", "train")
_IN_CONTAINER = "namespace pod container vdevice_index device_uuid"
#: New name -> old name, labels, old labels; all without `zone`. From HAMi's documentation of its metrics.
TABLE = {
    "hami_host_gpu_memory_used_bytes": ("HostGPUMemoryUsage", "node device_index device_uuid device_type"),
    "hami_host_gpu_utilization_ratio": ("HostCoreUtilization", "node device_index device_uuid device_type"),
    "hami_host_gpu_memory_controller_utilization_ratio": (None, "device_index device_uuid device_type"),
    "hami_vgpu_memory_used_bytes": ("vGPU_device_memory_usage_in_bytes", _IN_CONTAINER),
    "hami_vgpu_memory_limit_bytes": ("vGPU_device_memory_limit_in_bytes", _IN_CONTAINER),
    "hami_container_device_memory_bytes": ("Device_memory_desc_of_container", _IN_CONTAINER),
    "hami_container_device_utilization_ratio": ("Device_utilization_desc_of_container", _IN_CONTAINER),
    "hami_gpu_memory_limit_bytes": ("GPUDeviceMemoryLimit", "node device_uuid device_index device_type"),
    "hami_gpu_core_limit_ratio": ("GPUDeviceCoreLimit", "node device_uuid device_index device_type"),
    "hami_gpu_memory_allocated_bytes": ("GPUDeviceMemoryAllocated", "node device_uuid device_index device_cores device_type"),
    "hami_gpu_shared_count": ("GPUDeviceSharedNum", "node device_uuid device_index device_type"),
    "hami_gpu_core_allocated_ratio": ("GPUDeviceCoreAllocated", "node device_uuid device_index device_type"),
    "hami_vgpu_memory_allocated_bytes": ("vGPUMemoryAllocated", "namespace node pod container_index device_uuid"),
    "hami_vgpu_core_allocated_ratio": ("vGPUCoreAllocated", "namespace node pod container_index device_uuid"),
}
OLD_LABELS = {
    "nodeid": "node",
    "nodename": "node",
    "deviceidx": "device_index",
    "deviceuuid": "device_uuid",
    "devicetype": "device_type",
    "devicecores": "device_cores",
    "podnamespace": "namespace",
    "podname": "pod",
    "ctrname": "container",
    "vdeviceid": "vdevice_index",
    "containeridx": "container_index",
}
PODS = [
    PodView(
        namespace="team",
        name="web",
        uid="u",
        containers=(ContainerSpec(name="prepare", kind="init"), ContainerSpec(name="main", cores=2, memory_blocks=2)),
    )
]


def samples_of(report: NodeReport, name: str) -> list[tuple[dict[str, str], float]]:
    family = families(metrics_of(report, PODS, hami_names=True))[name]
    return [(dict(each.labels), each.value) for each in family.samples]


@pytest.mark.hami_bug("B33: metrics have wrong container indices, two names for a model, and no node")
def test_all_names_with_their_labels_and_twins() -> None:
    found = families(metrics_of(full_picture(), PODS, gpu_manager_names=False, hami_names=True))
    theirs = {name for name in found if not name.startswith("gpumgr_")}
    assert theirs == {*TABLE, *(old for old, _ in TABLE.values() if old)}
    for new, (old, labels) in TABLE.items():
        samples = found[new].samples
        assert samples, new
        assert all(set(each.labels) == {*labels.split(), "zone"} and each.labels["zone"] == "vGPU" for each in samples), new
        assert found[new].type == "gauge"
        if old is not None:
            translated = [({OLD_LABELS.get(k, k): v for k, v in each.labels.items()}, each.value) for each in found[old].samples]
            assert translated == [(each.labels, each.value) for each in samples], old
    assert "nodename" in found["vGPUCoreAllocated"].samples[0].labels
    assert "nodeid" in found["GPUDeviceSharedNum"].samples[0].labels


def test_they_are_off_by_default() -> None:
    assert not [name for name in families(metrics_of(full_picture(), PODS)) if "hami" in name or "GPU" in name]


def test_ratios_are_percentages() -> None:
    report = full_picture()
    numbers = {name: [value for _, value in samples_of(report, name)] for name in TABLE if name.endswith("_ratio")}
    assert numbers == {
        "hami_host_gpu_utilization_ratio": [25.0, 25.0],
        "hami_host_gpu_memory_controller_utilization_ratio": [50.0, 50.0],
        "hami_container_device_utilization_ratio": [50.0, 75.0],
        "hami_gpu_core_limit_ratio": [100.0, 100.0],
        "hami_gpu_core_allocated_ratio": [2.0, 100.0],
        "hami_vgpu_core_allocated_ratio": [2.0],
    }


def test_a_container_with_whole_gpus_has_each_ones_memory_as_its_limit() -> None:
    view = view_of(allocation("t", TRAIN, cores={0: ALL_CORES, 1: ALL_CORES}))
    report = report_of(view, sample({11: 5}, {}), {11: container("t", TRAIN)})
    limits = samples_of(report, "hami_vgpu_memory_limit_bytes")
    assert [(labels["vdevice_index"], labels["device_uuid"], value) for labels, value in limits] == [
        ("0", uuid_of(0), BLOCKS * BLOCK_BYTES + 1),
        ("1", uuid_of(1), BLOCKS * BLOCK_BYTES + 1),
    ]
    assert [value for _, value in samples_of(report, "hami_vgpu_memory_used_bytes")] == [5.0, 0.0]
    assert [value for _, value in samples_of(report, "hami_gpu_shared_count")] == [1.0, 1.0]


@pytest.mark.hami_bug("B33: metrics have wrong container indices, two names for a model, and no node")
def test_which_container_of_its_pod_one_is_comes_from_the_pod() -> None:
    view = view_of(
        allocation("a", WEB, cores={0: 0b11}, blocks={0: 0b11}), allocation("b", ("team", "unknown"), cores={0: 0b100})
    )
    ((labels, value),) = samples_of(NodeReport(view=view), "hami_vgpu_memory_allocated_bytes")
    assert (labels["container_index"], labels["pod"], value) == ("1", "web", 2.0 * BLOCK_BYTES)


def test_without_a_driver_only_allocations_are_exported() -> None:
    found = families(metrics_of(replace(full_picture(), nvml_up=False), PODS, hami_names=True))
    assert "hami_host_gpu_memory_used_bytes" not in found
    assert found["hami_vgpu_memory_used_bytes"].samples == []
    assert len(found["hami_gpu_memory_limit_bytes"].samples) == 2


@pytest.mark.hami_bug("B33: metrics have wrong container indices, two names for a model, and no node")
def test_the_type_is_what_hami_registers() -> None:
    ((labels, _), _) = samples_of(full_picture(), "hami_gpu_shared_count")
    assert labels["device_type"] == "NVIDIA A10"
