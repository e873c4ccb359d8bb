"""The GPUs of a node, their topology and their use, as frozen values that gpumgr.driver reads from the driver."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import combinations
from typing import Final

import msgspec

from gpumgr.common.units import BLOCK_MEBIBYTES


class Level(IntEnum):
    """How close two GPUs are on PCIe, by the names of `nvidia-smi topo -m`. PSB: both GPUs are on one board (NVML's level INTERNAL). The
    value is the pair's score without NVLinks."""

    SYS = 10
    NODE = 20
    PHB = 30
    PXB = 40
    PIX = 50
    PSB = 60

    # Enum's own hash is a Python function, too slow for a topology as a cache key.
    __hash__ = int.__hash__


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What joins two GPUs. `nvlinks`: the number of direct NVLinks; with NVSwitch, the smaller of the two GPUs' numbers of links to
    switches."""

    level: Level
    nvlinks: int = 0


class Topology(msgspec.Struct, frozen=True):
    """The links between n GPUs: symmetric n x n matrices; their diagonals (PSB, 0) have no meaning."""

    levels: tuple[tuple[Level, ...], ...]
    nvlinks: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.levels)

    def link(self, a: int, b: int) -> Link:
        return Link(level=self.levels[a][b], nvlinks=self.nvlinks[a][b])


class MigProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of MIG device: `slices` of the GPU's compute and `size` adjacent slices of its memory. `starts`: the memory slices at which a
    device may begin, ascending. `number`: the driver's id.

    Source: nvmlDeviceGetGpuInstanceProfileInfo and nvmlDeviceGetGpuInstancePossiblePlacements.
    """

    name: str
    number: int
    memory_mebibytes: int
    slices: int
    size: int
    starts: tuple[int, ...]


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG device: one compute instance of a GPU instance. `profile` is the name in `nvidia-smi -L` (1g.10gb, 1c.3g.40gb, 1g.10gb+me).
    `memory_slices`: slice n of the GPU's memory as bit n; 0 = not known.

    The driver derives the UUID from the place, so a later device there can have the same UUID with another profile.
    """

    uuid: str
    profile: str
    gpu_instance: int
    compute_instance: int
    memory_bytes: int
    memory_slices: int = 0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One physical GPU as NVML describes it; None = not reported.

    `index` may change at a reboot, so lasting data has `uuid` as its key. `pcie_chain`: the GPU's parents on PCIe, the root complex first.
    `mig_profiles`: the MIG devices that it could have, even while its MIG mode is off. A GPU without `memory_bytes` (GB10 uses the host's
    memory) is granted only as a whole.
    """

    index: int
    uuid: str
    minor: int | None
    bus_id: str | None
    model: str | None
    memory_bytes: int | None
    mig_enabled: bool | None = None
    numa_node: int | None = None
    pcie_chain: tuple[str, ...] = ()
    mig_instances: tuple[MigInstance, ...] = ()
    mig_profiles: tuple[MigProfile, ...] = ()
    #: Computed from `memory_bytes`; 0 = not reported.
    memory_mebibytes: int = 0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "memory_mebibytes", (self.memory_bytes or 0) >> 20)

    @property
    def memory_blocks(self) -> int:
        return self.memory_mebibytes // BLOCK_MEBIBYTES


class GpuFailure(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    uuid: str | None
    reason: str

    @property
    def sentence(self) -> str:
        return f"GPU{self.index} can't be described: {self.reason}"


class NodeSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of the node at one instant, sorted by index; row i of `topology` belongs to `gpus[i]`. `pci_gpus`: the PCI addresses of the
    node's GPUs in sysfs, including GPUs that NVML does not list."""

    gpus: tuple[Gpu, ...]
    topology: Topology
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: str | None = None
    failures: tuple[GpuFailure, ...] = ()
    pci_gpus: tuple[str, ...] = ()

    @property
    def unlisted(self) -> int:
        """How many of the node's GPUs NVML does not list."""
        return max(0, len(self.pci_gpus) - len(self.gpus) - len(self.failures))

    @property
    def unlisted_sentence(self) -> str | None:
        """Says how many GPUs NVML does not list, with their PCI addresses if these are certain; None if NVML lists all."""
        if not self.unlisted:
            return None
        known = {gpu.bus_id for gpu in self.gpus}
        addresses = [address for address in self.pci_gpus if address not in known]
        named = f", not {', '.join(addresses)}" if len(addresses) == self.unlisted else ""
        listed = len(self.pci_gpus) - self.unlisted
        return f"the driver lists {listed} of the {len(self.pci_gpus)} NVIDIA GPUs on the PCI bus{named}: see `dmesg`"


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a context on a GPU; `pid` is the host's. `utilization_ratio`: the part of the last sample period in which CUDA kernels
    of the process ran, 0..1. None: not reported, or not sampled."""

    pid: int
    memory_bytes: int | None
    utilization_ratio: float | None = None


class MemoryLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's limit for all processes of a cgroup on one GPU. `soft_bytes` are guaranteed; allocations beyond `hard_bytes` fail (None:
    no limit)."""

    soft_bytes: int = 0
    hard_bytes: int | None = None


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """The measured use of one GPU. Ratios are 0..1; None: not reported. `processes` None: the list is not readable."""

    uuid: str
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    utilization_ratio: float | None = None
    memory_copy_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    processes: tuple[GpuProcess, ...] | None = None


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of all GPUs, by UUID. `failures`: why a GPU could not be sampled."""

    gpus: Mapping[str, GpuSample] = msgspec.field(default_factory=dict)
    failures: Mapping[str, str] = msgspec.field(default_factory=dict)


#: A link's score is the value of its `Level`, plus this for each NVLink. Source: docs/user-guide.md, "Placement".
NVLINK_SCORE: Final = 100

#: n x n scores of pairs; symmetric, with 0 on the diagonal.
Scores = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def score_matrix(topology: Topology) -> Scores:
    n = len(topology)
    return tuple(
        tuple(0 if a == b else int(topology.levels[a][b]) + NVLINK_SCORE * topology.nvlinks[a][b] for b in range(n))
        for a in range(n)
    )


def set_score(scores: Scores, gpus: Sequence[int]) -> int:
    return sum(scores[a][b] for a, b in combinations(gpus, 2))
