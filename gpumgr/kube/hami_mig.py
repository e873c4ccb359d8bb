"""HAMi's texts about dynamic MIG: the MIG devices of a pod, and the profiles of a registered GPU. Pure.

Source: HAMi 2.10, pkg/device/nvidia/mig_allocations.go, and MigProfile in pkg/device/devices.go.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gpumgr.kube.cluster_annotations import MigSize, MigStart, ProfileName, Uuid, decode_json
from gpumgr.ledger.ledger import MigDevice
from gpumgr.placement.evaluators.mig import MigPlace, amounts_of
from gpumgr.placement.topology.devices import MigProfile

#: The MIG devices of a pod. The scheduler writes their places, and the node's plugin adds the driver's ids.
MIG_ALLOCATIONS: Final = "hami.io/vgpu-mig-allocations"
_Position = Annotated[int, Meta(ge=0, le=1 << 16)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Memory slices of a GPU: the first one, and how many."""

    start: MigStart
    size: MigSize

    @property
    def slices(self) -> int:
        """Slice n as bit n."""
        return (1 << self.size) - 1 << self.start


class MigAllocation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`container`: its position among all containers of the pod, init containers first. `device`: the position among its GPUs. The last
    three are known once the MIG device is there."""

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
    """Without the driver's ids."""
    placement = Placed(start=place.start, size=place.profile.size)
    return MigAllocation(container=container, device=device, gpu=gpu, profile=place.profile.name, placement=placement)


def encode_allocations(allocations: Iterable[MigAllocation]) -> str:
    return msgspec.json.encode(list(allocations)).decode()


def decode_allocations(text: str) -> Sequence[MigAllocation]:
    """Raises ValueError for what HAMi's plugin refuses: an incomplete allocation, some of the driver's ids only, a device twice."""
    found = decode_json(text or "[]", tuple[MigAllocation, ...], "no MIG allocations of HAMi")
    for each in found:
        if len({bool(each.mig_uuid), each.gpu_instance is not None, each.compute_instance is not None}) > 1:
            raise ValueError(f"container {each.container}, device {each.device}: only a part of the driver's ids is there")
    if len({(each.container, each.device) for each in found}) < len(found):
        raise ValueError("a device of a container appears twice")
    return found


def with_driver_ids(text: str, devices: Iterable[tuple[str, MigDevice]]) -> str:
    """The allocations with the ids of the MIG devices at their places; `devices` have the UUIDs of their GPUs. Raises ValueError."""
    ids = {(gpu, each.profile, each.memory_slices): each for gpu, each in devices}

    def completed(each: MigAllocation) -> MigAllocation:
        made = ids.get((each.gpu, each.profile, each.placement.slices))
        if made is None:
            return each
        return msgspec.structs.replace(
            each, mig_uuid=made.uuid, gpu_instance=made.gpu_instance, compute_instance=made.compute_instance
        )

    return encode_allocations(map(completed, decode_allocations(text)))


def slices_in(text: str) -> Mapping[tuple[int, int], int]:
    """(container, device) -> the memory slices of its MIG device, slice n as bit n. Raises ValueError, as `decode_allocations`."""
    return {(each.container, each.device): each.placement.slices for each in decode_allocations(text)}


def registered_profiles(profiles: Sequence[MigProfile]) -> tuple[RegisteredProfile, ...]:
    """As the annotation of the node has them."""
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
