"""The simulation's nodes and pods, and what is free. Amounts in `*_milli` are thousandths of a GPU or of a CPU."""

from collections import Counter
from collections.abc import Iterable, MutableSequence, Sequence
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta

from gpumgr.placement.matrix import MAX_GPUS
from gpumgr.placement.requests import UNCONSTRAINED, Constraints

GPU_MILLI: Final = 1000
#: The largest number in a file.
MOST: Final = 10**12
Amount = Annotated[int, Meta(ge=0, le=MOST)]
GpuCount = Annotated[int, Meta(ge=0, le=MAX_GPUS)]
#: A policy keeps the state of all nodes for at most this many requests, because more could fill the memory.
MAX_SHAPES: Final = 512

#: Positions of GPUs on a node.
Gpus = tuple[int, ...]
_T = TypeVar("_T")


class Random(Protocol):
    """The part of `random.Random` that is used."""

    def random(self) -> float: ...
    def choice(self, seq: Sequence[_T], /) -> _T: ...
    def shuffle(self, x: MutableSequence[Any], /) -> None: ...


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An empty node, as a row of the file. `memory_blocks`: blocks of 256 MiB of each GPU; 0: the file has no GPU memory."""

    name: str
    gpus: GpuCount = 0
    model: str = ""
    memory_blocks: Amount = 0
    cpu_milli: Amount = 0
    ram_mebibytes: Amount = 0


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `gpu_milli` is on each of the `gpus`; `memory_blocks` on all of them together. `constraints` has only models."""

    gpus: int = 0
    gpu_milli: int = 0
    memory_blocks: int = 0
    cpu_milli: int = 0
    ram_mebibytes: int = 0
    constraints: Constraints = UNCONSTRAINED

    @property
    def total_milli(self) -> int:
        return self.gpus * self.gpu_milli

    @property
    def share(self) -> bool:
        return 0 < self.gpu_milli < GPU_MILLI

    @property
    def kind(self) -> str:
        """The class of the pod in results: none, share, or the number of whole GPUs."""
        return "share" if self.share else str(self.gpus) if self.gpus else "none"


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the trace. `duration_seconds` None: the pod does not end."""

    name: str
    shape: Shape
    priority: int = 0
    arrival_seconds: float = 0.0
    duration_seconds: float | None = None


class Node:
    """What is free on a node. `kinds` counts its pods by kind."""

    __slots__ = ("blocks", "cpu_milli", "free_milli", "gpu_milli", "kinds", "ram_mebibytes", "spec")

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.cpu_milli, self.ram_mebibytes = spec.cpu_milli, spec.ram_mebibytes
        self.gpu_milli = [GPU_MILLI] * spec.gpus
        self.blocks = [spec.memory_blocks] * spec.gpus
        self.free_milli = GPU_MILLI * spec.gpus
        self.kinds: Counter[str] = Counter()

    def idle_gpus(self) -> list[int]:
        full = self.spec.memory_blocks
        pairs = enumerate(zip(self.gpu_milli, self.blocks, strict=True))
        return [gpu for gpu, (milli, blocks) in pairs if milli == GPU_MILLI and blocks == full]

    def sharable(self, shape: Shape) -> list[int]:
        """The GPUs with room for the share."""
        milli, blocks = shape.gpu_milli, shape.memory_blocks
        pairs = enumerate(zip(self.gpu_milli, self.blocks, strict=True))
        return [gpu for gpu, (free, left) in pairs if free >= milli and left >= blocks]

    def hosts(self, shape: Shape) -> bool:
        if self.cpu_milli < shape.cpu_milli or self.ram_mebibytes < shape.ram_mebibytes:
            return False
        if not shape.gpus:
            return True
        if self.free_milli < shape.gpus * shape.gpu_milli or not shape.constraints.allows("", self.spec.model):
            return False
        if shape.share:
            return bool(self.sharable(shape))
        return len(self.idle_gpus()) >= shape.gpus and shape.gpus * self.spec.memory_blocks >= shape.memory_blocks

    def tightest(self, shape: Shape) -> Gpus:
        """For a share, the GPU with the least free among the GPUs with room; otherwise the first idle GPUs. The pod must fit."""
        if shape.share:
            return (min(self.sharable(shape), key=lambda gpu: (self.gpu_milli[gpu], self.blocks[gpu])),)
        return tuple(self.idle_gpus()[: shape.gpus])

    def change(self, shape: Shape, gpus: Gpus, sign: int) -> None:
        """Places (`sign` -1) or removes (1) a pod."""
        self.cpu_milli += sign * shape.cpu_milli
        self.ram_mebibytes += sign * shape.ram_mebibytes
        self.free_milli += sign * len(gpus) * shape.gpu_milli
        for gpu in gpus:
            self.gpu_milli[gpu] += sign * shape.gpu_milli
            self.blocks[gpu] += sign * (shape.memory_blocks if shape.share else self.spec.memory_blocks)
        self.kinds[shape.kind] -= sign


class Placement(msgspec.Struct, frozen=True):
    """`node`: the node's position in the cluster."""

    node: int
    gpus: Gpus


class Change(msgspec.Struct, frozen=True):
    """A pod was placed (`sign` -1) or removed (1). `pod`: its position in the trace."""

    pod: int
    shape: Shape
    where: Placement
    sign: int


class Cluster:
    """`changes`: all changes so far, so that a policy computes only the nodes that have changed."""

    def __init__(self, specs: Iterable[NodeSpec]) -> None:
        self.nodes: Sequence[Node] = tuple(map(Node, specs))
        self.changes: list[Change] = []
        self.capacity_milli = sum(node.free_milli for node in self.nodes)

    def change(self, change: Change) -> None:
        self.nodes[change.where.node].change(change.shape, change.where.gpus, change.sign)
        self.changes.append(change)

    def changed(self, seen: int) -> Iterable[int]:
        """The positions of the nodes that changed after the first `seen` changes."""
        return dict.fromkeys(each.where.node for each in self.changes[seen:])
