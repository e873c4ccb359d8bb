"""What a container requests by HAMi's resources, and which GPUs HAMi's scheduler chose for it. Pure.

Source: HAMi 2.10, pkg/device/nvidia/device.go: GenerateResourceRequests, and the rule of MutateAdmission for whole GPUs;
pkg/device/devices.go: EncodePodSingleDevice.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from gpumgr.common.units import CORES_PER_GPU, Amounts
from gpumgr.ledger.pods import ContainerSpec, NamedGpu
from gpumgr.placement.evaluators.replicas import ReplicaRequest
from gpumgr.settings.hami_resources import ReplicaResources

#: The node and the devices of a pod, as HAMi's scheduler writes them.
HAMI_NODE: Final = "hami.io/vgpu-node"
HAMI_ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
_DEVICE: Final = re.compile(r"([^,:;]+),[^,:;]*,([0-9]{1,10}),([0-9]{1,10}):")


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
