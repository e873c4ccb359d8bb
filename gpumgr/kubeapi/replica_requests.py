"""What a container requests by HAMi's resources, and which GPUs HAMi's scheduler chose for it. Pure.

Source: HAMi 2.10, pkg/device/nvidia/device.go: GenerateResourceRequests, and the rule of MutateAdmission for whole GPUs;
pkg/device/devices.go: EncodePodSingleDevice.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gpumgr.allocator.pods import ContainerSpec, NamedGpu
from gpumgr.evaluators.replicas import ReplicaRequest
from gpumgr.units import CORES_PER_GPU, Amounts

#: The node and the devices of a pod, as HAMi's scheduler writes them.
HAMI_NODE: Final = "hami.io/vgpu-node"
HAMI_ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
_DEVICE: Final = re.compile(r"([^,:;]+),[^,:;]*,([0-9]{1,10}),([0-9]{1,10}):")

ResourceName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
        max_length=317,
        extra={"allowed": "the name of an extended resource, such as nvidia.com/gpu"},
    ),
]


class ReplicaResources(msgspec.Struct, frozen=True, kw_only=True):
    """HAMi's resource names and defaults: keys of the settings' section hami."""

    #: The resource that counts GPUs, ...
    count_resource: ResourceName = "nvidia.com/gpu"
    #: ... and what a container gets of each of them: memory in MiB, or in percent, and cores in percent.
    memory_resource: ResourceName = "nvidia.com/gpumem"
    memory_percentage_resource: ResourceName = "nvidia.com/gpumem-percentage"
    core_resource: ResourceName = "nvidia.com/gpucores"
    #: The resource by which a container has its priority on a GPU.
    priority_resource: ResourceName = "nvidia.com/priority"
    #: Memory of each GPU in MiB, and cores, of a container that requests none. 0: all memory; no limit of cores.
    default_memory: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    default_cores: Annotated[int, Meta(ge=0, le=100)] = 0
    #: MiB of one unit of memory_resource.
    memory_factor: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    #: How many times its memory, and its cores, a GPU has for these requests. More than 1 oversubscribes it: each container keeps to what
    #: it requests, but together they may need more than the GPU has.
    device_memory_scaling: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    device_core_scaling: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    #: Neither count nor limit the cores of shares.
    disable_core_limit: bool = False

    @property
    def amounts(self) -> tuple[str, str, str]:
        """The resources of what a container gets of each GPU."""
        return self.memory_resource, self.memory_percentage_resource, self.core_resource


def replica_request(
    wanted: Mapping[str, object], resources: ReplicaResources, parse_quantity: Callable[[str], int]
) -> ReplicaRequest | None:
    """None: the container has no GPUs from the kubelet. `wanted`: resource -> quantity. Amounts above 100 % are kept, for
    `ReplicaRequest.problem`. Raises ValueError for an invalid quantity."""

    def amount(name: str) -> int:
        return parse_quantity(str(wanted.get(name, "0")))

    count, percent = amount(resources.count_resource), amount(resources.memory_percentage_resource)
    memory = amount(resources.memory_resource) * resources.memory_factor or (0 if percent else resources.default_memory)
    if count == 0:
        return None
    # HAMi's webhook sets the cores of such a container; pods that it did not see get the same.
    whole = resources.core_resource not in wanted and not memory and percent in (0, 100) and not resources.default_cores
    cores = amount(resources.core_resource) if resources.core_resource in wanted else resources.default_cores
    return ReplicaRequest(
        count=count,
        cores=CORES_PER_GPU if whole else cores if cores >= CORES_PER_GPU or not resources.disable_core_limit else 0,
        memory_mebibytes=memory or None,
        memory_percent=percent or 100,
        memory_scaling=resources.device_memory_scaling,
        core_scaling=resources.device_core_scaling,
    )


def devices_text(containers: Iterable[Iterable[tuple[str, Amounts]]]) -> str:
    """What `placed_by_hami` reads: the GPUs of each container of a pod, also of those without GPUs."""
    return "".join(
        "".join(f"{uuid},NVIDIA,{amounts.memory_mebibytes},{amounts.cores}:" for uuid, amounts in gpus) + ";"
        for gpus in containers
    )


def placed_by_hami(
    text: str, containers: Sequence[ContainerSpec], slices: Mapping[tuple[int, int], int] = MappingProxyType({})
) -> tuple[tuple[str, tuple[NamedGpu, ...]], ...]:
    """Container -> its GPUs. A device is `UUID,type,MiB,cores:`, a container its devices and `;`. Raises ValueError for another text.

    HAMi may omit the entries of containers without GPUs (its issue 2899), so only the others count, in their order. `slices`: the memory
    slices of MIG devices, by the positions of the container and of the device in the text.
    """
    if not re.fullmatch(rf"(({_DEVICE.pattern})*;)*", text):
        raise ValueError(f"{text[:64]!r} is no list of devices as HAMi writes it")
    entries = [_DEVICE.findall(entry) for entry in text.split(";")]
    devices = [
        [
            (uuid, Amounts(int(cores), int(memory), slices=slices.get((position, number), 0)))
            for number, (uuid, memory, cores) in enumerate(entry)
        ]
        for position, entry in enumerate(entries)
        if entry
    ]
    wanted = [spec.name for spec in containers if spec.replicas]
    if len(devices) != len(wanted):
        raise ValueError(f"it has the devices of {len(devices)} containers, and {len(wanted)} request GPUs")
    return tuple((name, tuple(entry)) for name, entry in zip(wanted, devices, strict=True))
