"""HAMi's resource requests and its annotations of pods and nodes. Pure.

Source: HAMi 2.10. Requests: pkg/device/nvidia/device.go (GenerateResourceRequests, and for whole GPUs MutateAdmission). Annotations:
pkg/device/devices.go (EncodePodSingleDevice, EncodeNodeDevices, MigProfile), pkg/device/nvidia/mig_allocations.go,
pkg/device/nvidia/links.go and pkg/util/nodelock.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec import Meta, field

from gpumgr.common.units import CORES_PER_GPU, Amounts
from gpumgr.kube.cluster_annotations import MigSize, MigStart, ProfileName, Uuid, decode_json
from gpumgr.placement.devices import MigProfile, Scores
from gpumgr.placement.mig import MigPlace, amounts_of
from gpumgr.placement.pods import ContainerSpec, NamedGpu
from gpumgr.placement.requests import ReplicaRequest
from gpumgr.settings.hami_resources import ReplicaResources

#: Written by HAMi's scheduler: the node and the devices of a pod.
HAMI_NODE: Final = "hami.io/vgpu-node"
HAMI_ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
_DEVICE: Final = re.compile(r"([^,:;]+),[^,:;]*,([0-9]{1,10}),([0-9]{1,10}):")


def replica_request(
    wanted: Mapping[str, object], resources: ReplicaResources, parse_quantity: Callable[[str], int]
) -> ReplicaRequest | None:
    """A container's request for HAMi's resources, if any. `wanted`: resource -> quantity. Amounts above 100 % stay, because
    `ReplicaRequest.problem` reports them. Raises ValueError for an invalid quantity."""

    def amount(name: str) -> int:
        return parse_quantity(str(wanted.get(name, "0")))

    count, percent = amount(resources.count_resource), amount(resources.memory_percentage_resource)
    memory = amount(resources.memory_resource) * resources.memory_factor or (0 if percent else resources.default_memory)
    if count == 0:
        return None
    # HAMi's webhook sets 100 cores if a container requests neither cores nor a part of the memory. gpumgr does so, too, for pods that the
    # webhook did not see.
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
    """The text that `placed_by_hami` reads. `containers`: for each container of a pod its GPUs, or nothing for a container without GPUs."""
    return "".join(
        "".join(f"{uuid},NVIDIA,{amounts.memory_mebibytes},{amounts.cores}:" for uuid, amounts in gpus) + ";"
        for gpus in containers
    )


def placed_by_hami(
    text: str, containers: Sequence[ContainerSpec], slices: Mapping[tuple[int, int], int] = MappingProxyType({})
) -> tuple[tuple[str, tuple[NamedGpu, ...]], ...]:
    """Container -> its GPUs. In the text a device is `UUID,type,MiB,cores:`, and a container's entry is its devices and `;`. HAMi may omit
    entries of containers without GPUs (its issue 2899), so only entries with devices count.

    `slices`: (position of the entry, position of the device) -> the memory slices of a MIG device. Raises ValueError for any other text.
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


#: The MIG devices of a pod. HAMi's scheduler writes their memory slices; the node's agent adds the driver's ids.
MIG_ALLOCATIONS: Final = "hami.io/vgpu-mig-allocations"
_Position = Annotated[int, Meta(ge=0, le=1 << 16)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The memory slices of a MIG device: the first slice, and the number of slices."""

    start: MigStart
    size: MigSize

    @property
    def slices(self) -> int:
        """Slice n as bit n."""
        return (1 << self.size) - 1 << self.start


class MigAllocation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`container`: the position among all containers of the pod, init containers first. `device`: the position among the container's GPUs.
    The last three fields are known once the MIG device exists."""

    container: _Position = msgspec.field(name="containerIndex")
    device: _Position = msgspec.field(name="deviceIndex")
    gpu: Uuid = msgspec.field(name="gpuUUID")
    profile: ProfileName
    placement: Placed
    mig_uuid: Annotated[str, Meta(max_length=96)] = msgspec.field(name="migUUID", default="")
    gpu_instance: _Number | None = msgspec.field(name="gpuInstanceID", default=None)
    compute_instance: _Number | None = msgspec.field(name="computeInstanceID", default=None)


class RegisteredProfile(msgspec.Struct, frozen=True, kw_only=True):
    """`core`: percent of the GPU's compute. `slices`: compute slices."""

    name: ProfileName
    memory_mebibytes: _Number = msgspec.field(name="memoryMB")
    core: _Number
    slices: _Number = msgspec.field(name="sliceCount")
    placements: tuple[Placed, ...] | None


def allocation_of(gpu: str, place: MigPlace, *, container: int, device: int) -> MigAllocation:
    placement = Placed(start=place.start, size=place.profile.size)
    return MigAllocation(container=container, device=device, gpu=gpu, profile=place.profile.name, placement=placement)


def encode_allocations(allocations: Iterable[MigAllocation]) -> str:
    return msgspec.json.encode(list(allocations)).decode()


def decode_allocations(text: str) -> Sequence[MigAllocation]:
    """Raises ValueError where HAMi's plugin refuses the text: a missing field, only some of the driver's ids, or a device twice."""
    found = decode_json(text or "[]", tuple[MigAllocation, ...], "no MIG allocations of HAMi")
    for each in found:
        if len({bool(each.mig_uuid), each.gpu_instance is not None, each.compute_instance is not None}) > 1:
            raise ValueError(f"container {each.container}, device {each.device}: only a part of the driver's ids is there")
    if len({(each.container, each.device) for each in found}) < len(found):
        raise ValueError("a device of a container appears twice")
    return found


def slices_in(text: str) -> Mapping[tuple[int, int], int]:
    """(container, device) -> memory slices, slice n as bit n. Raises what `decode_allocations` raises."""
    return {(each.container, each.device): each.placement.slices for each in decode_allocations(text)}


def registered_profiles(profiles: Sequence[MigProfile]) -> tuple[RegisteredProfile, ...]:
    return tuple(
        RegisteredProfile(
            name=each.name,
            memory_mebibytes=each.memory_mebibytes,
            core=amounts_of(MigPlace(profile=each, start=0), profiles).cores,
            slices=each.slices,
            placements=tuple(Placed(start=start, size=each.size) for start in each.starts),
        )
        for each in profiles
        if each.starts
    )


REGISTER: Final = "hami.io/node-nvidia-register"
SCORES: Final = "hami.io/node-nvidia-score"
#: While the node has this annotation, HAMi's scheduler binds no other pod to it. The text is the time, and the namespace and name of a pod.
LOCK: Final = "hami.io/mutex.lock"
#: The UUIDs, separated by commas, of GPUs that get no new pods. Operators write it; a text of another form has no effect.
DEVICE_CORDON: Final = "hami.io/device-cordon"
_Unsigned = Annotated[int, Meta(ge=0)]


class RegisteredGpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`count`: how many containers may share the GPU. `cores`: percent. An unhealthy GPU gets no new pods. `mig_profiles`: only in mode
    mig. The JSON lacks fields that are 0, false or empty."""

    uuid: Annotated[str, Meta(min_length=1)] = field(name="id")
    index: _Unsigned = 0
    count: _Unsigned = 0
    memory_mebibytes: _Unsigned = field(name="devmem", default=0)
    cores: _Unsigned = field(name="devcore", default=0)
    model: str = field(name="type", default="")
    numa: int = 0
    #: Always in the JSON, because `omit_defaults` does not omit the value of a factory.
    mode: str = field(default_factory=lambda: "hami-core")
    mig_profiles: tuple[RegisteredProfile, ...] = field(name="migProfiles", default=())
    healthy: bool = field(name="health", default=False)


def encode_register(gpus: Iterable[RegisteredGpu]) -> str:
    return msgspec.json.encode(list(gpus)).decode()


def decode_register(text: str) -> Sequence[RegisteredGpu]:
    """Raises ValueError."""
    return [] if text == "null" else decode_json(text, list[RegisteredGpu])


def encode_scores(uuids: Sequence[str], scores: Scores) -> str:
    """The text of SCORES: for each GPU the scores of its links to the other GPUs."""
    rows = [
        {"uuid": uuid, "score": {other: row[place] for place, other in enumerate(uuids) if other != uuid}}
        for uuid, row in zip(uuids, scores, strict=True)
    ]
    return msgspec.json.encode(rows).decode()
