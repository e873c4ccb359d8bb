"""gpu-manager's three answers as plain JSON data: pure functions.

Source of the shapes: proto/display/api.proto, as grpc-gateway v1 writes it. Fields have the names in that file. Fields that are zero or
empty are left out; entries of maps and lists never are. An answer without any entry is {}.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.common.units import BLOCK_BYTES, CORES_PER_GPU, GpuName
from gpumgr.ledger.ids import count
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.usage.node_use import ContainerUse
from gpumgr.placement.pods import PodView
from gpumgr.placement.topology.devices import Gpu

_MIB = 1 << 20

Message = dict[str, Any]


def graph_message(text: str) -> Message:
    """GraphResponse: `text` is the tree."""
    return _filled({"graph": text})


def version_message(version: str) -> Message:
    """VersionResponse."""
    return _filled({"version": version})


def usage_message(report: NodeReport, pods: Pods) -> Message:
    """UsageResponse: the use of GPUs by pod and container.

    A pod's key is its UID in the API server (for a static pod, the mirror pod's UID), or "namespace/name" if the UID is unknown; a pod
    without either is left out. The key of a container without a known name is its allocation's id. An init container is listed only while
    it has a process, and a GPU only while the driver lists it, as with gpu-manager.
    """
    if report.use is None or not report.nvml_up:
        return {}  # the last numbers are outdated
    ledger = report.view.ledger
    gpus = report.view.inventory.gpus(ledger.gpu_registry)
    by_pod: dict[str, list[ContainerUse]] = {}
    views: dict[str, PodView | None] = {}
    for use in report.use.of(ledger.allocations).containers.values():
        idle_init = ledger.allocations[use.allocation].init and not use.processes
        view = find_pod(pods, use.pod, use.pod_uid)
        name = view.uid if view else use.pod_uid or "/".join(use.pod or ())
        if name and use.gpu in gpus and not idle_init:
            by_pod.setdefault(name, []).append(use)
            views[name] = view
    return _filled({"usage": {name: _pod(by_pod[name], views[name], ledger, gpus) for name in sorted(by_pod)}})


def _pod(uses: Iterable[ContainerUse], view: PodView | None, ledger: Ledger, gpus: Mapping[GpuName, Gpu]) -> Message:
    """ContainerStat."""
    stat: dict[str, Message] = {}
    requests: dict[str, tuple[int, int]] = {}
    namespace = view.namespace if view else ""
    for use in sorted(uses, key=lambda use: (use.container or use.allocation, gpus[use.gpu].index)):
        container = use.container or use.allocation
        stat.setdefault(container, {"dev": []})["dev"].append(_device(use, gpus[use.gpu]))
        namespace = namespace or (use.pod or ("",))[0]
        allocation = ledger.allocations[use.allocation]
        requests[container] = count(allocation.held("core")), count(allocation.held("memory"))
    for spec in view.containers if view else ():
        if spec.kind == "app" or spec.name in stat:
            requests[spec.name] = spec.cores, spec.memory_blocks
    return _filled(
        {
            "stat": stat,
            "project": namespace,
            "user": (view and view.submitter) or "",
            "cluster": (view and view.cluster) or "",
            "spec": {name: _spec(*requests[name], stat.get(name)) for name in sorted(requests)},
        }
    )


def _spec(cores: int, blocks: int, devices: Message | None) -> Message:
    """Spec. A container that requests no memory has all memory of its GPUs."""
    of_gpus = sum(device.get("device_mem", 0) for device in devices["dev"]) if devices else 0
    return _filled({"gpu": _short(cores / CORES_PER_GPU), "mem": blocks * (BLOCK_BYTES // _MIB) or of_gpus})


def _device(use: ContainerUse, gpu: Gpu) -> Message:
    """DeviceInfo."""
    return _filled(
        {
            "id": gpu.bus_id or "",
            "card_idx": str(gpu.index),
            "gpu": _short(100 * (use.utilization_ratio or 0.0)),
            "mem": (use.memory_bytes or 0) // _MIB,
            "pids": list(use.pids),
            "device_mem": gpu.memory_mebibytes,
        }
    )


def _short(number: float) -> float:
    """Rounded to 4 digits; a whole number as an int."""
    rounded = round(number, 4)
    return int(rounded) if rounded == int(rounded) else rounded


def _filled(fields: Message) -> Message:
    return {name: value for name, value in fields.items() if value}
