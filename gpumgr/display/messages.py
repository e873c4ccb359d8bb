"""gpu-manager's three answers as plain JSON data: pure functions.

Source of the shapes: proto/display/api.proto, as grpc-gateway v1 writes it. Fields have their names from there; fields that are zero
or empty are left out; entries of maps and lists never are. An answer of which nothing is left is {}.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from gpumgr.agent.picture import Picture
from gpumgr.agent.ports import Pods
from gpumgr.allocator.ledger import Ledger
from gpumgr.allocator.pods import PodView
from gpumgr.topology.devices import Gpu
from gpumgr.units import BLOCK_BYTES, CORES_PER_GPU, GpuName
from gpumgr.usage.picture import ContainerUse

_MIB = 1 << 20

Message = dict[str, Any]


def graph_message(text: str) -> Message:
    """GraphResponse: `text` is the tree."""
    return _filled({"graph": text})


def version_message(version: str) -> Message:
    """VersionResponse."""
    return _filled({"version": version})


def usage_message(picture: Picture, pods: Pods) -> Message:
    """UsageResponse: who uses what, by pod and container.

    A pod stands under its UID as the API server has it (of a static pod the mirror's); one whose UID nobody knows under
    "namespace/name"; one of which neither is known is left out. A container without a known name stands under its allocation's.
    An init container is there only while it runs something, and a GPU only while the driver shows it, as with gpu-manager.
    """
    if picture.use is None or not picture.nvml_up:
        return {}  # numbers from before the driver went away would look like news
    ledger = picture.view.ledger
    gpus = picture.view.inventory.gpus(ledger.cards)
    by_pod: dict[str, list[ContainerUse]] = {}
    views: dict[str, PodView | None] = {}
    for use in picture.use.of(ledger.allocations).containers.values():
        idle_init = ledger.allocations[use.allocation].init and not use.processes
        view = _view(use, pods)
        name = view.uid if view else use.pod_uid or "/".join(use.pod or ())
        if name and use.gpu in gpus and not idle_init:
            by_pod.setdefault(name, []).append(use)
            views[name] = view
    return _filled({"usage": {name: _pod(by_pod[name], views[name], ledger, gpus) for name in sorted(by_pod)}})


def _view(use: ContainerUse, pods: Pods) -> PodView | None:
    """The pod as the API server has it, unless that is another life of its name."""
    view = pods.by_uid(use.pod_uid) if use.pod_uid else None
    view = view or (pods.get(use.pod) if use.pod else None)
    return view if view and use.pod_uid in (None, view.uid, view.runtime_uid) else None


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
        requests[container] = allocation.core_count, allocation.block_count
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
    """Spec. Who asked for no memory has all that its GPUs have."""
    on_them = sum(device.get("device_mem", 0) for device in devices["dev"]) if devices else 0
    return _filled({"gpu": _short(cores / CORES_PER_GPU), "mem": blocks * (BLOCK_BYTES // _MIB) or on_them})


def _device(use: ContainerUse, gpu: Gpu) -> Message:
    """DeviceInfo."""
    return _filled(
        {
            "id": gpu.bus_id or "",
            "card_idx": str(gpu.index),
            "gpu": _short(100 * (use.utilization_ratio or 0.0)),
            "mem": (use.memory_bytes or 0) // _MIB,
            "pids": list(use.pids),
            "device_mem": gpu.memory_bytes // _MIB,
        }
    )


def _short(number: float) -> float:
    """Without the noise of binary fractions; a whole number is written as one."""
    rounded = round(number, 4)
    return int(rounded) if rounded == int(rounded) else rounded


def _filled(fields: Message) -> Message:
    return {name: value for name, value in fields.items() if value}
