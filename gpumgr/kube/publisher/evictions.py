"""The pods to evict, by requester: a drain and the memory limit may both request the eviction of a pod."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from gpumgr.agent.drain_evictions import Eviction
from gpumgr.kube.client import ApiServer
from gpumgr.kube.publisher.work_queue import Job, WorkQueue
from gpumgr.ledger.pods import PodKey

_log = structlog.get_logger(__name__)

_GONE: Final = (404, 409)


@dataclass(slots=True)
class _Wanted:
    """`reasons` by requester. `requested_at`: when the eviction was queued last (monotonic seconds; infinity once the pod is gone);
    `requests`: how many were sent."""

    pod: PodKey
    requested_at: float
    reasons: dict[str, str] = field(default_factory=dict)
    requests: int = 0


class PodEvictions:
    """The desired state by pod UID. `clock` is monotonic, in seconds. `retries` counts requests after the first for a pod."""

    def __init__(self, server: ApiServer, queue: WorkQueue, *, resync_seconds: float, clock: Callable[[], float]) -> None:
        self._server, self._queue, self._resync_seconds, self._clock = server, queue, resync_seconds, clock
        self._wanted: dict[str, _Wanted] = {}
        self.retries = 0

    def set(self, requester: str, evictions: Iterable[Eviction], *, immediately: bool = False) -> None:
        """Replaces the evictions of the requester. A pod without any requester is no longer evicted. `immediately`: requests them now,
        also evictions that were requested a short time ago."""
        now, wanted = self._clock(), {each.uid: each for each in evictions}
        for uid, eviction in wanted.items():
            known = self._wanted.get(uid)
            if known is None or now - known.requested_at >= (0.0 if immediately else self._resync_seconds):
                known = self._wanted.setdefault(uid, _Wanted(eviction.pod, now))
                known.requested_at = now
                self._queue.put(Job("eviction", uid), now)
            known.reasons[requester] = eviction.reason
        for uid, known in list(self._wanted.items()):
            if uid in wanted or (reason := known.reasons.pop(requester, None)) is None or known.reasons:
                continue
            if self.forget(uid):
                _log.info("eviction_cancelled", pod_uid=uid, was_because=reason)

    def gone(self, uid: str) -> None:
        """The pod is deleted: it is not requested again, although a requester may still want it until its allocation is freed."""
        self._queue.remove(Job("eviction", uid))
        if (known := self._wanted.get(uid)) is not None:
            known.requested_at = math.inf

    def forget(self, uid: str) -> bool:
        """Drops the eviction of a pod. True if its request was still to be sent."""
        self._wanted.pop(uid, None)
        return self._queue.remove(Job("eviction", uid))

    def eviction(self, uid: str) -> Eviction | None:
        known: _Wanted | None = self._wanted.get(uid)
        return Eviction(uid=uid, pod=known.pod, reason="; ".join(known.reasons.values())) if known is not None else None

    async def write(self, uid: str) -> None:
        """Requests the eviction of this incarnation of the pod. Raises what `ApiServer.send` raises."""
        known = self._wanted[uid]
        self.retries += known.requests > 0
        known.requests += 1
        namespace, name = known.pod
        body: Mapping[str, object] = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": namespace, "name": name},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        reason = "; ".join(known.reasons.values())
        if await self._server.send("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body, but=_GONE):
            _log.info("pod_evicted", pod=f"{namespace}/{name}", pod_uid=uid, reason=reason)
