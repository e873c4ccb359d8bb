"""Pods that shall go, and for whose sake: one may stand in the way of a drain and be over its memory, too."""

from collections.abc import Callable

import structlog

from gpumgr.allocator.pods import PodKey
from gpumgr.kubeapi.writer.jobs import Job
from gpumgr.kubeapi.writer.notices import Eviction
from gpumgr.kubeapi.writer.outbox import Outbox
from gpumgr.kubeapi.writer.writes import Writes

_log = structlog.get_logger(__name__)


class Evictions:
    """A pod is asked for as long as there is a reason, in the words of those who want it gone. `clock` is monotonic, in seconds."""

    def __init__(self, writes: Writes, outbox: Outbox[Job], *, clock: Callable[[], float]) -> None:
        self._writes, self._outbox, self._clock = writes, outbox, clock
        #: By UID, the oldest reason first.
        self._reasons: dict[str, list[str]] = {}

    def ask(self, pod: PodKey, uid: str, reason: str) -> None:
        reasons = self._reasons.setdefault(uid, [])
        if reason not in reasons:
            reasons.append(reason)
        self._outbox.put(Eviction(pod=pod, uid=uid, reason=reason), self._clock())

    def cancel(self, uid: str, reason: str | None = None) -> None:
        """The reason holds no more; None: none does. A request that is under way goes on."""
        reasons = self._reasons.get(uid, [])
        left = [each for each in reasons if reason is not None and each != reason]
        if len(left) == len(reasons):
            return
        if left:
            self._reasons[uid] = left
        else:
            self.forget(uid)
            _log.info("eviction_cancelled", pod_uid=uid, was_because="; ".join(reasons))

    def forget(self, uid: str) -> None:
        """Nothing is asked of this life of the pod any more."""
        self._reasons.pop(uid, None)
        self._outbox.done(Eviction(uid=uid, pod=("", ""), reason=""))

    async def write(self, job: Eviction) -> None:
        """Asks for it, unless all its reasons are gone. Raises what `Writes` raises."""
        if job.uid not in self._reasons:
            return
        if await self._writes.evict(job):
            reasons = "; ".join(self._reasons.get(job.uid, [job.reason]))
            _log.info("pod_evicted", pod="/".join(job.pod), pod_uid=job.uid, reason=reasons)
        self.forget(job.uid)
