"""Decides whether the pods of allocations have ended.

Neither an offer of ids nor their absence in `List` proves that: a kubelet that lost its checkpoint offers the ids of pods that run. The
API server decides, or the container runtime where the API server can't be reached or can't know the pod: an allocation without a UID may
belong to an earlier pod of its name, and the mirror pod of a static pod gets another UID while the pod runs.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods, Runtime
from gpumgr.allocator.ledger import Allocation, AllocationId
from gpumgr.allocator.pods import PodSandbox, is_static_uid
from gpumgr.errors import CriError

#: The kubelet frees the ids of an ended pod before the watch shows the end, mostly by some milliseconds. The kubelet waits as long.
END_SECONDS: Final = 0.5
#: A pod that runs although the kubelet offers its ids is not waited for again within this time.
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
        unknown = [a for a in allocations if ended[a.id] is None and (a.uid or a.pod)]
        if unknown and (sandboxes := await self._sandboxes()) is not None:
            ended |= {a.id: not any(_is_of(each, a) for each in sandboxes) for a in unknown}
        return ended

    def _by_api_server(self, a: Allocation) -> bool | None:
        """None: the API server can't be reached, or does not show it."""
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
    """A static pod's UID in the ledger may be that of its mirror pod, which the runtime does not know."""
    return sandbox.uid == a.uid or (sandbox.pod == a.pod and (a.uid is None or is_static_uid(sandbox.uid)))
