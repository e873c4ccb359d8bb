"""Where the MIG devices of a container are created that requests `nvidia.com/gpu` on GPUs with MIG profiles. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpumgr.allocator.callers import Caller
from gpumgr.allocator.ids import Masks
from gpumgr.allocator.ledger import Ledger, MigDevice
from gpumgr.allocator.named_gpus import unfollowed
from gpumgr.allocator.node import NodeView
from gpumgr.errors import Refusal
from gpumgr.evaluators.mig import MigPlace, amounts_of, find_place, place_at, place_named, smallest
from gpumgr.evaluators.replicas import ReplicaRequest
from gpumgr.topology.devices import MigProfile
from gpumgr.units import Amounts, GpuName


def obstacle_to_devices(node: NodeView, ledger: Ledger, gpu: GpuName, follow: Sequence[ReplicaRequest]) -> str | None:
    """Why the MIG devices of the container, and of those that take over its replica, can't be on this GPU."""
    taken, made = ledger.used(gpu).slices, set[str]()
    for wanted in follow:
        place = find_place(node.mig_profiles[gpu], taken, wanted)
        if place is None:
            each = str(replace(wanted, count=1)).removeprefix("1 GPU ")
            return f"has no place for a MIG device {each}"
        if place.profile.name not in made:
            taken |= place.memory_slices
            made.add(place.profile.name)
    return None


def mig_devices(node: NodeView, ledger: Ledger, caller: Caller, wanted: ReplicaRequest, masks: Masks) -> tuple[MigDevice, ...]:
    """A MIG device for each of these replicas: where the scheduler placed it, that of the replica's init container, or at the first free
    place. Raises Refusal."""
    placed = dict(caller.view.placed).get(caller.container or "", ()) if caller.view else ()
    left_by = [a for a in ledger.of(caller.pod, caller.uid) if a.init] if caller.pod or caller.uid else []
    devices: list[MigDevice] = []
    for gpu, mask in masks.items():
        profiles, taken = node.mig_profiles[gpu], ledger.used(gpu).slices
        uuid = ledger.gpu_registry.by_name[gpu].uuid
        named = [place_at(profiles, amounts) for each, amounts in placed if each == uuid]
        old = [device for a in left_by if a.held("replica").get(gpu, 0) & mask for device in a.mig_devices if device.gpu == gpu]
        for number in range(mask.bit_count()):
            if placed and (number >= len(named) or named[number] is None):
                found = Refusal("invalid_request", f"it names no MIG device that {node.label(gpu)} can have")
                raise unfollowed(caller, found)
            place = named[number] if placed else None
            profile = place.profile if place else smallest(profiles, wanted)
            same = [each for each in old if profile and each.profile == profile.name and each not in devices]
            if place is not None:
                same = [each for each in same if each.memory_slices == place.memory_slices]
            if same:
                devices.append(same[0])
                continue
            place = place or find_place(profiles, taken, wanted)
            if place is None or place.memory_slices & taken:
                reason = f"{node.label(gpu)} has no place for the MIG device left; the pod may simply be created again"
                raise Refusal("conflict", reason)
            taken |= place.memory_slices
            devices.append(MigDevice(gpu=gpu, profile=place.profile.name, memory_slices=place.memory_slices))
    return tuple(devices)


def amounts_of_devices(node: NodeView, devices: Iterable[MigDevice]) -> Mapping[GpuName, Amounts]:
    """GPU -> what these MIG devices take of it."""
    found: dict[GpuName, Amounts] = {}
    for device in devices:
        profiles = node.mig_profiles[device.gpu]
        found[device.gpu] = found.get(device.gpu, Amounts()) + amounts_of(place_of(device, profiles), profiles)
    return found


def place_of(device: MigDevice, profiles: Sequence[MigProfile]) -> MigPlace:
    """Raises Refusal if the GPU has not such a place any more."""
    place = place_named(profiles, device.profile, device.start)
    if place is None:
        raise Refusal("gpu_unhealthy", f"GPU {device.gpu} can't have the MIG device {device}")
    return place
