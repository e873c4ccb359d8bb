"""Evictions of pods that stay over their GPU memory, where the operator chose that: asked for, and taken back when it is over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.pods import PodKey
from gpumgr.units import GpuName
from gpumgr.usage.picture import ContainerUse

log = structlog.get_logger(__name__)

#: An offender that was to be evicted and is still there.
EVICT_AGAIN_SECONDS: Final = 60.0
#: Reason of the event of a pod that is evicted.
EVICTED: Final = "GpuPodEvicted"

#: Name and UID of an allocation's pod, None if they are not known.
PodOf = Callable[[AllocationId], tuple[PodKey, str] | None]
#: Takes the allocation, the event's reason, its message, and the GPU.
Tell = Callable[[AllocationId, str, str, GpuName], None]


class Announcer(Protocol):
    """Asks the API server, without waiting for it (gpumgr.kubeapi.writer.announcer.Announcer).

    What pods are told, it has from the history.
    """

    def evict(self, pod: PodKey, uid: str, *, reason: str) -> None: ...

    def cancel_evict(self, uid: str, *, reason: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """When (monotonic seconds), for which life of a pod, and with which reason; `uid` None: nobody could be asked."""

    at: float
    uid: str | None
    reason: str


class Offenders:
    """`announcer` None: there is no API server. `count` counts evictions. `clock` is monotonic, in seconds."""

    def __init__(
        self, announcer: Announcer | None, *, pod_of: PodOf, tell: Tell, count: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._announcer, self._pod_of, self._tell, self._count, self._clock = announcer, pod_of, tell, count, clock
        self._asked: dict[AllocationId, _Asked] = {}

    def evict(self, uses: Sequence[ContainerUse]) -> None:
        """All that are over now, one each; whoever was and is no more may stay. Asked again now and then for those that stay: a name may
        have been missing, or a right."""
        for allocation in self._asked.keys() - {use.allocation for use in uses}:
            self._take_back(self._asked.pop(allocation))
        now = self._clock()
        for use in uses:
            before = self._asked.get(use.allocation)
            if before is None or now - before.at >= EVICT_AGAIN_SECONDS:
                self._asked[use.allocation] = self._ask(use, now)

    def _take_back(self, asked: _Asked) -> None:
        if self._announcer is not None and asked.uid is not None:
            self._announcer.cancel_evict(asked.uid, reason=asked.reason)

    def _ask(self, use: ContainerUse, now: float) -> _Asked:
        name, reason = self._pod_of(use.allocation), f"container {use.container or '?'} stayed over its GPU memory"
        if self._announcer is None or name is None:
            why = "there is no API server to ask" if self._announcer is None else "which pod it is is not known"
            log.warning("not_evicted", allocation=use.allocation, holder=use.describe(), reason=why)
            return _Asked(at=now, uid=None, reason=reason)
        self._count()
        self._tell(use.allocation, EVICTED, f"the pod is evicted: {reason}", use.gpu)
        self._announcer.evict(*name, reason=reason)
        return _Asked(at=now, uid=name[1], reason=reason)
