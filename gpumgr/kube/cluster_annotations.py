"""The annotations that agents and the scheduler exchange, version 1: their JSON and its strict validation.

The agent writes `gpumgr.io/inventory` on a node: its GPUs, and what each pod holds, unless the pod's placement covers that. The scheduler
writes `gpumgr.io/placement` on a pod in the Binding: the GPUs of each container.

Readers ignore unknown fields, because a later release may add one within a version. Equal values have equal texts.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gpumgr.common import foreign_text
from gpumgr.common.foreign_text import UnreadableText, convert
from gpumgr.common.units import CORES_PER_GPU, Amounts
from gpumgr.placement.devices import NVLINK_SCORE, Level, MigProfile, Topology
from gpumgr.placement.matrix import MAX_GPUS

INVENTORY_ANNOTATION: Final = "gpumgr.io/inventory"
PLACEMENT_ANNOTATION: Final = "gpumgr.io/placement"
#: gpu-manager's annotations of a pod (see the module pod_annotations).
ASSIGNED: Final = "tencent.com/gpu-assigned"
PREDICATE_INDEX: Final = "tencent.com/predicate-gpu-idx-"
PREDICATE_NODE: Final = "tencent.com/predicate-node"
PREDICATE_TIME: Final = "tencent.com/predicate-time"
#: Kubernetes' limit for all annotations of an object together.
MAX_ANNOTATIONS_BYTES: Final = 262_144

TopologyManagerPolicy = Literal["none", "best-effort", "restricted", "single-numa-node", "unknown"]
Uuid = Annotated[str, Meta(min_length=1, max_length=96)]
Text = Annotated[str, Meta(max_length=256)]
Mebibytes = Annotated[int, Meta(ge=0, le=1 << 40)]
Cores = Annotated[int, Meta(ge=0, le=CORES_PER_GPU)]
Position = Annotated[int, Meta(ge=0, lt=MAX_GPUS)]
NvmlIndex = Annotated[int, Meta(ge=0, le=4096)]
#: -1: not known.
NumaNode = Annotated[int, Meta(ge=-1, le=4096)]

#: A number of replicas; each is for one container with HAMi's resources. Once hami.device_split_count is lowered, more can be held than
#: offered.
Replicas = Annotated[int, Meta(ge=0, le=4096)]
#: Multiplies the memory or the cores of a GPU for containers with HAMi's resources.
Factor = Annotated[float, Meta(ge=0.01, le=100)]

#: The most memory slices of a GPU that a reader accepts. NVIDIA's GPUs have 8.
MAX_MIG_SLICES: Final = 32
MigStart = Annotated[int, Meta(ge=0, lt=MAX_MIG_SLICES)]
MigSize = Annotated[int, Meta(ge=1, le=MAX_MIG_SLICES)]
ProfileName = Annotated[str, Meta(min_length=1, max_length=64)]
#: The fields of a MigProfile in their order.
MigRow = tuple[
    ProfileName,
    Annotated[int, Meta(ge=0, le=1 << 31)],
    Annotated[int, Meta(ge=1, le=1 << 40)],
    MigSize,
    MigSize,
    Annotated[tuple[MigStart, ...], Meta(max_length=MAX_MIG_SLICES)],
]
_Gpu = TypeVar("_Gpu", int, str)


class Share(msgspec.Struct, Generic[_Gpu], frozen=True, array_like=True):
    """What is held of a GPU, in JSON [GPU, cores, MiB, slices, replicas]. A missing number counts as 0.

    The GPU is its position in `gpus` in an inventory, its UUID in a placement. A whole GPU has 100 cores and all its MiB. `slices`: the
    memory slices of a MIG device, slice n as bit n. `replicas`: how many replicas of the GPU (HAMi's resources) the pod holds.
    """

    gpu: _Gpu
    cores: Cores
    memory_mebibytes: Mebibytes
    slices: Annotated[int, Meta(ge=0, lt=1 << MAX_MIG_SLICES)] = 0
    replicas: Replicas = 0

    @property
    def held(self) -> tuple[_Gpu, Amounts]:
        return self.gpu, Amounts(self.cores, self.memory_mebibytes, slices=self.slices, replicas=self.replicas)


class InventoryGpu(msgspec.Struct, frozen=True, kw_only=True):
    """`memory`: the MiB that the agent offers. `model` is "" if unknown. `index`: NVML's index where it differs from the position in
    `gpus`. `gpus` lacks GPUs that the driver can't describe. `replicas`: how many containers with HAMi's resources may share the GPU.
    `mig`: the profiles of MIG devices that the agent creates on demand (`mig_rows`); such a GPU is not shared."""

    uuid: Uuid
    model: Text = ""
    memory: Mebibytes
    numa: NumaNode = -1
    healthy: bool = True
    cordoned: bool = False
    index: NvmlIndex | UnsetType = UNSET
    replicas: Replicas = 0
    mig: Annotated[tuple[MigRow, ...], Meta(min_length=1, max_length=64)] | UnsetType = UNSET

    @property
    def mig_profiles(self) -> tuple[MigProfile, ...]:
        return () if self.mig is UNSET else _profiles(self.mig)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """`gpus` are in the order of NVML's indices. `levels` is the matrix of the link scores between the GPUs (`score_matrix`).

    `other`: pod UID (the allocation's id if the pod is not known) -> what the pod holds. `scaling`: the factors of memory and cores for
    HAMi's resources, if the node offers these. `enforcement`: the text of the annotation gpumgr.io/enforcement.
    """

    version: Literal[1] = 1
    driver: Text = ""
    enforcement: Text = ""
    topology_manager: TopologyManagerPolicy = msgspec.field(name="topologyManager", default="unknown")
    gpus: Annotated[tuple[InventoryGpu, ...], Meta(max_length=MAX_GPUS)] = ()
    levels: tuple[tuple[Annotated[int, Meta(ge=0, le=100_000)], ...], ...] = ()
    other: Mapping[str, tuple[Share[Position], ...]] = {}
    scaling: tuple[Factor, Factor] | UnsetType = UNSET

    @property
    def held(self) -> Mapping[str, tuple[tuple[int, Amounts], ...]]:
        """Pod UID -> (position of the GPU, amounts)."""
        return {uid: tuple(share.held for share in shares) for uid, shares in self.other.items()}

    def topology(self) -> Topology:
        """Raises ValueError if `levels` is no valid matrix."""
        size = len(self.gpus)
        if len(self.levels) != size or any(len(row) != size for row in self.levels):
            raise ValueError(f"levels is not a matrix of {size} x {size}, one row and one column for each GPU")
        if any(self.levels[a][b] != self.levels[b][a] for a in range(size) for b in range(a)):
            raise ValueError("levels is not symmetric")
        return _topology(self.levels)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """`containers`: name -> the container's GPUs; empty if the agent must choose the GPUs (Topology Manager policy other than none)."""

    version: Literal[1] = 1
    node: Annotated[str, Meta(min_length=1, max_length=253)]
    containers: Mapping[str, tuple[Share[Uuid], ...]] = {}

    @property
    def named(self) -> Mapping[str, tuple[tuple[str, Amounts], ...]]:
        """Container name -> (UUID of the GPU, amounts)."""
        return {name: tuple(share.held for share in shares) for name, shares in self.containers.items()}


def mig_rows(profiles: Iterable[MigProfile]) -> tuple[MigRow, ...] | UnsetType:
    return tuple((p.name, p.number, p.memory_mebibytes, p.slices, p.size, p.starts) for p in profiles) or UNSET


def encode(value: Inventory | Placement) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def decode_inventory(text: str) -> Inventory:
    """Raises ValueError, which says what is wrong."""
    inventory = decode_json(text, Inventory)
    if len({gpu.uuid for gpu in inventory.gpus}) != len(inventory.gpus):
        raise ValueError("a UUID appears twice in gpus")
    indices = {position if gpu.index is UNSET else gpu.index for position, gpu in enumerate(inventory.gpus)}
    if len(indices) != len(inventory.gpus):
        raise ValueError("an index appears twice in gpus")
    inventory.topology()
    for rows in {gpu.mig for gpu in inventory.gpus if gpu.mig is not UNSET}:
        _profiles(rows)
    for uid, shares in inventory.other.items():
        positions = {share.gpu for share in shares}
        if len(positions) != len(shares) or any(position >= len(inventory.gpus) for position in positions):
            raise ValueError(f"other[{uid[:64]!r}] names a GPU twice, or one that is not in gpus")
    return inventory


def decode_placement(text: str) -> Placement:
    """Raises ValueError, which says what is wrong."""
    placement = decode_json(text, Placement)
    for name, shares in placement.containers.items():
        if not shares or len({share.gpu for share in shares}) != len(shares):
            raise ValueError(f"containers[{name[:64]!r}] names no GPU, or one twice")
    return placement


_T = TypeVar("_T")


def decode_json(text: str, kind: type[_T], fault: str = "not valid") -> _T:
    """Raises ValueError, which says what is wrong. Its message begins with `fault` if the text is not JSON of this type."""
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) > MAX_ANNOTATIONS_BYTES:
        raise ValueError(f"{len(encoded)} bytes are too long for an annotation")
    try:
        return foreign_text.decode_json(encoded, kind)
    except UnreadableText as error:
        raise ValueError(f"{fault}: {error}") from error


@lru_cache(maxsize=64)
def _profiles(rows: tuple[MigRow, ...]) -> tuple[MigProfile, ...]:
    """Returns the same object for all GPUs with equal profiles. Raises ValueError."""
    profiles = tuple(convert(dict(zip(MigProfile.__struct_fields__, row, strict=True)), MigProfile) for row in rows)
    ordered = all(
        p.starts == tuple(sorted(set(p.starts))) and max(p.starts, default=0) + p.size <= MAX_MIG_SLICES for p in profiles
    )
    if not ordered or len({p.name for p in profiles}) != len(profiles):
        raise ValueError("mig has a profile twice, or with starts that are not ascending or too high")
    return profiles


@lru_cache(maxsize=64)
def _topology(levels: tuple[tuple[int, ...], ...]) -> Topology:
    """Returns the same object for all nodes with equal topologies."""
    links = [[(Level.PSB, 0) if a == b else _link(value) for b, value in enumerate(row)] for a, row in enumerate(levels)]
    return Topology(
        levels=tuple(tuple(level for level, _ in row) for row in links),
        nvlinks=tuple(tuple(count for _, count in row) for row in links),
    )


def _link(value: int) -> tuple[Level, int]:
    nvlinks, level = divmod(value, NVLINK_SCORE)
    if level not in Level._value2member_map_:
        raise ValueError(
            f"{value} in levels is no pair score: expected one of {', '.join(str(int(each)) for each in Level)}, "
            "plus 100 for each NVLink"
        )
    return Level(level), nvlinks
