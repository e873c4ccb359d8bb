"""HAMi's gauges for its dashboards, under their new and their old names.

Source: HAMi's vGPUmonitor and scheduler. All series have `zone="vGPU"`; gauges named `_ratio` go from 0 to 100. MIG devices, quotas, and
values that only HAMi's library measures are not included.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.aio import yielding_gil
from gpumgr.common.prometheus_text import Family, RenderedFamily, label_text, render
from gpumgr.common.units import CORES_PER_GPU, GpuName, percent
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger, granted_mebibytes, holdings
from gpumgr.ledger.node_use import ContainerUse
from gpumgr.placement.devices import Gpu, GpuSample
from gpumgr.placement.pods import PodView
from gpumgr.placement.requests import device_type

_ON_GPU: Final = ("node", "device_uuid", "device_index", "device_type")
_IN_CONTAINER: Final = ("namespace", "pod", "container", "vdevice_index", "device_uuid")
_OF_POD: Final = ("namespace", "node", "pod", "container_index", "device_uuid")

#: New label -> old label. In series of pods the node's label has another old name.
_OLD_LABELS: Final = {
    "node": "nodeid",
    "device_index": "deviceidx",
    "device_uuid": "deviceuuid",
    "device_type": "devicetype",
    "device_cores": "devicecores",
    "namespace": "podnamespace",
    "pod": "podname",
    "container": "ctrname",
    "vdevice_index": "vdeviceid",
    "container_index": "containeridx",
}
_OLD_LABELS_OF_POD: Final = {**_OLD_LABELS, "node": "nodename"}

Values = tuple[str, ...]
#: A series with the value None is left out.
Series = Mapping[Values, float | None]


def render_hami(report: NodeReport, pods: Iterable[PodView], *, node: str) -> Iterator[RenderedFamily]:
    """`pods`: the known pods of the node. They show the index of a container in its pod, which is a label."""
    ledger = report.view.ledger
    shown = report.view.inventory.gpus(ledger.gpu_registry)
    labels = {name: (node, gpu.uuid, str(gpu.index), device_type(gpu.model)) for name, gpu in shown.items()}
    if report.nvml_up and report.sample is not None:
        yield from _on_host({at: report.sample.gpus.get(shown[name].uuid) for name, at in labels.items()})
    yield from _on_gpus(ledger, shown, labels)
    yield from _in_containers(report.current_use.containers.values(), ledger.allocations, shown)
    yield from _of_pods(ledger, pods, node)


def _twins(
    new: str, old: str | None, about: str, labels: tuple[str, ...], series: Series, translation: Mapping[str, str] = _OLD_LABELS
) -> Iterator[RenderedFamily]:
    """One gauge under its name `new`, and under `old` with the old labels. `old` None: the gauge has only one name."""
    known = {values: value for values, value in series.items() if value is not None}
    for name, names in ((new, labels), (old, tuple(translation[label] for label in labels))):
        if name is not None:
            family = Family(name=name, about=about, labels=(*names, "zone"))
            yield render(
                family, {label_text(family.labels, (*values, "vGPU")): value for values, value in yielding_gil(known.items())}
            )


def _on_host(samples: Mapping[Values, GpuSample | None]) -> Iterator[RenderedFamily]:
    sampled = {values: sample for values, sample in samples.items() if sample is not None}
    used = {values: sample.memory_used_bytes for values, sample in sampled.items()}
    yield from _twins("hami_host_gpu_memory_used_bytes", "HostGPUMemoryUsage", "Memory in use on the GPU.", _ON_GPU, used)
    busy = {values: percent(sample.utilization_ratio) for values, sample in sampled.items()}
    about = "Percentage of the time in which a kernel ran on the GPU."
    yield from _twins("hami_host_gpu_utilization_ratio", "HostCoreUtilization", about, _ON_GPU, busy)
    copying = {values[1:]: percent(sample.memory_copy_ratio) for values, sample in sampled.items()}
    about = "Percentage of the time in which memory was read or written."
    yield from _twins("hami_host_gpu_memory_controller_utilization_ratio", None, about, _ON_GPU[1:], copying)


def _on_gpus(ledger: Ledger, shown: Mapping[GpuName, Gpu], labels: Mapping[GpuName, Values]) -> Iterator[RenderedFamily]:
    memory = granted_mebibytes(ledger)
    sizes = {labels[name]: gpu.memory_bytes for name, gpu in shown.items()}
    yield from _twins("hami_gpu_memory_limit_bytes", "GPUDeviceMemoryLimit", "Memory of the GPU.", _ON_GPU, sizes)
    full = dict.fromkeys(labels.values(), CORES_PER_GPU)
    yield from _twins("hami_gpu_core_limit_ratio", "GPUDeviceCoreLimit", "Cores of the GPU, in percent.", _ON_GPU, full)
    about, with_cores = "Memory that containers hold.", (*_ON_GPU, "device_cores")
    known = {gpu.name for gpu in ledger.gpu_registry.gpus if gpu.memory_mebibytes}
    held = {(*at, str(CORES_PER_GPU)): memory[name] << 20 for name, at in labels.items() if name in known}
    yield from _twins("hami_gpu_memory_allocated_bytes", "GPUDeviceMemoryAllocated", about, with_cores, held)
    holders = Counter(name for allocation in ledger.allocations.values() for name in allocation.places)
    sharing = {at: holders[name] for name, at in labels.items()}
    yield from _twins("hami_gpu_shared_count", "GPUDeviceSharedNum", "Containers on the GPU.", _ON_GPU, sharing)
    taken = {at: ledger.used(name).cores for name, at in labels.items()}
    about = "Percentage of the GPU's cores that containers hold."
    yield from _twins("hami_gpu_core_allocated_ratio", "GPUDeviceCoreAllocated", about, _ON_GPU, taken)


def _in_containers(
    uses: Iterable[ContainerUse], allocations: Mapping[AllocationId, Allocation], shown: Mapping[GpuName, Gpu]
) -> Iterator[RenderedFamily]:
    used: dict[Values, float | None] = {}
    limits: dict[Values, float | None] = {}
    busy: dict[Values, float | None] = {}
    for use in uses:
        allocation = allocations.get(use.allocation)
        if allocation is None or use.pod is None or use.gpu not in allocation.gpus:
            continue
        values = (*use.pod, use.container or "", str(list(allocation.gpus).index(use.gpu)), use.uuid)
        whole_bytes = shown[use.gpu].memory_bytes if use.gpu in shown else None
        used[values], busy[values] = use.memory_bytes, percent(use.utilization_ratio)
        limits[values] = whole_bytes if use.memory_limit_bytes is None else use.memory_limit_bytes
    about, old = "Memory that the container uses on the GPU.", "vGPU_device_memory_usage_in_bytes"
    yield from _twins("hami_vgpu_memory_used_bytes", old, about, _IN_CONTAINER, used)
    yield from _twins("hami_container_device_memory_bytes", "Device_memory_desc_of_container", about, _IN_CONTAINER, used)
    about, old = "Memory that the container may use on the GPU.", "vGPU_device_memory_limit_in_bytes"
    yield from _twins("hami_vgpu_memory_limit_bytes", old, about, _IN_CONTAINER, limits)
    about, old = "Percentage of the time in which the container's kernels ran.", "Device_utilization_desc_of_container"
    yield from _twins("hami_container_device_utilization_ratio", old, about, _IN_CONTAINER, busy)


def _of_pods(ledger: Ledger, pods: Iterable[PodView], node: str) -> Iterator[RenderedFamily]:
    index_of = {(pod.key, spec.name): index for pod in pods for index, spec in enumerate(pod.containers)}
    memory: dict[Values, float | None] = {}
    cores: dict[Values, float | None] = {}
    for allocation in ledger.allocations.values():
        if allocation.pod is None or (index := index_of.get((allocation.pod, allocation.container or ""))) is None:
            continue
        for registered, core_count, mebibytes in holdings(allocation, ledger.gpu_registry):
            values = (allocation.pod[0], node, allocation.pod[1], str(index), registered.uuid)
            memory[values], cores[values] = mebibytes << 20, core_count
    about, old = "Memory that the container holds.", "vGPUMemoryAllocated"
    yield from _twins("hami_vgpu_memory_allocated_bytes", old, about, _OF_POD, memory, _OLD_LABELS_OF_POD)
    about, old = "Percentage of the GPU's cores that the container holds.", "vGPUCoreAllocated"
    yield from _twins("hami_vgpu_core_allocated_ratio", old, about, _OF_POD, cores, _OLD_LABELS_OF_POD)
