"""gpumgr's units (cores, memory blocks), and the names of resources and annotations.

The units are the ones of Tencent's gpu-manager, which gpumgr replaces: a GPU has 100 cores, and a block has 256 MiB.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

CORES_PER_GPU: Final = 100
BLOCK_MEBIBYTES: Final = 256
BLOCK_BYTES: Final = BLOCK_MEBIBYTES << 20

CORE_RESOURCE: Final = "tencent.com/vcuda-core"
MEMORY_RESOURCE: Final = "tencent.com/vcuda-memory"
#: gpu-manager's annotation: percent of a GPU that a container may use while the GPU's other containers are idle.
CORE_LIMIT_ANNOTATION: Final = "tencent.com/vcuda-core-limit"
#: A JSON object: container -> MiB of GPU memory that it may use while the GPU has memory that no container was granted.
MEMORY_LIMIT_ANNOTATION: Final = "gpumgr.io/memory-limit"
#: true: the agent moves the GPU memory of the pod's containers to the host, even if they are not idle. false: it moves the memory back, and
#: does not suspend the containers when they are idle.
SUSPEND_ANNOTATION: Final = "gpumgr.io/suspend"
#: The idle time after which a container of the pod is suspended: `10m`, `90s`, `1h`, or `never`.
SUSPEND_WHEN_IDLE_ANNOTATION: Final = "gpumgr.io/suspend-when-idle"
#: A JSON object: container -> {"cores": N, "memoryMiB": M}, a new amount on each of its GPUs. RESIZED_ANNOTATION has the agent's answer.
RESIZE_ANNOTATION: Final = "gpumgr.io/resize"
RESIZED_ANNOTATION: Final = "gpumgr.io/resized"

#: HAMi's resource for GPUs, as the agent names it. Its name at the kubelet is in hami.count_resource. HAMi offers each GPU several times:
#: one device id is one such replica.
REPLICA_RESOURCE: Final = "nvidia.com/gpu"

#: gpumgr's driver for Dynamic Resource Allocation (DRA), in claims, ResourceSlices and the kubelet's folders.
DRA_DRIVER: Final = "gpu.gpumgr.io"

#: The agent's name for all resources of MIG devices. With mig_strategy mixed, the kubelet has one resource for each profile: this name,
#: "-", and the profile.
MIG_RESOURCE: Final = "nvidia.com/mig"
MIG_PREFIX: Final = f"{MIG_RESOURCE}-"

#: The kind of resource of a device id, a request or a device plugin. Only a core or memory id represents a fixed amount.
Resource = Literal["core", "memory", "replica", "mig"]
#: The resources of a vcuda container, which is one that requests tencent.com/vcuda-core.
RESOURCES: Final[tuple[Resource, Resource]] = ("core", "memory")
ALL_RESOURCES: Final[tuple[Resource, ...]] = (*RESOURCES, "replica", "mig")
RESOURCE_NAMES: Final[dict[Resource, str]] = {
    "core": CORE_RESOURCE,
    "memory": MEMORY_RESOURCE,
    "replica": REPLICA_RESOURCE,
    "mig": MIG_RESOURCE,
}
RESOURCE_BY_NAME: Final[dict[str, Resource]] = {name: resource for resource, name in RESOURCE_NAMES.items()}
_OTHER: Final[dict[Resource, Resource]] = {"core": "memory", "memory": "core", "replica": "replica", "mig": "mig"}
VCUDA_NAMES: Final = (CORE_RESOURCE, MEMORY_RESOURCE)

#: The name of a GPU in device ids: the first 8 or more hex digits of its UUID.
GpuName = str
#: (pid, start time in clock ticks since boot). No other process ever has the same pair.
Process = tuple[int, int]


class Amounts(msgspec.Struct, frozen=True):
    """Amounts on one GPU. `cores` is in percent. Only the scheduler counts `replicas` of HAMi's resource. `slices` has the memory slices of
    MIG devices, slice n as bit n."""

    cores: int = 0
    memory_mebibytes: int = 0
    replicas: int = 0
    slices: int = 0

    def __add__(self, other: "Amounts") -> "Amounts":
        memory = self.memory_mebibytes + other.memory_mebibytes
        return Amounts(self.cores + other.cores, memory, self.replicas + other.replicas, self.slices | other.slices)

    def __sub__(self, other: "Amounts") -> "Amounts":
        memory = self.memory_mebibytes - other.memory_mebibytes
        return Amounts(self.cores - other.cores, memory, self.replicas - other.replicas, self.slices & ~other.slices)

    def most(self, other: "Amounts") -> "Amounts":
        """The larger amount of each kind."""
        memory = max(self.memory_mebibytes, other.memory_mebibytes)
        return Amounts(max(self.cores, other.cores), memory, max(self.replicas, other.replicas), self.slices | other.slices)

    def beyond(self, other: "Amounts") -> "Amounts":
        """By how much cores and memory exceed `other`."""
        return Amounts(max(0, self.cores - other.cores), max(0, self.memory_mebibytes - other.memory_mebibytes))

    def __str__(self) -> str:
        return f"{self.cores} cores and {self.memory_mebibytes} MiB"

    @property
    def whole(self) -> bool:
        return self.cores >= CORES_PER_GPU


def inner_name(resource: str, names: Mapping[str, str]) -> str:
    """The agent's name of a resource of the kubelet. `names`: the kubelet's name -> the agent's, if they differ."""
    return MIG_RESOURCE if resource.startswith(MIG_PREFIX) else names.get(resource, resource)


def other_resource(resource: Resource) -> Resource:
    """The kubelet calls Allocate once for cores and once for memory: returns the resource of the other call. Replicas and MIG devices have
    only one call, so `resource` itself is returned."""
    return _OTHER[resource]


def blocks_of(memory_bytes: int) -> int:
    """Whole blocks of 256 MiB. The rest of each GPU is not offered."""
    return memory_bytes // BLOCK_BYTES


def ratio(value: float | None) -> float | None:
    """Limits a value to 0..1."""
    return None if value is None else min(1.0, max(0.0, value))


def percent(value: float | None) -> float | None:
    """In percent, as in gpu-manager's and HAMi's metrics."""
    share = ratio(value)
    return None if share is None else round(100 * share, 6)


def count_text(count: int, noun: str) -> str:
    """`1 core`, `2 cores`, `0 processes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"
