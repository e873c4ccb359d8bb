"""Resize: the annotation `gpumgr.io/resize` changes how much a running container may use of its GPUs. Pure.

A request is decided once, by what is left on the container's GPUs at that time. Growth uses first what is free, then what other containers
may no longer use after a resize, then memory that suspended containers lend. Lent memory is used like a burst: when the lenders resume,
they get back what is not in use.
"""

from collections.abc import Callable, Collection, Mapping

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import CORES_PER_GPU, Amounts, GpuName, Resource
from gpumgr.ledger.burst import above_requests
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger, Resize
from gpumgr.placement.pods import ResizeRequest


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision depends on, besides the ledger. `used_bytes`: what containers use; None: not known. `most_bytes`: the highest memory
    limit that may be in force. `memory_mebibytes`: what each GPU has now. `most`: how much a pod may have above its requests. `obstacle`:
    why mechanisms can't change a limit (None: they can). `away`: suspended containers without a requested resume. `listed`: the container
    runtime has listed its containers."""

    used_bytes: Mapping[tuple[AllocationId, GpuName], int | None]
    most_bytes: Callable[[Allocation, GpuName], int]
    memory_mebibytes: Mapping[GpuName, int]
    most: Amounts
    obstacle: Callable[[tuple[str, ...], Resource], str | None]
    away: Collection[AllocationId] = ()
    listed: bool = True

    def beyond(self, allocation: Allocation, gpu: GpuName) -> int:
        """The MiB that the container uses above what is guaranteed to it: in a burst, or memory that suspended containers lend."""
        used_bytes = self.used_bytes.get((allocation.id, gpu)) or 0
        return max(0, -(-used_bytes >> 20) - allocation.guaranteed_on(gpu).memory_mebibytes)

    def reach(self, allocation: Allocation, gpu: GpuName) -> int:
        """The MiB that the container may still take, on top of what is guaranteed and `beyond`, before its limit is set again."""
        least = allocation.guaranteed_on(gpu).memory_mebibytes + self.beyond(allocation, gpu)
        return max(0, -(-self.most_bytes(allocation, gpu) >> 20) - least)


class Waits(msgspec.Struct, frozen=True):
    """The resize can't be decided yet. Growth waits until the memory limit of `holder` is lower, a decrease until the container runtime
    has listed its containers."""

    gpu: GpuName
    holder: Allocation


def decide(ledger: Ledger, allocation: Allocation, asked: ResizeRequest, around: Surroundings) -> Allocation | Waits:
    """The allocation with the decision; Waits if a decision is not possible yet."""
    try:
        _refuse_fixed(allocation, asked)
        resized = replace(allocation, resize=Resize(asked=asked, amounts=_wanted(allocation, asked)))
        if (unlisted := _refuse_used(allocation, resized, around)) is not None:
            return unlisted
        _refuse_above_most(ledger, allocation, resized, around)
        lent = dict[GpuName, int]()
        for gpu in allocation.gpus:
            found = _lent(ledger, allocation, resized, gpu, around)
            if isinstance(found, Waits):
                return found
            lent |= {gpu: found} if found else {}
    except ValueError as error:
        return refused(allocation, asked, str(error))
    return replace(allocation, resize=replace(resized.resize, lent_mebibytes=lent)) if resized.resize and lent else resized


def refused(allocation: Allocation, asked: ResizeRequest, why: str) -> Allocation:
    return replace(allocation, resize=replace(allocation.resize or Resize(asked=asked), asked=asked, refused=why))


def _refuse_fixed(allocation: Allocation, asked: ResizeRequest) -> None:
    if asked.problem:
        raise ValueError(asked.problem)
    if allocation.claim is not None:
        raise ValueError("the capacity of a ResourceClaim is fixed by the API; create a pod with another claim")
    if allocation.by_mig:
        raise ValueError("the sizes of MIG devices are fixed")
    if allocation.anonymous:
        raise ValueError("gpu-manager set its limits, and gpumgr can't change them; delete the pod and create it again")
    if allocation.whole:
        raise ValueError("only a container with a share of a GPU can be resized, and it has whole GPUs")
    if allocation.init:
        raise ValueError("an init container can't be resized")
    if allocation.limits:
        raise ValueError("this node grants cores or memory more than once (hami.device_core_scaling, hami.device_memory_scaling)")
    if asked.cores is not None and not 1 <= asked.cores < CORES_PER_GPU:
        raise ValueError(f"a share of a GPU has 1 to {CORES_PER_GPU - 1} cores, not {asked.cores}")
    if asked.memory_mebibytes is not None and asked.memory_mebibytes < 1:
        raise ValueError(f"a share of a GPU has 1 MiB of memory or more, not {asked.memory_mebibytes}")


def _wanted(allocation: Allocation, asked: ResizeRequest) -> Mapping[GpuName, Amounts]:
    wanted = {
        gpu: Amounts(
            granted.cores if asked.cores is None else asked.cores,
            granted.memory_mebibytes if asked.memory_mebibytes is None else asked.memory_mebibytes,
        )
        for gpu, granted in allocation.gpus.items()
    }
    return {} if wanted == allocation.gpus else wanted


def _more(allocation: Allocation, resized: Allocation, gpu: GpuName) -> Amounts:
    return resized.limits_on(gpu).beyond(allocation.limits_on(gpu))


def _refuse_used(allocation: Allocation, resized: Allocation, around: Surroundings) -> Waits | None:
    for gpu in allocation.gpus:
        before, after = allocation.limits_on(gpu), resized.limits_on(gpu)
        changed: Mapping[Resource, bool] = {
            "core": before.cores != after.cores,
            "memory": before.memory_mebibytes != after.memory_mebibytes,
        }
        for resource, differs in changed.items():
            if differs and (why := around.obstacle(allocation.mechanisms, resource)):
                raise ValueError(why)
        if after.memory_mebibytes >= before.memory_mebibytes:
            continue
        used_bytes = around.used_bytes.get((allocation.id, gpu))
        if used_bytes is None and not around.listed:
            return Waits(gpu, allocation)
        if used_bytes is None:
            raise ValueError(f"how much memory it uses on GPU {gpu} is not known, so it can't get less")
        if used_bytes > after.memory_mebibytes << 20:
            raise ValueError(
                f"it uses {-(-used_bytes >> 20)} MiB of GPU {gpu}, more than {after.memory_mebibytes} MiB; free memory in it first"
            )
    return None


def _refuse_above_most(ledger: Ledger, allocation: Allocation, resized: Allocation, around: Surroundings) -> None:
    more = sum((_more(allocation, resized, gpu) for gpu in allocation.gpus), Amounts())
    others = [a for a in ledger.of(allocation.pod, allocation.uid) if a.id != allocation.id]
    above, own = above_requests([resized, *others], {}), above_requests([resized], {})
    for name, unit in (("cores", "cores"), ("memory_mebibytes", "MiB")):
        if getattr(more, name) and getattr(own, name) and getattr(above, name) > getattr(around.most, name):
            raise ValueError(
                f"the pod would have {getattr(above, name)} {unit} above its requests, and this node allows {getattr(around.most, name)} "
                f"(enforcement.max_growth_{name})"
            )


def _lent(ledger: Ledger, allocation: Allocation, resized: Allocation, gpu: GpuName, around: Surroundings) -> int | Waits:
    """The MiB of this GPU that suspended containers lend. Raises ValueError if less is left than the container needs."""
    more, after = _more(allocation, resized, gpu), ledger.occupy(resized)
    others = [a for a in ledger.on(gpu) if a.id != allocation.id]
    bursts = sum(around.beyond(a, gpu) for a in (*others, resized))
    size = min(ledger.gpu_registry.by_name[gpu].memory_mebibytes, around.memory_mebibytes.get(gpu, 1 << 62))
    excess = (after.in_force(gpu) + Amounts(0, bursts)).beyond(Amounts(CORES_PER_GPU, size))
    # A client of MPS keeps the limit with which it started, so it could give nothing back.
    lenders = () if "mps" in allocation.mechanisms else [a for a in others if a.id in around.away]
    lendable = sum(a.guaranteed_on(gpu).memory_mebibytes for a in lenders)
    lendable -= sum(max(0, a.lent_on(gpu) - around.beyond(a, gpu)) for a in others)
    if more.cores and excess.cores:
        needed, left, unit = more.cores, more.cores - excess.cores, "cores"
        held = {a.describe(): a.grown_on(gpu).cores for a in others}
    elif more.memory_mebibytes and excess.memory_mebibytes > max(0, lendable):
        needed, left, unit = more.memory_mebibytes, more.memory_mebibytes - excess.memory_mebibytes, "MiB"
        held = {a.describe(): a.grown_on(gpu).memory_mebibytes + around.beyond(a, gpu) for a in others}
    else:
        reach = {a.id: around.reach(a, gpu) for a in others}
        left = size - after.in_force(gpu).memory_mebibytes - bursts + max(0, lendable)
        if more.memory_mebibytes and sum(reach.values()) > max(0, left):
            return Waits(gpu, max(others, key=lambda a: reach[a.id]))
        return min(excess.memory_mebibytes, more.memory_mebibytes + allocation.lent_on(gpu))
    holder = max(held, key=lambda name: held[name], default="")
    by = f"; {holder} has {held[holder]} {unit} above its request there" if held.get(holder) else ""
    raise ValueError(f"GPU {gpu} has {max(0, left)} {unit} left for it, and it needs {needed} more{by}")
