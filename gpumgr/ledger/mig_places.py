"""Chooses the places of a container's MIG devices. The container requests `nvidia.com/gpu` on GPUs with MIG profiles. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts, GpuName
from gpumgr.ledger.callers import Caller, unfollowed
from gpumgr.ledger.ids import Masks
from gpumgr.ledger.ledger import Ledger, MigDevice
from gpumgr.ledger.node import NodeView
from gpumgr.placement.evaluators.mig import MigPlace, amounts_of, find_place, place_at, place_named, serves
from gpumgr.placement.evaluators.replicas import ReplicaRequest
from gpumgr.placement.topology.devices import MigProfile


def obstacle_to_devices(
    node: NodeView, ledger: Ledger, caller: Caller, gpu: GpuName, mask: int, follow: Sequence[ReplicaRequest]
) -> str | None:
    """Why the GPU can't have a MIG device that serves the requests `follow`: the container's, and the requests of the containers that
    take over its replica. None if it can.

    `mask`: the replicas on the GPU that the container takes over.
    """
    profiles, taken = node.mig_profiles[gpu], ledger.used(gpu).slices
    if _left(ledger, caller, gpu, mask, profiles, follow) or find_place(profiles, taken, *follow) is not None:
        return None
    wanted = next((each for each in follow if find_place(profiles, taken, each) is None), follow[0])
    return f"has no place for a MIG device {str(replace(wanted, count=1)).removeprefix('1 GPU ')}"


def mig_devices(
    node: NodeView, ledger: Ledger, caller: Caller, follow: Sequence[ReplicaRequest], masks: Masks
) -> tuple[MigDevice, ...]:
    """Chooses a MIG device for each replica in `masks`. Raises Refusal.

    If the scheduler has chosen a place for the device, the device gets that place. Otherwise an init container's device for the replica
    is used again if it is large enough, or a new device gets the first free place.
    """
    placed = dict(caller.view.placed).get(caller.container or "", ()) if caller.view else ()
    devices: list[MigDevice] = []
    for gpu, mask in masks.items():
        profiles, taken = node.mig_profiles[gpu], ledger.used(gpu).slices
        uuid = ledger.gpu_registry.by_name[gpu].uuid
        named = [place_at(profiles, amounts) for each, amounts in placed if each == uuid]
        left = _left(ledger, caller, gpu, mask, profiles, follow)
        for number in range(mask.bit_count()):
            if placed and (number >= len(named) or named[number] is None):
                found = Refusal("invalid_request", f"it names no MIG device that {node.label(gpu)} can have")
                raise unfollowed(caller, found)
            place = named[number] if placed else None
            same = [each for each in left if each not in devices and (place is None or place_of(each, profiles) == place)]
            if same:
                devices.append(same[0])
                continue
            place = place or find_place(profiles, taken, *follow)
            if place is None or place.memory_slices & taken:
                reason = f"{node.label(gpu)} has no free place for the MIG device; the pod may simply be created again"
                raise Refusal("conflict", reason)
            taken |= place.memory_slices
            devices.append(MigDevice(gpu=gpu, profile=place.profile.name, memory_slices=place.memory_slices))
    return tuple(devices)


def _left(
    ledger: Ledger, caller: Caller, gpu: GpuName, mask: int, profiles: Sequence[MigProfile], follow: Sequence[ReplicaRequest]
) -> list[MigDevice]:
    """The MIG devices that the pod's init containers created for these replicas, and that are large enough."""
    left_by = [a for a in ledger.of(caller.pod, caller.uid) if a.init]
    devices = [each for a in left_by if a.held("replica").get(gpu, 0) & mask for each in a.mig_devices if each.gpu == gpu]
    return [each for each in devices if serves(profiles, amounts_of(place_of(each, profiles), profiles), *follow)]


def amounts_of_devices(node: NodeView, devices: Iterable[MigDevice]) -> Mapping[GpuName, Amounts]:
    """GPU -> the amounts that these MIG devices take of it."""
    found: dict[GpuName, Amounts] = {}
    for device in devices:
        profiles = node.mig_profiles[device.gpu]
        found[device.gpu] = found.get(device.gpu, Amounts()) + amounts_of(place_of(device, profiles), profiles)
    return found


def place_of(device: MigDevice, profiles: Sequence[MigProfile]) -> MigPlace:
    """The place of an existing MIG device. Raises Refusal if the GPU's profiles no longer have it."""
    place = place_named(profiles, device.profile, device.start)
    if place is None:
        raise Refusal("gpu_unhealthy", f"GPU {device.gpu} can't have the MIG device {device}")
    return place
