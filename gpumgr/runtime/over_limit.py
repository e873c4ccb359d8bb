"""Evictions of pods that stay over their GPU memory, where the operator chose that (`enforcement.evict`)."""

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from gpumgr.agent.ports import Eviction, Evictor
from gpumgr.common.units import GpuName
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.pods import PodKey
from gpumgr.ledger.usage.node_use import ContainerUse

log = structlog.get_logger(__name__)

#: Reason of the event of a pod that is evicted.
EVICTED: Final = "GpuPodEvicted"
_REQUESTER: Final = "memory limit"

#: Name and UID of an allocation's pod, None if they are not known.
PodOf = Callable[[AllocationId], tuple[PodKey, str] | None]
#: Takes the allocation, the event's reason, its message, and the GPU.
Record = Callable[[AllocationId, str, str, GpuName], None]


class OverLimitReporter:
    """`evictor` is None without an API server. `record` writes to the history, `count` counts the requested evictions."""

    def __init__(self, evictor: Evictor | None, *, pod_of: PodOf, record: Record, count: Callable[[], None]) -> None:
        self._evictor, self._pod_of, self._record, self._count = evictor, pod_of, record, count
        self._requested: frozenset[str] = frozenset()
        self._not_evicted: frozenset[AllocationId] = frozenset()

    def evict(self, uses: Sequence[ContainerUse]) -> None:
        """Requests the eviction of the pods that are over their memory now, and of no others."""
        wanted: dict[str, Eviction] = {}
        nameless = []
        for use in uses:
            name, reason = self._pod_of(use.allocation), f"container {use.container or '?'} stayed over its GPU memory"
            if self._evictor is None or name is None:
                nameless.append(use)
            elif name[1] not in wanted:
                wanted[name[1]] = Eviction(uid=name[1], pod=name[0], reason=reason)
                if name[1] not in self._requested:
                    self._count()
                    self._record(use.allocation, EVICTED, f"the pod is evicted: {reason}", use.gpu)
        for use in nameless:
            if use.allocation not in self._not_evicted:
                why = "there is no API server to request it from" if self._evictor is None else "its pod is not known"
                log.warning("not_evicted", allocation=use.allocation, holder=use.describe(), reason=why)
        self._not_evicted = frozenset(use.allocation for use in nameless)
        if self._evictor is not None and (wanted or self._requested):
            self._evictor.evict(_REQUESTER, wanted.values())
        self._requested = frozenset(wanted)
