"""Burst: a container may use more GPU memory than it requested, up to its own limit (annotation `gpumgr.io/memory-limit`). Pure.

A burst gets only memory that no container was granted, because memory in use can't be taken back. So every request stays guaranteed.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gpumgr.common.units import BLOCK_MEBIBYTES, Amounts, GpuName
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.placement.pods import PodView

_MEBIBYTE: Final = 1 << 20


class ContainerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A container's memory on one GPU. `limit_bytes`: the most that it may use; equal to the request without a burst. `used_bytes` None:
    not known."""

    request_bytes: int
    limit_bytes: int
    used_bytes: int | None = None

    @property
    def burst_bytes(self) -> int:
        return max(0, (self.used_bytes or 0) - self.request_bytes)


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of some containers on one GPU. `free_bytes`: what no process uses; None: not known. `granted_bytes`: their grants
    together; memory that was taken over from an init container counts once."""

    containers: Mapping[AllocationId, ContainerMemory]
    free_bytes: int | None
    granted_bytes: int

    @property
    def unused_bytes(self) -> int:
        return max(
            0, self.granted_bytes - sum(min(each.used_bytes or 0, each.request_bytes) for each in self.containers.values())
        )

    def limits(self, *, starting: bool) -> dict[AllocationId, int]:
        """The present limits in bytes: whole MiB, and never below a request. `starting`: another container needs memory, so none may burst
        further."""
        room = 0 if starting or self.free_bytes is None else max(0, self.free_bytes - self.unused_bytes) // _MEBIBYTE * _MEBIBYTE
        return {
            key: each.request_bytes
            + min(each.limit_bytes - each.request_bytes, -(-each.burst_bytes // _MEBIBYTE) * _MEBIBYTE + room)
            for key, each in self.containers.items()
        }

    def missing_bytes(self, need_bytes: int, guaranteed_bytes: int, reach_bytes: int = 0) -> int:
        """How much memory the GPU lacks so that another container can start or be resumed; 0: nothing.

        `need_bytes` must be free. And `guaranteed_bytes` must be free beside the memory that `containers` may still take: `unused_bytes`,
        and the `reach_bytes` that their limits in force allow beyond their grants. `guaranteed_bytes` is less than `need_bytes` on an
        oversubscribed GPU: only what the ledger counts is guaranteed, and the container that takes the rest first gets it.

        While the free memory is not known, the result is `reach_bytes`: a start waits for lower limits, and is not refused.
        """
        if self.free_bytes is None:
            return reach_bytes
        left = max(0, self.free_bytes - self.unused_bytes - reach_bytes)
        return max(0, need_bytes - self.free_bytes, guaranteed_bytes - left)


def wanted_limits(
    allocation: Allocation,
    view: PodView,
    others: Iterable[Allocation],
    memory_mebibytes: Mapping[GpuName, int],
    *,
    obstacle: str | None,
    most_mebibytes: int,
) -> dict[GpuName, int]:
    """GPU -> the limit in MiB that the pod demands for this container. `others`: the pod's other allocations. `memory_mebibytes`: of each
    GPU. `obstacle`: why this container can't have a burst. `most_mebibytes`: how much a pod may have above its requests; 0: no maximum.
    Raises ValueError with the reason."""
    limits = dict(view.memory_limits)
    if view.memory_limits_ignored is not None:
        raise ValueError(view.memory_limits_ignored)
    if (wanted := limits.get(allocation.container or "")) is None:
        return {}
    if obstacle is not None:
        raise ValueError(obstacle)
    for gpu in allocation.gpus:
        request, most = allocation.gpus[gpu].memory_mebibytes, memory_mebibytes.get(gpu, wanted)
        if gpu in allocation.limits and allocation.limits[gpu].memory_mebibytes != request:
            raise ValueError("the memory of this node is granted more than once (hami.device_memory_scaling)")
        if wanted < request:
            raise ValueError(
                f"it sets {wanted} MiB for container {allocation.container}, less than the {request} MiB that the container requests"
            )
        if wanted > most:
            raise ValueError(f"it sets {wanted} MiB for container {allocation.container}, and GPU {gpu} has only {most} MiB")
    above = above_requests([allocation, *others], limits).memory_mebibytes
    if most_mebibytes and above > most_mebibytes:
        raise ValueError(
            f"the pod could have {above} MiB above its requests, and this node allows {most_mebibytes} "
            "(enforcement.max_growth_memory_mebibytes)"
        )
    return {gpu: max(wanted, allocation.limits_on(gpu).memory_mebibytes) for gpu in allocation.gpus}


def above_requests(allocations: Iterable[Allocation], limits: Mapping[str, int]) -> Amounts:
    """What resizes and bursts may add to the requests of these containers of one pod. `limits`: container -> the limit of its burst in
    MiB."""
    above = Amounts()
    for a in allocations:
        for gpu, granted in a.gpus.items() if a.resized or a.container in limits else ():
            above += a.limits_on(gpu).most(Amounts(0, limits.get(a.container or "", 0))).beyond(granted)
    return above


def blocks_of_burst(mebibytes: int) -> int:
    """How many memory blocks can't be granted because of bursts."""
    return -(-mebibytes // BLOCK_MEBIBYTES)
