"""A node's GPUs as the scheduler sees them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Final, Literal

import msgspec

from gpumgr.cluster.core.request import NOTHING, GpuType, PodRequest, Shares
from gpumgr.common.units import CORES_PER_GPU, Amounts
from gpumgr.placement.devices import Level, MigProfile, Topology
from gpumgr.placement.mig import has_place
from gpumgr.placement.requests import UNCONSTRAINED, Constraints, Scaling

Naming = Literal["uuid", "index", "none"]
#: What is used of each GPU of a node, by position.
Used = tuple[Amounts, ...]
#: (what is counted: "gpus", "cores" or "memory" in MiB; model; one of PARTS or GPU_PARTS) -> amount.
Totals = Counter[tuple[str, str, str]]

#: "free": on entirely free GPUs. "partial": free on partly used GPUs. "stranded": free on full GPUs, so no pod can get it. "closed": free
#: on unhealthy or cordoned GPUs.
PARTS: Final = ("used", "free", "partial", "stranded", "closed")
#: "full": without free cores, without free memory, or without a place for a MIG device.
GPU_PARTS: Final = ("free", "partial", "full", "closed")


class GpuKind(msgspec.Struct, frozen=True):
    """GPUs that count in the same quotas. `model`: the driver's name. `label`, `pool`: the values of the node's model label and pool label.
    "" if not known. `any_model`: the model is unknown, so they count in the quotas of all models."""

    model: str = ""
    label: str = ""
    pool: str = ""
    any_model: bool = False


#: A GPU's kind, memory in MiB, and scaling (see GpuState): the cost of a request in quotas depends on these.
CountedGpu = tuple[GpuKind, int, Scaling | None]


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `uuid`, `model`: empty on a node without inventory (the annotation in which the agent lists the node's GPUs).
    `memory_mebibytes`: what the node offers. `numa` -1: not known. `index`: NVML's; None: the position on the node. `replicas`: how many
    containers with HAMi's resources may share the GPU. `scaling`: the node's factors for HAMi's resources; None: the scheduler's settings
    apply. `mig`: if not empty, the GPU has no shares, and containers with HAMi's resources get MIG devices of these profiles on demand."""

    uuid: str = ""
    model: str = ""
    memory_mebibytes: int
    numa: int = -1
    healthy: bool = True
    cordoned: bool = False
    index: int | None = None
    replicas: int = 0
    scaling: Scaling | None = None
    mig: tuple[MigProfile, ...] = ()

    @property
    def type(self) -> GpuType:
        return self.model, self.memory_mebibytes, self.scaling

    @property
    def offered(self) -> bool:
        return self.healthy and not self.cordoned

    def has_room(self, used: Amounts, wanted: Amounts) -> bool:
        """Whether the GPU is offered and has room for `wanted` in addition to `used`."""
        after = used + wanted
        replicas = not wanted.replicas or after.replicas <= self.replicas
        if bool(wanted.slices) != bool(self.mig) or used.slices & wanted.slices:
            return False
        return self.offered and after.cores <= CORES_PER_GPU and after.memory_mebibytes <= self.memory_mebibytes and replicas


class NodeState(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A node and its GPUs. `gpus`: in the order of NVML's indices, without GPUs that the driver can't describe; row i of `topology` belongs
    to gpus[i].

    `naming`: how the scheduler names chosen GPUs to the node's agent; "none": the agent chooses. `reported_shares`: pod's UID -> shares
    that the agent reports; they replace the shares in the pod's annotations. `model_label`, `pool`: node labels that quotas refer to.
    `cpu_milli`: CPU for pods, in thousandths; None: not known.
    """

    name: str
    gpus: tuple[GpuState, ...] = ()
    topology: Topology = msgspec.field(default_factory=lambda: Topology(levels=(), nvlinks=()))
    naming: Naming = "uuid"
    reported_shares: Mapping[str, Shares] = msgspec.field(default_factory=dict)
    model_label: str = ""
    pool: str = ""
    cpu_milli: int | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(position if gpu.index is None else gpu.index for position, gpu in enumerate(self.gpus))

    @property
    def positions(self) -> Mapping[str | int, int]:
        by_uuid = {gpu.uuid: position for position, gpu in enumerate(self.gpus)}
        return by_uuid | {index: position for position, index in enumerate(self.indices)}

    @cached_property
    def counted_gpus(self) -> Sequence[CountedGpu]:
        """By position. A node without GPUs counts as one GPU without a model."""
        return tuple(_counted(self.model_label, self.pool, *gpu.type) for gpu in self.gpus or (GpuState(memory_mebibytes=0),))

    def allowed(self, request: PodRequest) -> Sequence[bool]:
        """For each GPU, whether the pod's constraints and quota allow it. If the agent chooses the GPUs, either all are allowed or none,
        because the scheduler can't exclude one."""
        constraints, denied = request.constraints, request.denied
        if constraints == UNCONSTRAINED and not denied:
            return [True] * len(self.gpus)
        chosen_here = self.naming == "none"
        if constraints.unused and chosen_here and len(self.gpus) > 1:
            return [False] * len(self.gpus)
        each = [gpu.type not in denied and constraints.allows(gpu.uuid, gpu.model, mig=bool(gpu.mig)) for gpu in self.gpus]
        return each if not chosen_here or all(each) else [False] * len(each)

    def numa_nodes(self, constraints: Constraints, gpus: int) -> Sequence[int] | None:
        """The NUMA nodes that a container with `gpus` GPUs may be on. Empty: this node is excluded. None: any."""
        if not constraints.same_numa_node or gpus < 2:
            return None
        found = sorted({gpu.numa for gpu in self.gpus})
        return () if self.naming == "none" and len(found) > 1 else [each for each in found if each >= 0]


@lru_cache(maxsize=4096)
def _counted(label: str, pool: str, model: str, memory_mebibytes: int, scaling: Scaling | None) -> CountedGpu:
    """Cached, so that equal GPUs share one object."""
    return GpuKind(model, label, pool), memory_mebibytes, scaling


def node_of_equal_gpus(name: str, cores: int, memory_mebibytes: int) -> NodeState:
    """A node with these totals. Its GPUs count as equal and equally far from each other, as in tkestack's gpu-admission."""
    count = cores // CORES_PER_GPU
    rows = range(count)
    return NodeState(
        name=name,
        gpus=tuple(GpuState(memory_mebibytes=memory_mebibytes // count) for _ in rows),
        topology=Topology(
            levels=tuple(tuple(Level.PSB if a == b else Level.SYS for b in rows) for a in rows), nvlinks=((0,) * count,) * count
        ),
        naming="index",
    )


def plus_taken(used: Sequence[Amounts], taken: Mapping[int, Amounts]) -> Used:
    return tuple(amounts + taken[gpu] if gpu in taken else amounts for gpu, amounts in enumerate(used))


# -- sums over the GPUs of a node, for people and metrics ----------------------------------------------------------------------


def summarize(node: NodeState, used: Used) -> tuple[Totals, Amounts]:
    """(totals, what is free on all offered GPUs together, as kube-scheduler counts it)."""
    totals, sums = Totals(), NOTHING
    for gpu, held in zip(node.gpus, used, strict=True):
        free = _free(gpu, held)
        part = _part(gpu, held, free)
        sums = sums + free if gpu.offered else sums
        totals["gpus", gpu.model, part] += 1
        for each, amounts in (("used", held), ("stranded" if part == "full" else part, free)):
            totals["cores", gpu.model, each] += amounts.cores
            totals["memory", gpu.model, each] += amounts.memory_mebibytes
    return totals, sums


def _free(gpu: GpuState, held: Amounts) -> Amounts:
    return Amounts(max(0, CORES_PER_GPU - held.cores), max(0, gpu.memory_mebibytes - held.memory_mebibytes))


def _part(gpu: GpuState, held: Amounts, free: Amounts) -> str:
    if not gpu.offered:
        return "closed"
    if held == NOTHING:
        return "free"
    if gpu.mig and not has_place(gpu.mig, held.slices):
        return "full"
    return "partial" if free.cores and free.memory_mebibytes else "full"


def covers(sums: Amounts, wanted: Amounts) -> bool:
    return sums.cores >= wanted.cores and sums.memory_mebibytes >= wanted.memory_mebibytes
