"""The annotations that agents and the scheduler exchange, version 1: their JSON, and its strict validation.

* `gpumgr.io/inventory` on a node: its GPUs and those allocations that no bound pod's placement annotation explains. Written by the agent.
* `gpumgr.io/placement` on a pod: the GPUs of each container. Written by the scheduler in the Binding.

Both readers ignore unknown fields, since a field may be added within a version. The same value always has the same text.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gpumgr.topology.devices import Level, Topology
from gpumgr.topology.matrix import MAX_GPUS
from gpumgr.topology.scores import NVLINK_SCORE, score_matrix
from gpumgr.units import CORES_PER_GPU

INVENTORY_ANNOTATION: Final = "gpumgr.io/inventory"
PLACEMENT_ANNOTATION: Final = "gpumgr.io/placement"
VERSION: Final = 1
#: Kubernetes' limit for all annotations of an object together.
MAX_ANNOTATIONS_BYTES: Final = 262_144

TopologyManagerPolicy = Literal["none", "best-effort", "restricted", "single-numa-node", "unknown"]
Uuid = Annotated[str, Meta(min_length=1, max_length=96)]
Text = Annotated[str, Meta(max_length=256)]
Mebibytes = Annotated[int, Meta(ge=0, le=1 << 40)]
Cores = Annotated[int, Meta(ge=0, le=CORES_PER_GPU)]
Position = Annotated[int, Meta(ge=0, lt=MAX_GPUS)]
NvmlIndex = Annotated[int, Meta(ge=0, le=4096)]
#: A NUMA node; -1: not known.
NumaNode = Annotated[int, Meta(ge=-1, le=4096)]

#: How many containers with HAMi's resources may share a GPU; more than the setting allows hold replicas from before it was lowered.
Replicas = Annotated[int, Meta(ge=0, le=4096)]
#: How many times its memory, or its cores, a GPU has for such containers.
Factor = Annotated[float, Meta(ge=0.01, le=100)]

#: (GPU, cores, MiB). In an inventory the GPU is its position in `gpus`, in a placement its UUID. A whole GPU has 100 cores and all its MiB.
OtherShare = tuple[Position, Cores, Mebibytes]
PlacedShare = tuple[Uuid, Cores, Mebibytes]


class InventoryGpu(msgspec.Struct, frozen=True, kw_only=True):
    """`memory` is in MiB: what the agent offers of this GPU. `model` is empty if the driver does not report it. `index` is NVML's; it is
    written only if the GPU's position in `gpus` is another one, because the driver can't describe a GPU before it. `replicas`: how many
    containers with HAMi's resources may share it; it is not written where none may, and by older agents."""

    uuid: Uuid
    model: Text = ""
    memory: Mebibytes
    numa: NumaNode = -1
    healthy: bool = True
    cordoned: bool = False
    index: NvmlIndex | UnsetType = UNSET
    replicas: Replicas | UnsetType = UNSET


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """`gpus` are in the order of NVML's indices. `levels` has a row for each GPU; see `levels_of`.

    `other`: pod UID -> its allocations; `other_replicas`: of a pod with HAMi's resources how many replicas it holds for each share,
    unless that is one for each. `scaling`: the factors of memory and cores for such pods; it is written where `replicas` are.
    `enforcement` is the text of the annotation gpumgr.io/enforcement.
    """

    version: Literal[1] = 1
    driver: Text = ""
    enforcement: Text = ""
    topology_manager: TopologyManagerPolicy = msgspec.field(name="topologyManager", default="unknown")
    gpus: Annotated[tuple[InventoryGpu, ...], Meta(max_length=MAX_GPUS)] = ()
    levels: tuple[tuple[Annotated[int, Meta(ge=0, le=100_000)], ...], ...] = ()
    other: Mapping[str, tuple[OtherShare, ...]] = {}
    other_replicas: Mapping[str, tuple[Replicas, ...]] | UnsetType = msgspec.field(name="otherReplicas", default=UNSET)
    scaling: tuple[Factor, Factor] | UnsetType = UNSET

    def topology(self) -> Topology:
        """The topology that `levels` describes. Raises ValueError."""
        size = len(self.gpus)
        if len(self.levels) != size or any(len(row) != size for row in self.levels):
            raise ValueError(f"levels is not a matrix of {size} x {size}, one row and one column for each GPU")
        if any(self.levels[a][b] != self.levels[b][a] for a in range(size) for b in range(a)):
            raise ValueError("levels is not symmetric")
        return _topology(self.levels)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """`containers`: container name -> its GPUs; empty if the node's agent chooses the GPUs (Topology Manager policy other than none)."""

    version: Literal[1] = 1
    node: Annotated[str, Meta(min_length=1, max_length=253)]
    containers: Mapping[str, tuple[PlacedShare, ...]] = {}


def levels_of(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """The matrix for `Inventory.levels`: the pairs' scores, which are the value of `Level` plus 100 for each NVLink; 0 = itself."""
    return score_matrix(topology)


def encode(value: Inventory | Placement) -> str:
    """Compact JSON with sorted keys."""
    return msgspec.json.encode(value, order="sorted").decode()


def decode_inventory(text: str) -> Inventory:
    """Raises ValueError that says what is wrong: no JSON, another version, values out of range, GPUs that contradict each other."""
    inventory = _decode(text, Inventory)
    if len({gpu.uuid for gpu in inventory.gpus}) != len(inventory.gpus):
        raise ValueError("a UUID appears twice in gpus")
    indices = {position if gpu.index is UNSET else gpu.index for position, gpu in enumerate(inventory.gpus)}
    if len(indices) != len(inventory.gpus):
        raise ValueError("an index appears twice in gpus")
    inventory.topology()
    for uid, shares in inventory.other.items():
        positions = [position for position, _, _ in shares]
        if len(set(positions)) != len(positions) or any(position >= len(inventory.gpus) for position in positions):
            raise ValueError(f"other[{uid[:64]!r}] names a GPU twice, or one that is not in gpus")
    replicas = {} if inventory.other_replicas is UNSET else inventory.other_replicas
    if any(len(counts) != len(inventory.other.get(uid, ())) for uid, counts in replicas.items()):
        raise ValueError("otherReplicas has not one number for each share")
    return inventory


def decode_placement(text: str) -> Placement:
    """Raises ValueError that says what is wrong: no JSON, another version, values out of range, a GPU twice in a container."""
    placement = _decode(text, Placement)
    for name, shares in placement.containers.items():
        if not shares or len({uuid for uuid, _, _ in shares}) != len(shares):
            raise ValueError(f"containers[{name[:64]!r}] names no GPU, or one twice")
    return placement


_T = TypeVar("_T", Inventory, Placement)


class _Versioned(msgspec.Struct):
    version: int


def _decode(text: str, kind: type[_T]) -> _T:
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) > MAX_ANNOTATIONS_BYTES:
        raise ValueError(f"{len(encoded)} bytes are too long for an annotation")
    try:
        if (version := msgspec.json.decode(encoded, type=_Versioned).version) != VERSION:
            raise ValueError(f"version {version} is not supported; this program reads version {VERSION}")
        return msgspec.json.decode(encoded, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"not valid: {error}") from error


@lru_cache(maxsize=64)
def _topology(levels: tuple[tuple[int, ...], ...]) -> Topology:
    """One object for all nodes with equal topologies."""
    links = [[(Level.PSB, 0) if a == b else _link(value) for b, value in enumerate(row)] for a, row in enumerate(levels)]
    return Topology(
        levels=tuple(tuple(level for level, _ in row) for row in links),
        nvlinks=tuple(tuple(count for _, count in row) for row in links),
    )


def _link(value: int) -> tuple[Level, int]:
    nvlinks, level = divmod(value, NVLINK_SCORE)
    if level not in Level._value2member_map_:
        raise ValueError(
            f"{value} in levels is no pair level: {', '.join(str(int(each)) for each in Level)}, plus 100 for each NVLink"
        )
    return Level(level), nvlinks
