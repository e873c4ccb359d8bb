"""Burst: a container may use more GPU memory than it requested, up to its own limit (annotation `gpumgr.io/memory-limit`). Pure.

A burst gets only memory that no container was granted; granted memory that is not used yet stays free for its holder. So every request
stays guaranteed, although memory in use can't be taken back.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from gpumgr.common.units import BLOCK_MEBIBYTES, Amounts, GpuName
from gpumgr.ledger.ledger import Allocation
from gpumgr.placement.pods import PodView

_MEBIBYTE: Final = 1 << 20
_K = TypeVar("_K")


class ContainerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A container's memory on one GPU. `limit_bytes`: the most that it may use; equal to the request without a burst.
    `used_bytes` None: not known."""

    request_bytes: int
    limit_bytes: int
    used_bytes: int | None = None

    @property
    def unused_bytes(self) -> int:
        """The memory that it was granted and does not use."""
        return max(0, self.request_bytes - (self.used_bytes or 0))

    @property
    def burst_bytes(self) -> int:
        """The memory that it holds above its request."""
        return max(0, (self.used_bytes or 0) - self.request_bytes)


def wanted_limits(allocation: Allocation, view: PodView, memory_mebibytes: Mapping[GpuName, int]) -> dict[GpuName, int]:
    """GPU -> the limit in MiB that the pod demands; empty if it demands no limit for this container. `memory_mebibytes`: the memory of
    each GPU. Raises ValueError with the reason if the limit is not possible."""
    if view.memory_limits_ignored is not None:
        raise ValueError(view.memory_limits_ignored)
    if (wanted := dict(view.memory_limits).get(allocation.container or "")) is None:
        return {}
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
    return {gpu: max(wanted, allocation.limits_on(gpu).memory_mebibytes) for gpu in allocation.gpus}


def above_requests(allocations: Iterable[Allocation], limits: Mapping[str, int]) -> Amounts:
    """By how much, all together, resizes and bursts may take these containers of one pod above their requests. `limits`: container -> the
    limit of its burst in MiB."""
    above = Amounts()
    for a in allocations:
        for gpu, granted in a.gpus.items() if a.resized or a.container in limits else ():
            above += a.limits_on(gpu).most(Amounts(0, limits.get(a.container or "", 0))).beyond(granted)
    return above


def limits_now(
    memories: Mapping[_K, ContainerMemory], *, free_bytes: int | None, granted_bytes: int, starting: bool
) -> dict[_K, int]:
    """The limits that all containers on one GPU have now, in bytes: whole MiB, and never below a request. `free_bytes`: memory that no
    process uses; None: not known. `granted_bytes`: the sum of all requests on the GPU. `starting`: a container is about to start on the
    GPU, so no container may burst further now."""
    unused = unused_bytes(memories.values(), granted_bytes)
    room = 0 if starting or free_bytes is None else max(0, free_bytes - unused) // _MEBIBYTE * _MEBIBYTE
    return {
        key: each.request_bytes + min(each.limit_bytes - each.request_bytes, -(-each.burst_bytes // _MEBIBYTE) * _MEBIBYTE + room)
        for key, each in memories.items()
    }


def unused_bytes(memories: Iterable[ContainerMemory], granted_bytes: int) -> int:
    """What was granted and is not used. Memory that a container took over from an init container was granted only once."""
    return max(0, granted_bytes - sum(min(each.used_bytes or 0, each.request_bytes) for each in memories))


def obstacle_to_start(
    memories: Mapping[_K, ContainerMemory], own: ContainerMemory, *, free_bytes: int, granted_bytes: int, slack_bytes: int
) -> tuple[int, _K] | None:
    """Whether a container with the memory `own` can start while the containers in `memories` are on the GPU. None: it can. Otherwise the
    bytes that are left for it, and the container that holds most above its request. `granted_bytes`: the sum of all requests on the GPU,
    its own included. Memory that was granted to others does not count as left. A container that holds at most `slack_bytes` above its
    request (contexts, rounding) is no obstacle."""
    unused = unused_bytes([own, *memories.values()], granted_bytes)
    left = max(0, free_bytes - max(0, unused - own.unused_bytes))
    holder = max(memories, key=lambda key: memories[key].burst_bytes, default=None)
    if own.unused_bytes <= left or holder is None or memories[holder].burst_bytes <= slack_bytes:
        return None
    return left, holder


def blocks_of_burst(mebibytes: int) -> int:
    """How many memory blocks can't be granted because of a burst."""
    return -(-mebibytes // BLOCK_MEBIBYTES)
