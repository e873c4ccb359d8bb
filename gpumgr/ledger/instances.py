"""MIG devices: which existing ones are offered and granted, and where (on which memory slices) new ones are created for a container. Pure.

A MIG device belongs to one pod. It limits its container, so nothing else is enforced. A container that requests `nvidia.com/gpu` on GPUs
with MIG profiles gets MIG devices that are created for it.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import MIG_PREFIX, Amounts, GpuName
from gpumgr.ledger.callers import Caller, unfollowed
from gpumgr.ledger.choose import Choice, Request
from gpumgr.ledger.grant import refuse_held
from gpumgr.ledger.ids import GpuRegistry, Masks, RegisteredInstance, common, count, lowest, minus, union
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger, MigDevice
from gpumgr.ledger.node import NodeView
from gpumgr.placement.devices import Gpu, MigInstance, MigProfile
from gpumgr.placement.mig import MigPlace, amounts_of, find_place, place_at, place_named, serves
from gpumgr.placement.requests import ReplicaRequest

MigStrategy = Literal["none", "single", "mixed"]

_COMPUTE: Final = re.compile(r"([1-7])c\.([1-7])g\.")


def resource_of(profile: str) -> str:
    """The resource of a profile's MIG devices with the strategy mixed."""
    return MIG_PREFIX + profile.replace("+", ".")


def offered_instances(gpus: Sequence[Gpu], strategy: MigStrategy) -> Mapping[str, tuple[RegisteredInstance, ...]]:
    """UUID of the GPU -> its MIG devices to offer."""
    if strategy == "none" or (strategy == "single" and obstacle_of_single(gpus)):
        return {}
    return {gpu.uuid: tuple(map(_registered, gpu.mig_instances)) for gpu in gpus}


def obstacle_of_single(gpus: Collection[Gpu]) -> str | None:
    """Why the strategy single is not possible with these GPUs; None if it is, or if no GPU is in MIG mode."""
    if not any(gpu.mig_enabled for gpu in gpus):
        return None
    if without := [f"GPU{gpu.index}" for gpu in gpus if not gpu.mig_instances]:
        return f"{', '.join(without)} has no MIG devices, and all GPUs must have some: create them, or set node.mig_strategy to mixed"
    profiles = sorted({each.profile for gpu in gpus for each in gpu.mig_instances})
    if len(profiles) > 1:
        return f"the MIG devices must have the same profile, and have {', '.join(profiles)}: set node.mig_strategy to mixed"
    return None


def _registered(instance: MigInstance) -> RegisteredInstance:
    """Compute instances of one GPU instance share its memory, so each is registered with its part."""
    memory, parts = instance.memory_bytes >> 20, _COMPUTE.match(instance.profile)
    return RegisteredInstance(instance.uuid, instance.profile, memory * int(parts[1]) // int(parts[2]) if parts else memory)


def choose_instances(ledger: Ledger, request: Request) -> Choice:
    """Chooses free MIG devices, in the order of the GPUs. Raises Refusal."""
    free = request.free(ledger)
    chosen, missing = dict(request.must), request.size - count(request.must)
    for gpu in ledger.gpu_registry.gpus:
        picked = lowest(free.get(gpu.name, 0) & ~request.must.get(gpu.name, 0), missing)
        missing -= picked.bit_count()
        chosen = {**union(chosen, {gpu.name: picked} if picked else {})}
    if missing > 0:
        raise Refusal("no_fit", f"{request.size} MIG devices requested, and {request.size - missing} of this profile are free")
    return Choice(masks=chosen, evaluator="mig", why="")


def grant_instances(
    node: NodeView, ledger: Ledger, caller: Caller, masks: Masks, *, new_id: AllocationId, now: float
) -> Allocation:
    """The allocation with exactly these MIG devices, for `ledger.occupy`. Raises Refusal."""
    fresh = minus(masks, common(masks, ledger.reusable("mig", caller.pod, caller.uid)))
    refuse_held(ledger, "mig", fresh)
    for gpu, mask in fresh.items():
        if closed := node.closed(gpu, "mig"):
            raise Refusal("gpu_unhealthy", f"the MIG devices of {node.label(gpu)} can't be granted: {closed}")
        if gone := ledger.gpu_registry.by_name[gpu].held_instances(mask & ~node.instances.get(gpu, 0)):
            uuid = gone[0].uuid
            if why := node.failed_instances.get(uuid):
                raise Refusal("gpu_unhealthy", f"the MIG device {uuid} of {node.label(gpu)} can't be granted: {why}")
            raise Refusal("gpu_unhealthy", f"{node.label(gpu)} no longer has the MIG device {uuid}")
    named = [
        f"{each.profile} {each.uuid}"
        for gpu, mask in masks.items()
        for each in ledger.gpu_registry.by_name[gpu].held_instances(mask)
    ]
    return Allocation(
        id=new_id,
        pod=caller.pod,
        uid=caller.uid,
        container=caller.container,
        init=caller.init,
        gpus=instance_amounts(ledger.gpu_registry, masks),
        device_ids={"mig": masks},
        granted_at=now,
        why=f"MIG {', '.join(named)}",
    )


def instance_amounts(gpu_registry: GpuRegistry, masks: Masks) -> Mapping[GpuName, Amounts]:
    return {
        gpu.name: Amounts(0, sum(each.memory_mebibytes for each in gpu.held_instances(masks[gpu.name])))
        for gpu in gpu_registry.gpus
        if gpu.name in masks
    }


def obstacle_to_devices(
    node: NodeView, ledger: Ledger, caller: Caller, gpu: GpuName, mask: int, follow: Sequence[ReplicaRequest]
) -> str | None:
    """Why no MIG device on this GPU can serve all requests in `follow`; None: one can. `follow`: the container's request, and the requests
    of the later containers that take over its replica. `mask`: the replicas that the container itself takes over."""
    profiles, taken = node.mig_profiles[gpu], ledger.used(gpu).slices
    if _left(ledger, caller, gpu, mask, profiles, follow) or find_place(profiles, taken, *follow) is not None:
        return None
    wanted = next((each for each in follow if find_place(profiles, taken, each) is None), follow[0])
    return f"has no place for a MIG device {str(replace(wanted, count=1)).removeprefix('1 GPU ')}"


def mig_devices(
    node: NodeView, ledger: Ledger, caller: Caller, follow: Sequence[ReplicaRequest], masks: Masks
) -> tuple[MigDevice, ...]:
    """Chooses a MIG device for each replica: one that an init container leaves and that serves all of `follow`, else a new one at the
    first free place. If the scheduler named a place, only a MIG device at that place is chosen. Raises Refusal."""
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
                reason = f"{node.label(gpu)} has no free place for the MIG device; delete the pod and create it again"
                raise Refusal("conflict", reason)
            taken |= place.memory_slices
            devices.append(MigDevice(gpu=gpu, profile=place.profile.name, memory_slices=place.memory_slices))
    return tuple(devices)


def _left(
    ledger: Ledger, caller: Caller, gpu: GpuName, mask: int, profiles: Sequence[MigProfile], follow: Sequence[ReplicaRequest]
) -> list[MigDevice]:
    """The MIG devices on this GPU of the pod's init containers that hold a replica in `mask`, if they serve all of `follow`."""
    inits = [a for a in ledger.of(caller.pod, caller.uid) if a.init]
    devices = [each for a in inits if a.held("replica").get(gpu, 0) & mask for each in a.mig_devices if each.gpu == gpu]
    return [each for each in devices if serves(profiles, amounts_of(place_of(each, profiles), profiles), *follow)]


def amounts_of_devices(node: NodeView, devices: Iterable[MigDevice]) -> Mapping[GpuName, Amounts]:
    found: dict[GpuName, Amounts] = {}
    for device in devices:
        profiles = node.mig_profiles[device.gpu]
        found[device.gpu] = found.get(device.gpu, Amounts()) + amounts_of(place_of(device, profiles), profiles)
    return found


def place_of(device: MigDevice, profiles: Sequence[MigProfile]) -> MigPlace:
    """Raises Refusal if the GPU's profiles no longer have the place."""
    place = place_named(profiles, device.profile, device.start)
    if place is None:
        raise Refusal("gpu_unhealthy", f"GPU {device.gpu} can't have the MIG device {device}")
    return place
