"""Reads the memory limits that pods demand by the annotation gpumgr.io/memory-limit, and reports each that is not used."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog
from msgspec.structs import replace

from gpumgr.agent.pods import find_pod, users
from gpumgr.agent.ports import Pods
from gpumgr.common.units import MEMORY_LIMIT_ANNOTATION, GpuName
from gpumgr.ledger.burst import wanted_limits
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.usage.node_use import AllocationOnGpu, NodeUse
from gpumgr.placement.pods import PodView
from gpumgr.placement.topology.devices import Gpu
from gpumgr.runtime.container_events import ContainerEvents, Subject
from gpumgr.settings.schema import EnforcementSettings

log = structlog.get_logger(__name__)

#: The reason in the pod's event if its annotation gpumgr.io/memory-limit is not used.
IGNORED: Final = "GpuMemoryLimitIgnored"
_OFF: Final = "this node allows no burst (enforcement.memory_burst is off)"

Shares = Mapping[AllocationId, GpuShare]


class BurstDemands:
    """`obstacle` returns why these mechanisms can't change a limit of memory at once, also for running programs; None: they can."""

    def __init__(self, pods: Pods, events: ContainerEvents, *, obstacle: Callable[[tuple[str, ...]], str | None]) -> None:
        self._pods, self._events, self.obstacle = pods, events, obstacle
        self.rule = EnforcementSettings()

    def find(self, ledger: Ledger, gpus: Mapping[GpuName, Gpu], shares: Shares, use: NodeUse) -> dict[AllocationOnGpu, int]:
        """Returns the limits above requests, in bytes, including memory lent by suspended containers. Reports each annotation that is not
        used, once. Containers that use one claim together have the highest limit that one of them demands. While a container's pod is
        unknown, a use above the request counts as the limit, so that the container is not over its limit."""
        sizes = {name: gpu.memory_mebibytes for name, gpu in gpus.items()}
        limits, ignored = dict[AllocationOnGpu, int](), dict[Subject, str]()
        for allocation in (ledger.allocations[name] for name in shares):
            found = {gpu: allocation.limits_on(gpu).memory_mebibytes for gpu in allocation.gpus if allocation.lent_on(gpu)}
            obstacle = self.obstacle(allocation.mechanisms) if self.rule.memory_burst else _OFF
            by_user = self._by_user(allocation)
            if not by_user and obstacle is None:
                used = {gpu: use.containers[allocation.id, gpu] for gpu in allocation.gpus}
                above = {gpu for gpu, each in used.items() if (each.memory_bytes or 0) > (each.memory_request_bytes or 0)}
                found |= {gpu: -(-(used[gpu].memory_bytes or 0) >> 20) for gpu in above}
            for view, share in by_user:
                if not (view.memory_limits or view.memory_limits_ignored):
                    continue  # most pods have no such annotation
                others = [a for a in ledger.of(share.pod, share.uid) if a.id != share.id]
                most = self.rule.max_growth_memory_mebibytes
                try:
                    wanted = wanted_limits(share, view, others, sizes, obstacle=obstacle, most_mebibytes=most)
                except ValueError as error:
                    why = f"the annotation {MEMORY_LIMIT_ANNOTATION} is not used, and the request stays the limit: {error}"
                    ignored[allocation.id, (view.key, view.uid, share.container)] = why
                else:
                    found |= {gpu: max(mebibytes, found.get(gpu, 0)) for gpu, mebibytes in wanted.items()}
            limits |= {(allocation.id, gpu): mebibytes << 20 for gpu, mebibytes in found.items()}
        for (name, _), why in self._events.report(IGNORED, ignored).items():
            log.warning("memory_limit_ignored", allocation=name, holder=ledger.allocations[name].describe(), reason=why)
        return limits

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
