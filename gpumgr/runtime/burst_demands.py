"""Reads the memory limits that pods demand by the annotation gpumgr.io/memory-limit, and reports each that is not used."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import structlog
from msgspec.structs import replace

from gpumgr.agent.pods import find_pod, users
from gpumgr.agent.ports import Pods
from gpumgr.common.units import MEMORY_LIMIT_ANNOTATION, GpuName, Resource
from gpumgr.ledger.burst import above_requests, wanted_limits
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.usage.node_use import AllocationOnGpu
from gpumgr.placement.pods import PodView
from gpumgr.placement.topology.devices import Gpu
from gpumgr.runtime.container_events import ContainerEvents, Subject

log = structlog.get_logger(__name__)

#: The reason in the pod's event if its annotation gpumgr.io/memory-limit is not used.
IGNORED: Final = "GpuMemoryLimitIgnored"
_OFF: Final = "this node allows no burst (enforcement.memory_burst is off)"


class BurstDemands:
    """`obstacle` returns why these mechanisms can't change a limit at once, also for running programs; None: they can. `allowed`: the
    setting enforcement.memory_burst."""

    def __init__(
        self, pods: Pods, events: ContainerEvents, *, obstacle: Callable[[tuple[str, ...], Resource], str | None]
    ) -> None:
        self._pods, self._events, self._obstacle, self.allowed = pods, events, obstacle, False
        #: How much memory a pod may have above its requests, also by resizes (enforcement.max_growth_memory_mebibytes); 0: no maximum.
        self.most_mebibytes = 0

    def find(
        self, ledger: Ledger, gpus: Mapping[GpuName, Gpu], shares: Collection[AllocationId]
    ) -> tuple[dict[AllocationOnGpu, int], Collection[AllocationId]]:
        """Returns the limits above requests, in bytes, including memory lent by suspended containers; and the containers of unknown pods
        that may have had such a limit. Reports each annotation that is not used, once. Containers that use one claim together have the
        highest limit that one of them demands."""
        sizes = {name: gpu.memory_mebibytes for name, gpu in gpus.items()}
        limits, unknown = dict[AllocationOnGpu, int](), set[AllocationId]()
        ignored = dict[Subject, str]()
        for allocation in (ledger.allocations[name] for name in shares):
            found = {gpu: allocation.limits_on(gpu).memory_mebibytes for gpu in allocation.gpus if allocation.lent_on(gpu)}
            by_user = self._by_user(allocation)
            if not by_user and self.allowed and self.can_burst(allocation):
                unknown.add(allocation.id)
            for view, share in by_user:
                if not (view.memory_limits or view.memory_limits_ignored):
                    continue  # most pods have no such annotation
                try:
                    wanted = self._wanted(ledger, share, view, sizes)
                except ValueError as error:
                    why = f"the annotation {MEMORY_LIMIT_ANNOTATION} is not used, and the request stays the limit: {error}"
                    ignored[allocation.id, (view.key, view.uid, share.container)] = why
                else:
                    found |= {gpu: max(mebibytes, found.get(gpu, 0)) for gpu, mebibytes in wanted.items()}
            limits |= {(allocation.id, gpu): mebibytes << 20 for gpu, mebibytes in found.items()}
        for (name, _), why in self._events.report(IGNORED, ignored).items():
            log.warning("memory_limit_ignored", allocation=name, holder=ledger.allocations[name].describe(), reason=why)
        return limits, unknown

    def can_burst(self, allocation: Allocation) -> bool:
        """Whether the container's mechanisms can enforce a burst."""
        return self._obstacle(allocation.mechanisms, "memory") is None

    def demands_burst(self, allocation: Allocation) -> bool:
        """Whether a known pod that uses the allocation demands a burst."""
        return any(view.memory_limits for view, _ in self._by_user(allocation))

    def _by_user(self, allocation: Allocation) -> Sequence[tuple[PodView, Allocation]]:
        """The pods that use the allocation, each with a copy of the allocation that names the pod and its container; empty while no pod is
        known."""
        if allocation.claim is None:
            view = find_pod(self._pods, allocation.pod, allocation.uid)
            return [(view, allocation)] if view is not None else []
        return [
            (view, replace(allocation, pod=view.key, uid=view.uid, container=name))
            for view in self._pods.all()
            for name in users(allocation.claim, view)
        ]

    def _wanted(
        self, ledger: Ledger, allocation: Allocation, view: PodView, sizes: Mapping[GpuName, int]
    ) -> Mapping[GpuName, int]:
        """Like `wanted_limits` (gpumgr.ledger.burst); also raises ValueError if this allocation can't have a burst. `view`: its pod."""
        if not (wanted := wanted_limits(allocation, view, sizes)):
            return wanted
        if why := self._obstacle(allocation.mechanisms, "memory") if self.allowed else _OFF:
            raise ValueError(why)
        others = (a for a in ledger.of(allocation.pod, allocation.uid) if a.id != allocation.id)
        above = above_requests([allocation, *others], dict(view.memory_limits)).memory_mebibytes
        if self.most_mebibytes and above > self.most_mebibytes:
            raise ValueError(
                f"the pod could have {above} MiB above its requests, and this node allows {self.most_mebibytes} "
                "(enforcement.max_growth_memory_mebibytes)"
            )
        return wanted
