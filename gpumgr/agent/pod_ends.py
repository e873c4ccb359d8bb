"""Decides whether the pods of allocations have ended.

An offer of ids, or their absence in `List`, does not prove it: a kubelet that lost its checkpoint offers the ids of running pods. The API
server decides. The container runtime decides if the API server can't be reached, if the pod is being deleted (the kubelet may report its
end later than it offers the ids), or if the API server can't know the pod: an allocation without a UID may belong to an earlier pod of that
name, and the mirror pod of a static pod can get another UID while the pod runs.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods, Runtime
from gpumgr.common.errors import CriError
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.pods import PodSandbox, is_static_uid

#: How long to wait for the watch, and thus the kubelet's call: the kubelet frees the ids of an ended pod some milliseconds before the watch
#: shows the end.
END_SECONDS: Final = 0.5
#: After a wait for the end of a pod, there is no other wait for it within this time.
REPEAT_SECONDS: Final = 5.0
#: The container runtime answers in milliseconds, or hangs.
RUNTIME_SECONDS: Final = 1.0


class PodEnds:
    """`clock` is monotonic, in seconds."""

    def __init__(self, pods: Pods, runtime: Runtime, *, clock: Callable[[], float]) -> None:
        self._pods, self._runtime, self._clock = pods, runtime, clock
        self._waited: Mapping[AllocationId, float] = {}

    async def find(self, allocations: Iterable[Allocation], *, wait: bool = False) -> Mapping[AllocationId, bool | None]:
        """Allocation -> whether its pod has ended; None: this is not known. `wait`: gives the watch END_SECONDS to show the end."""
        allocations = tuple(allocations)
        ended = {a.id: self._by_api_server(a) for a in allocations}
        if wait:
            await self._wait([a for a in allocations if ended[a.id] is False])
            ended = {a.id: self._by_api_server(a) for a in allocations}
        unknown = [a for a in allocations if (ended[a.id] is None and (a.uid or a.pod)) or self._ends(a, ended[a.id])]
        if unknown and (sandboxes := await self._sandboxes()) is not None:
            ended |= {a.id: not any(_is_of(each, a) for each in sandboxes) for a in unknown}
        return ended

    def _by_api_server(self, a: Allocation) -> bool | None:
        """Whether the API server shows the end; None: it can't be reached, or can't know the pod."""
        if a.uid is None:
            return None
        view = find_pod(self._pods, a.pod, a.uid)
        if view is not None and view.ended:
            return True
        if not self._pods.reachable:
            return None
        if view is not None:
            return False
        later = self._pods.get(a.pod) if a.pod else None
        static = is_static_uid(a.uid) or (later is not None and later.runtime_uid is not None)
        return None if static else True

    def _ends(self, a: Allocation, ended: bool | None) -> bool:
        """Whether the API server shows a pod that is being deleted and has not ended."""
        view = find_pod(self._pods, a.pod, a.uid) if ended is False else None
        return view is not None and view.deleted

    async def _wait(self, running: Collection[Allocation]) -> None:
        now = self._clock()
        self._waited = {each: at for each, at in self._waited.items() if now - at < REPEAT_SECONDS}
        due = [a for a in running if a.id not in self._waited]
        if due:
            self._waited |= {a.id: now for a in due}
            await self._pods.wait_ended({a.uid for a in due if a.uid}, END_SECONDS)

    async def _sandboxes(self) -> Collection[PodSandbox] | None:
        """The runtime's ready sandboxes; None: it does not answer."""
        try:
            async with asyncio.timeout(RUNTIME_SECONDS):
                return await self._runtime.ready_sandboxes()
        except (CriError, TimeoutError):
            return None


def _is_of(sandbox: PodSandbox, a: Allocation) -> bool:
    """Whether the sandbox belongs to the allocation's pod. The UID of a static pod in the ledger may be that of its mirror pod, which the
    runtime does not know."""
    return sandbox.uid == a.uid or (sandbox.pod == a.pod and (a.uid is None or is_static_uid(sandbox.uid)))
