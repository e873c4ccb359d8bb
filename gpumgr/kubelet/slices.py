"""The ResourceSlice of this node (resource.k8s.io/v1): its content, and which fields of it the API server has dropped. Pure.

kube-scheduler takes the first devices that fit, so the order of the slice decides the placement: claims for whole GPUs fill an empty node
by groups of close GPUs. The order is fixed, because every change makes kube-scheduler try all pending pods again. Only the hardware, its
health, cordons and settings change a slice.

Two attributes describe NVLink, for `matchAttribute`. Each GPU has both, because CEL fails on absent attributes:
- `island`: GPUs that NVLink connects, directly or through other GPUs. A GPU without NVLink is an island by itself.
- `pair`: the two GPUs with the highest link score (`score_matrix`; among equal scores the first in the order), then the next two, and so
  on. GPUs on different NUMA nodes without NVLink are no pair. A GPU without a partner has its own value.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import BLOCK_BYTES, BLOCK_MEBIBYTES, CORES_PER_GPU, DRA_DRIVER, GpuName
from gpumgr.ledger.claims import device_name
from gpumgr.placement.devices import Gpu, Level, NodeSnapshot, Topology, score_matrix
from gpumgr.placement.labels import architecture_of, capability_of
from gpumgr.placement.tree import build_tree, fragment_order

SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
#: The taint of a GPU that the driver no longer lists.
LOST_TAINT: Final = f"{DRA_DRIVER}/lost"
_STANDARD: Final = "resource.kubernetes.io"
#: Kubernetes' limit for an attribute, in bytes.
_MAX_TEXT: Final = 64
#: Kubernetes' limit for a name, minus the prefix of the probe's name.
_MAX_NAME: Final = 253 - len("probe-")
#: In memory blocks. A capacity must have room for its minimum and one more step.
_MIN_BLOCKS: Final = 2
Json = dict[str, Any]


class Taint(msgspec.Struct, frozen=True, kw_only=True):
    """NoSchedule: the device is not allocated to new claims. NoExecute: pods that use it are deleted, too."""

    key: str
    effect: Literal["NoSchedule", "NoExecute"] = "NoSchedule"


class SliceDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as published. `name` is permanent. `enforcement`: the mechanisms that limit shares, such as nvml-memory+limiter. `shared`:
    several claims can be allocated on it."""

    name: str
    gpu: Gpu
    island: str
    pair: str
    enforcement: str
    driver_version: str | None = None
    taints: tuple[Taint, ...] = ()
    shared: bool = True


def slice_devices(
    snapshot: NodeSnapshot,
    names: Mapping[str, GpuName],
    *,
    enforcement: str,
    taints: Mapping[GpuName, tuple[Taint, ...]],
    shared: bool = True,
) -> tuple[SliceDevice, ...]:
    """The devices, in the order of the slice. `names`: UUID -> the ledger's name, for the GPUs to publish. The API server refuses a GPU
    with less than two blocks of memory, so it is left out. A GPU without known memory is not shared."""
    order = fragment_order(build_tree(snapshot.topology))
    rows = sorted(range(len(snapshot.gpus)), key=lambda row: order[row])
    islands, pairs = _islands(snapshot.topology), _pairs(snapshot.topology, rows)
    return tuple(
        SliceDevice(
            name=device_name(names[gpu.uuid]),
            gpu=gpu,
            island=f"nvlink-{snapshot.gpus[islands[row]].index}",
            pair=f"pair-{snapshot.gpus[pairs[row]].index}",
            enforcement=enforcement,
            driver_version=snapshot.driver_version,
            taints=taints.get(names[gpu.uuid], ()),
            shared=shared and gpu.memory_bytes is not None,
        )
        for row, gpu in ((row, snapshot.gpus[row]) for row in rows)
        if gpu.uuid in names and (gpu.memory_bytes is None or gpu.memory_blocks >= _MIN_BLOCKS)
    )


def with_lost(before: Sequence[SliceDevice], now: Sequence[SliceDevice]) -> tuple[SliceDevice, ...]:
    """The devices of `now`, and the devices that only `before` has. The latter get LOST_TAINT and stay, because claims may hold them. Keeps
    the order of `before`, because the topology without the lost devices has another order."""
    found = {device.name: device for device in now}
    lost = [device for device in before if device.name not in found]
    if not lost:
        return tuple(now)
    places = {device.name: place for place, device in enumerate(before)}
    taint = Taint(key=LOST_TAINT)
    tainted = [device if taint in device.taints else replace(device, taints=(*device.taints, taint)) for device in lost]
    return tuple(sorted((*now, *tainted), key=lambda device: places.get(device.name, len(places))))


def slice_name(node: str) -> str:
    """A fixed name, so that a crash leaves no second slice. kube-scheduler reads the slices of a pool in the order of their names."""
    name = f"00000-{DRA_DRIVER}-{node}"
    return name if len(name) <= _MAX_NAME else f"00000-{DRA_DRIVER}-{hashlib.sha256(node.encode()).hexdigest()[:32]}"


def resource_slice(node: str, node_uid: str, devices: Sequence[SliceDevice], *, generation: int = 1) -> Json:
    """The only slice of the node's pool. It is deleted with its owner, the Node."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid, "controller": True}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": slice_name(node), "ownerReferences": [owner]},
        "spec": {
            "driver": DRA_DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": [_device(device) for device in devices],
        },
    }


def probe_slice(node: str) -> Json:
    """A slice for a request with dryRun, which shows what the API server drops. The request must be a create, because an update keeps these
    fields if the stored slice has them."""
    gpu = Gpu(index=0, uuid="", minor=None, bus_id=None, model=None, memory_bytes=_MIN_BLOCKS * BLOCK_BYTES)
    device = SliceDevice(name="probe", gpu=gpu, island="", pair="", enforcement="", taints=(Taint(key=LOST_TAINT),))
    probe = resource_slice(node, "", [device])
    return {**probe, "metadata": {"name": f"probe-{slice_name(node)}"}}


class StoredSlice(msgspec.Struct, frozen=True, kw_only=True):
    """`version`: the resourceVersion."""

    uid: str
    version: str


def stored_slice(item: Mapping[str, Any]) -> StoredSlice:
    """Raises KeyError or TypeError for an object that is no ResourceSlice."""
    return StoredSlice(uid=str(item["metadata"]["uid"]), version=str(item["metadata"]["resourceVersion"]))


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """What the API server did not store. `sharing` True: the fields for sharing, so no device can be shared. False: the taints, so tainted
    devices would be allocated."""

    sentence: str
    sharing: bool


def dropped(sent: Json, stored: Mapping[str, Any]) -> Dropped | None:
    """What the API server removed from `sent` in its answer `stored`. Raises what `stored_slice` raises."""
    pairs = list(zip(sent["spec"]["devices"], stored["spec"].get("devices") or (), strict=False))
    if any(_shares(ours) and not _shares(theirs) for ours, theirs in pairs):
        return Dropped(
            sharing=True,
            sentence="the API server has dropped allowMultipleAllocations and requestPolicy from the ResourceSlice: the feature gate "
            "DRAConsumableCapacity is off, so GPUs can't be shared and none is offered; use Kubernetes 1.36 or later, where it is on by "
            "default, or switch it on in kube-apiserver, kube-scheduler and kubelet (1.34 and 1.35)",
        )
    if any(ours.get("taints") and not theirs.get("taints") for ours, theirs in pairs):
        return Dropped(
            sharing=False,
            sentence="the API server drops the taints of devices: the feature gate DRADeviceTaints is off, so GPUs that do not work or "
            "are cordoned are left out of the ResourceSlice instead; use Kubernetes 1.36 or later, where it is on by default, or switch "
            "it on in kube-apiserver, kube-scheduler and kube-controller-manager (1.34 and 1.35)",
        )
    return None


def offered(devices: Sequence[SliceDevice], loss: Dropped | None) -> tuple[SliceDevice, ...]:
    """The devices to publish: none if the API server drops the fields for sharing, only untainted ones if it drops taints."""
    if loss is None:
        return tuple(devices)
    return () if loss.sharing else tuple(device for device in devices if not device.taints)


# -- one device ------------------------------------------------------------------------------------------------------------


def _device(device: SliceDevice) -> Json:
    # In whole blocks, because the API server refuses a value that is no multiple of the step.
    memory = f"{device.gpu.memory_blocks * BLOCK_MEBIBYTES}Mi"
    amounts = {"cores": (str(CORES_PER_GPU), "1")}
    if device.gpu.memory_bytes is not None:
        amounts["memory"] = memory, f"{BLOCK_MEBIBYTES}Mi"
    content: Json = {
        "name": device.name,
        "attributes": dict(_attributes(device)),
        "capacity": {name: {"value": whole} for name, (whole, _) in amounts.items()},
    }
    if device.shared:  # a claim that requests no amount gets the default, the whole capacity
        content["allowMultipleAllocations"] = True
        for name, (whole, step) in amounts.items():
            valid = {"min": step, "max": whole, "step": step}
            content["capacity"][name]["requestPolicy"] = {"default": whole, "validRange": valid}
    if device.taints:
        content["taints"] = [{"key": each.key, "effect": each.effect} for each in device.taints]
    return content


def _attributes(device: SliceDevice) -> Iterator[tuple[str, Json]]:
    """gpumgr's own attributes always have a value. Unknown standard attributes are left out."""
    gpu = device.gpu
    capability = capability_of(gpu.model)
    own = {
        "type": "gpu",
        "uuid": gpu.uuid,
        "productName": gpu.model or "",
        "architecture": ((capability and architecture_of(capability)) or "").replace("-", " ").title(),
        "island": device.island,
        "pair": device.pair,
        "enforcement": device.enforcement,
    }
    standard = {"pciBusID": gpu.bus_id, "pcieRoot": gpu.pcie_chain[0] if gpu.pcie_chain else None}
    yield from ((name, {"string": _cut(text)}) for name, text in own.items())
    yield from ((f"{_STANDARD}/{name}", {"string": _cut(text)}) for name, text in standard.items() if text)
    yield "index", {"int": gpu.index}
    yield "cudaComputeCapability", {"version": "{}.{}.0".format(*capability or (0, 0))}
    yield "driverVersion", {"version": semantic_version(device.driver_version)}
    if gpu.numa_node is not None:
        yield f"{_STANDARD}/numaNode", {"int": gpu.numa_node}


def semantic_version(text: str | None) -> str:
    """Three numbers without leading zeros (semver.org 2.0.0): 580.95.5 for "580.95.05", 0.0.0 for a text that is no version."""
    parts = (text or "").split(".")[:3]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 18 for part in parts):
        return "0.0.0"
    return ".".join([*(str(int(part)) for part in parts), "0", "0"][:3])


def _cut(text: str) -> str:
    return text.encode()[:_MAX_TEXT].decode(errors="ignore")


# -- NVLink ----------------------------------------------------------------------------------------------------------------


def _islands(topology: Topology) -> Mapping[int, int]:
    """Row -> the lowest row among the rows that NVLink connects with it."""
    islands = {row: row for row in range(len(topology))}
    for a, b in combinations(islands, 2):
        if topology.nvlinks[a][b] and islands[a] != islands[b]:
            low, high = sorted((islands[a], islands[b]))
            islands = {row: low if island == high else island for row, island in islands.items()}
    return islands


def _pairs(topology: Topology, order: Sequence[int]) -> Mapping[int, int]:
    """Row -> the row of its pair that is first in `order`."""
    scores, pairs = score_matrix(topology), dict[int, int]()
    close = [(a, b) for a, b in combinations(order, 2) if topology.nvlinks[a][b] or topology.levels[a][b] > Level.SYS]
    for a, b in sorted(close, key=lambda pair: -scores[pair[0]][pair[1]]):  # the sort is stable: equal scores keep their order
        if a not in pairs and b not in pairs:
            pairs[a] = pairs[b] = a
    return {row: pairs.get(row, row) for row in order}


def _shares(device: Mapping[str, Any]) -> bool:
    policies = [each.get("requestPolicy") for each in (device.get("capacity") or {}).values()]
    return bool(device.get("allowMultipleAllocations")) and len(policies) == 2 and all(policies)
