"""HAMi's resource names and defaults, as the operator set them.

Source: HAMi 2.10, pkg/device/nvidia/device.go, GenerateResourceRequests.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

ResourceName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
        max_length=317,
        extra={"allowed": "the name of an extended resource, such as nvidia.com/gpu"},
    ),
]


class ReplicaResources(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the section hami. config/gpumgr.yaml explains each."""

    count_resource: ResourceName = "nvidia.com/gpu"
    #: What the container gets of each GPU: memory in MiB or in percent, and cores in percent.
    memory_resource: ResourceName = "nvidia.com/gpumem"
    memory_percentage_resource: ResourceName = "nvidia.com/gpumem-percentage"
    core_resource: ResourceName = "nvidia.com/gpucores"
    priority_resource: ResourceName = "nvidia.com/priority"
    #: For a container that requests no memory: MiB of each GPU (0: all). For one that requests no cores: percent of each GPU's cores (0: no
    #: limit).
    default_memory: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    default_cores: Annotated[int, Meta(ge=0, le=100)] = 0
    #: MiB of one unit of memory_resource.
    memory_factor: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    #: How many times the memory and the cores of a GPU can be requested. Each container is limited to its request, but together they may
    #: need more than the GPU has.
    device_memory_scaling: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    device_core_scaling: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    #: The cores of shares are neither counted nor limited.
    disable_core_limit: bool = False

    @property
    def amounts(self) -> tuple[str, str, str]:
        return self.memory_resource, self.memory_percentage_resource, self.core_resource
