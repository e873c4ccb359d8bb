"""MIG devices: decides which MIG devices are offered, and grants the devices that the kubelet names.

A MIG device has one holder. The device itself limits its container, so nothing else is enforced. Its memory counts on its GPU.
Source of the resources' names and of the strategies: NVIDIA's device plugin.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

from gpumgr.common.errors import Refusal
from gpumgr.common.units import MIG_PREFIX, Amounts, GpuName
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Choice, Request
from gpumgr.ledger.grant import refuse_held
from gpumgr.ledger.ids import GpuRegistry, Masks, RegisteredInstance, common, count, lowest, minus, union
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.placement.topology.devices import Gpu, MigInstance

MigStrategy = Literal["none", "single", "mixed"]

_COMPUTE: Final = re.compile(r"([1-7])c\.([1-7])g\.")


def resource_of(profile: str) -> str:
    """The resource of the MIG devices of this profile with the strategy mixed."""
    return MIG_PREFIX + profile.replace("+", ".")


def offered_instances(gpus: Sequence[Gpu], strategy: MigStrategy) -> Mapping[str, tuple[RegisteredInstance, ...]]:
    """UUID of the GPU -> its MIG devices to offer."""
    if strategy == "none" or (strategy == "single" and obstacle_of_single(gpus)):
        return {}
    return {gpu.uuid: tuple(map(_registered, gpu.mig_instances)) for gpu in gpus}


def obstacle_of_single(gpus: Collection[Gpu]) -> str | None:
    """Why the strategy single is not possible on a node with these GPUs; None if it is possible, or if no GPU is in MIG mode."""
    if not any(gpu.mig_enabled for gpu in gpus):
        return None
    if without := [f"GPU{gpu.index}" for gpu in gpus if not gpu.mig_instances]:
        return f"{', '.join(without)} has no MIG devices, and all GPUs must have some: create them, or set node.mig_strategy to mixed"
    profiles = sorted({each.profile for gpu in gpus for each in gpu.mig_instances})
    if len(profiles) > 1:
        return f"the MIG devices must have the same profile, and have {', '.join(profiles)}: set node.mig_strategy to mixed"
    return None


def _registered(instance: MigInstance) -> RegisteredInstance:
    """The MIG device as registered. Compute instances of one GPU instance share its memory, so each counts with its part."""
    memory, parts = instance.memory_bytes >> 20, _COMPUTE.match(instance.profile)
    return RegisteredInstance(instance.uuid, instance.profile, memory * int(parts[1]) // int(parts[2]) if parts else memory)


def choose_instances(ledger: Ledger, request: Request) -> Choice:
    """The free MIG devices in the order of the GPUs. Raises Refusal."""
    free = request.free(ledger)
    chosen, missing = dict(request.must), request.size - count(request.must)
    for gpu in ledger.gpu_registry.gpus:
        picked = lowest(free.get(gpu.name, 0) & ~request.must.get(gpu.name, 0), missing)
        missing -= picked.bit_count()
        chosen = {**union(chosen, {gpu.name: picked} if picked else {})}
    if missing > 0:
        raise Refusal("no_fit", f"{request.size} MIG devices needed, and {request.size - missing} of this profile are free")
    return Choice(masks=chosen, gpus=tuple(chosen), evaluator="mig", why="")


def grant_instances(
    node: NodeView, ledger: Ledger, caller: Caller, masks: Masks, *, new_id: AllocationId, now: float
) -> Allocation:
    """The allocation with exactly these MIG devices, for `ledger.occupy`. Raises Refusal."""
    fresh = minus(masks, common(masks, ledger.reusable("mig", caller.pod, caller.uid)))
    refuse_held(ledger, "mig", fresh)
    for gpu, mask in fresh.items():
        if closed := node.closed(gpu, "mig"):
            raise Refusal("gpu_unhealthy", f"the MIG devices of {node.label(gpu)} can't be given: {closed}")
        if gone := ledger.gpu_registry.by_name[gpu].held_instances(mask & ~node.instances.get(gpu, 0)):
            uuid = gone[0].uuid
            if why := node.failed_instances.get(uuid):
                raise Refusal("gpu_unhealthy", f"the MIG device {uuid} of {node.label(gpu)} can't be given: {why}")
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
    """GPU -> the memory of these MIG devices on it."""
    return {
        gpu.name: Amounts(0, sum(each.memory_mebibytes for each in gpu.held_instances(masks[gpu.name])))
        for gpu in gpu_registry.gpus
        if gpu.name in masks
    }
