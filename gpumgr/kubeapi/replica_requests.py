"""What a container requests by HAMi's resources. Pure.

Source: HAMi 2.10, pkg/device/nvidia/device.go: GenerateResourceRequests, and the rule of MutateAdmission for whole GPUs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpumgr.allocator.pods import ReplicaRequest
from gpumgr.units import CORES_PER_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaResources:
    """HAMi's resource names and defaults, as set. `default_memory` 0: all memory; `memory_factor`: MiB of one unit.
    `limit_cores` False: cores are neither counted nor limited."""

    count: str
    memory: str
    memory_percentage: str
    cores: str
    default_memory: int = 0
    default_cores: int = 0
    memory_factor: int = 1
    memory_scaling: float = 1.0
    core_scaling: float = 1.0
    limit_cores: bool = True


def replica_request(
    wanted: Mapping[str, object], resources: ReplicaResources, parse_quantity: Callable[[str], int]
) -> ReplicaRequest | None:
    """None: the container has no GPUs from the kubelet. `wanted`: resource -> quantity. Raises ValueError for an invalid quantity."""

    def amount(name: str) -> int:
        return parse_quantity(str(wanted.get(name, "0")))

    count, percent = amount(resources.count), min(amount(resources.memory_percentage), 100)
    memory = (amount(resources.memory) or (0 if percent else resources.default_memory)) * resources.memory_factor
    if count == 0:
        return None
    # HAMi's webhook sets the cores of such a container; pods that it did not see get the same.
    whole = resources.cores not in wanted and not memory and percent in (0, 100) and not resources.default_cores
    cores = min(amount(resources.cores) or resources.default_cores, CORES_PER_GPU)
    return ReplicaRequest(
        count=count,
        cores=CORES_PER_GPU if whole else cores if cores == CORES_PER_GPU or resources.limit_cores else 0,
        memory_mebibytes=memory or None,
        memory_percent=percent or 100,
        memory_scaling=resources.memory_scaling,
        core_scaling=resources.core_scaling,
    )
