"""gpu-manager's four gauges, with gpu-manager's names, help texts, labels and units. Use is in percent of a GPU and MiB, a request in GPUs
and MiB.

Source: gpu-manager's display service. Use has a series for each GPU and one called `total`; requests have only `total`. If a pod requests
GPUs, each of its containers except init containers has a request, which may be 0. If a container requests no memory, its granted memory
counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.aio import yielding_gil
from gpumgr.common.prometheus_text import Family, RenderedFamily, kept_label_text, render
from gpumgr.common.units import BLOCK_BYTES, CORES_PER_GPU, percent
from gpumgr.ledger.ledger import Allocation
from gpumgr.placement.pods import PodKey, PodView

#: Labels of every series, before the label of the GPU.
HOLDER_LABELS: Final = ("pod_name", "namespace", "node", "container_name")

Holder = tuple[PodKey, str]


def _family(name: str, about: str, label: str) -> Family:
    return Family(name=name, about=about, labels=(*HOLDER_LABELS, label))


_UTILIZATION: Final = _family("container_gpu_utilization", "gpu utilization", "gpu")
_MEMORY: Final = _family("container_gpu_memory_total", "gpu memory usage in MiB", "gpu_memory")
_CORES_REQUESTED: Final = _family("container_request_gpu_utilization", "request of gpu utilization", "req_of_gpu")
_MEMORY_REQUESTED: Final = _family("container_request_gpu_memory", "request of gpu memory in MiB", "req_of_gpu_memory")


def render_gpu_manager(report: NodeReport, pods: Sequence[PodView], *, node: str) -> Iterator[RenderedFamily]:
    """`pods`: the known pods of the node. Pods that are only in the ledger get series, too."""
    yield from _used(report, {pod.key for pod in pods if pod.ended}, node)
    gpus: dict[str, float] = {}
    mebibytes: dict[str, float] = {}
    for (pod, container), (cores, memory_mebibytes) in yielding_gil(_requested(report, pods).items()):
        holder = kept_label_text(HOLDER_LABELS, pod[1], pod[0], node, container)
        gpus[f'{holder},req_of_gpu="total"'] = cores / CORES_PER_GPU
        mebibytes[f'{holder},req_of_gpu_memory="total"'] = memory_mebibytes
    yield render(_CORES_REQUESTED, gpus)
    yield render(_MEMORY_REQUESTED, mebibytes)


def _holder(allocation: Allocation) -> Holder | None:
    """The allocation's pod and container; None for an init container, or while they are not known."""
    if allocation.init or allocation.pod is None or allocation.container is None:
        return None
    return allocation.pod, allocation.container


def _used(report: NodeReport, ended: set[PodKey], node: str) -> Iterator[RenderedFamily]:
    allocations = report.view.ledger.allocations
    index_of = {gpu.uuid: gpu.index for gpu in report.view.inventory.snapshot.gpus}
    percents: dict[str, float | None] = {}
    mebibytes: dict[str, float | None] = {}
    for use in yielding_gil(report.current_use.containers.values()):
        allocation = allocations.get(use.allocation)
        holder = _holder(allocation) if allocation else None
        if holder is None or use.uuid not in index_of or holder[0] in ended:
            continue
        labels = kept_label_text(HOLDER_LABELS, holder[0][1], holder[0][0], node, holder[1])
        busy, memory_mebibytes = percent(use.utilization_ratio), None if use.memory_bytes is None else use.memory_bytes >> 20
        for label in (f"gpu{index_of[use.uuid]}", "total"):
            _add(percents, f'{labels},gpu="{label}"', busy)
            _add(mebibytes, f'{labels},gpu_memory="{label}"', memory_mebibytes)
    for family, series in ((_UTILIZATION, percents), (_MEMORY, mebibytes)):
        yield render(family, {each: value for each, value in series.items() if value is not None})


def _add(series: dict[str, float | None], labels: str, value: float | None) -> None:
    """Adds to a sum. If one of its values is not known, the sum is None."""
    before = series.get(labels, 0)
    series[labels] = None if value is None or before is None else before + value


def _requested(report: NodeReport, pods: Sequence[PodView]) -> Mapping[Holder, tuple[int, int]]:
    """The request of each container: cores and MiB."""
    granted = _granted(report)
    known = {pod.key for pod in pods}
    requested = {holder: what for holder, what in granted.items() if holder[0] not in known}
    for pod in yielding_gil(pods):
        if pod.ended or not pod.wants_gpu:
            continue
        for spec in pod.containers:
            if spec.kind != "init":
                holder = (pod.key, spec.name)
                cores, memory_mebibytes = granted.get(holder, (0, 0)) if spec.wants_gpu else (0, 0)
                requested[holder] = (cores if spec.replicas else spec.cores, _mebibytes(spec.memory_blocks) or memory_mebibytes)
    return requested


def _granted(report: NodeReport) -> Mapping[Holder, tuple[int, int]]:
    """What each container was granted: cores, and MiB (for a whole GPU, its memory)."""
    ledger = report.view.ledger
    size_of = {gpu.name: gpu.memory_mebibytes for gpu in ledger.gpu_registry.gpus}
    size_of |= {name: gpu.memory_mebibytes for name, gpu in report.view.inventory.gpus(ledger.gpu_registry).items()}
    granted: dict[Holder, tuple[int, int]] = {}
    for allocation in yielding_gil(ledger.allocations.values()):
        if (holder := _holder(allocation)) is not None:
            mebibytes = sum(size_of[gpu] if a.whole else a.memory_mebibytes for gpu, a in allocation.gpus.items())
            granted[holder] = (allocation.cores, mebibytes)
    return granted


def _mebibytes(blocks: int) -> int:
    return blocks * BLOCK_BYTES >> 20
