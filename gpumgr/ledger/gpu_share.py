"""Shares of GPUs, and how they are limited. Pure.

A limit has one of these strengths:
* hard: the driver or the MPS daemon enforces the limit for all processes of the container together. Only a container that runs as root can
  exceed it.
* soft: a library enforces the limit, or the limit applies to each process separately. A program can exceed or bypass it, which gpumgr
  reports.
* none: there is no limit.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal

import msgspec

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU, RESOURCES, GpuName, Resource
from gpumgr.ledger.ledger import AllocationId, describe_container
from gpumgr.placement.devices import Gpu
from gpumgr.placement.labels import capability_of
from gpumgr.placement.pods import USUAL_PRIORITY, PodKey

Strength = Literal["hard", "soft", "none"]
#: Mechanism -> what it limits, and how strongly.
Strengths = Mapping[str, Mapping[Resource, Strength]]

#: Mechanism -> how well it limited cores; docs/benchmarks.md has the tables.
_MEASURED_CORES: Final[Mapping[str, str]] = {
    "limiter": "limiter at 25 and 75 cores held 24.9 and 72.9 % of the GPU's time (H200, driver 580.159.04, 2026-11-27)",
    "mps": "mps at 25 and 75 cores reached 24.6 and 69 % of the rate of matrix products without a limit (H200, driver 580.159.04, "
    "protocol 2, 2026-11-26)",
    "hami-core": "hami-core limited small kernels only, not matrix products, graphs and copies (H200, driver 580.159.04, HAMi-core "
    "5091a2f, 2026-11-26)",
}
#: Mechanisms that limit shares of a whole GPU. MPS would need a daemon for each MIG device.
_NOT_WITH_MIG: Final = ("limiter", "mps", "nvml-memory")
_VOLTA: Final = (7, 0)


class GpuLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How new shares are limited on a GPU. `cores_by` and `memory_by` are the mechanisms ("": none). If `cores` is "none" although
    `cores_by` is set, that mechanism does not work on this GPU or node; the same holds for memory."""

    cores: Strength = "none"
    cores_by: str = ""
    memory: Strength = "none"
    memory_by: str = ""

    def __str__(self) -> str:
        return f"memory {_text(self.memory, self.memory_by)}, cores {_text(self.cores, self.cores_by)}"


def gpu_limits(gpu: Gpu, mechanisms: Sequence[str], strengths: Strengths, broken: Collection[str]) -> GpuLimits:
    """`mechanisms`: the node's; the first one that limits a resource is chosen. `broken`: the unusable ones."""
    by: dict[Resource, str] = {
        kind: next((name for name in mechanisms if strengths.get(name, {}).get(kind, "none") != "none"), "") for kind in RESOURCES
    }
    found: dict[Resource, Strength] = {
        kind: strengths[name][kind] if name and name not in broken and _works_on(gpu, name) else "none"
        for kind, name in by.items()
    }
    return GpuLimits(cores=found["core"], cores_by=by["core"], memory=found["memory"], memory_by=by["memory"])


def describe_limits(limits: Iterable[tuple[int, GpuLimits]]) -> str:
    """A text that groups GPUs with equal limits: "GPU 0-7: memory hard (nvml-memory), cores soft (limiter); measured: ...". `limits`:
    (NVML's index, limits) of each GPU."""
    groups: dict[GpuLimits, list[int]] = {}
    for index, each in limits:
        groups.setdefault(each, []).append(index)
    by = dict.fromkeys(each.cores_by for each in groups if each.cores != "none")
    measured = [f"measured: {_MEASURED_CORES[name]}" for name in by if name in _MEASURED_CORES]
    return "; ".join([*(f"GPU {','.join(_ranges(sorted(indices)))}: {each}" for each, indices in groups.items()), *measured])


def _works_on(gpu: Gpu, mechanism: str) -> bool:
    """A GPU of an unknown model counts as Volta or newer."""
    if mechanism in _NOT_WITH_MIG and gpu.mig_enabled:
        return False
    return mechanism != "mps" or (capability_of(gpu.model) or _VOLTA) >= _VOLTA


def _text(strength: Strength, by: str) -> str:
    if strength == "none":
        return f"none ({by} can't be used)" if by else "none"
    return f"{strength} ({by})"


def _ranges(indices: Sequence[int]) -> Iterator[str]:
    first = indices[0]
    for this, following in (*pairwise(indices), (indices[-1], None)):
        if following != this + 1:
            yield str(first) if first == this else f"{first}-{this}"
            first = following or 0


class EnforcementTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How a container is limited, as decided at the grant. `exemption`: the namespace or namespace/serviceaccount for which the operator
    set other mechanisms. `cdi`: the response names a CDI device."""

    mechanisms: tuple[str, ...] = ()
    exemption: str | None = None
    cdi: bool = False


class SharedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a share: `cores` in percent of the GPU, `memory_bytes` of its `total_bytes`. The kubelet allocates cores and memory in two
    calls, and each is 0 until its call. `burst_bytes`: how much more memory the container may use now (a burst, or memory that suspended
    containers lend). `bus_id` and `total_bytes` are None while the driver does not list the GPU."""

    name: GpuName
    uuid: str
    bus_id: str | None = None
    total_bytes: int | None = None
    cores: int = 0
    memory_bytes: int = 0
    burst_bytes: int = 0

    @property
    def limit_bytes(self) -> int:
        return self.memory_bytes + self.burst_bytes

    @property
    def core_percent(self) -> int:
        """The limit of cores. 100 is no limit: a container of `nvidia.com/gpu` may request memory without cores."""
        return self.cores or CORES_PER_GPU

    @property
    def whole(self) -> bool:
        return self.cores >= CORES_PER_GPU


class GpuShare(msgspec.Struct, frozen=True, kw_only=True):
    """A container that has a part of at least one GPU, with its limits; enforcement backends know nothing else of its request.

    `gpus` are in the order of their PCI bus ids, which is CUDA's order with CUDA_DEVICE_ORDER=PCI_BUS_ID. The pod's name and UIDs may be
    missing or guessed until the container starts.
    """

    allocation: AllocationId
    gpus: tuple[SharedGpu, ...]
    pod: PodKey | None = None
    pod_uid: str | None = None
    container: str | None = None
    #: A static pod's UID in the container runtime; None for other pods.
    runtime_uid: str | None = None
    #: The pod's annotation `tencent.com/vcuda-core-limit`, at most 100: the percent of a GPU that it may use while other containers are
    #: idle.
    core_limit: int | None = None
    #: `nvidia.com/priority`: among containers on one GPU, a lower number has precedence.
    priority: int = USUAL_PRIORITY
    #: Whether the share belongs to a ResourceClaim, which several containers may use.
    claim: bool = False

    def only_gpu(self, mechanism: str) -> SharedGpu:
        """The container's only GPU, for a mechanism that limits on one GPU only. Raises Refusal."""
        if len(self.gpus) != 1:
            raise Refusal(
                "internal",
                f"{mechanism} limits a container on one GPU only, and {self.describe()} shares {len(self.gpus)} GPUs: "
                "request a share of one GPU, or set enforcement.backend to hami-core",
            )
        return self.gpus[0]

    def describe(self) -> str:
        return describe_container(self.pod, self.pod_uid, self.container, self.allocation)
