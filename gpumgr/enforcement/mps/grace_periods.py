"""Ends the MPS clients of deleted pods one second before their grace periods end, and never earlier."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import structlog

from gpumgr.common.aio import wait_at_most
from gpumgr.common.errors import CriError
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.ledger.join import AllocationIndex
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.node_use import Container
from gpumgr.placement.pods import PodView
from gpumgr.runtime.containers import Containers

log = structlog.get_logger(__name__)

#: The kubelet kills what still runs at the end of the grace period, so the clients are ended before.
AHEAD_SECONDS: Final = 1.0


class GracePeriods:
    """`pod_changed` is a listener of the pod cache, `run` a background task. `about_to_end` is called with the pods that are due. `clock`:
    monotonic. `wall_clock`: unix seconds."""

    def __init__(
        self,
        about_to_end: Callable[[Sequence[PodView]], Coroutine[Any, Any, None]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._about_to_end, self._clock, self._wall_clock = about_to_end, clock, wall_clock
        #: UID -> (when `about_to_end` is due, in monotonic seconds, the pod).
        self._due: dict[str, tuple[float, PodView]] = {}
        self._changed = asyncio.Event()

    def pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        """Notes when a deleted pod is due.

        The kubelet counts `grace_seconds` from when it sees the deletion, about when the agent does. The deletion's timestamp (`ends_at`)
        has only whole seconds of the API server's clock, so the later end counts. After the agent's start only the timestamp is known. The
        deletion of a mirror pod does not end its static pod.
        """
        if after is None:
            if before is not None:
                self._due.pop(before.uid, None)
        elif after.ends_at is not None and after.runtime_uid is None and (before is None or before.ends_at != after.ends_at):
            wait = after.ends_at - self._wall_clock()
            if before is not None and after.grace_seconds is not None:
                wait = max(wait, after.grace_seconds)
            self._due[after.uid] = self._clock() + max(0.0, wait - AHEAD_SECONDS), after
            self._changed.set()

    async def run(self) -> None:
        """Calls `about_to_end` for the pods that are due, without waiting for earlier calls."""
        async with asyncio.TaskGroup() as group:
            while True:
                due = [uid for uid, (at, _) in self._due.items() if at <= self._clock()]
                if due:
                    group.create_task(self._about_to_end([self._due.pop(uid)[1] for uid in due]))
                first = min((at for at, _ in self._due.values()), default=None)
                await wait_at_most(self._changed, None if first is None else max(0.0, first - self._clock()))
                self._changed.clear()


class ClientsOfPods:
    """Ends MPS clients before the kubelet kills them: a client that is killed during its work can block the server for all clients."""

    def __init__(self, mps: Mps, containers: Containers, ledger: Callable[[], Ledger]) -> None:
        self._mps, self._containers, self._ledger = mps, containers, ledger

    async def end(self, pods: Sequence[PodView]) -> None:
        ledger, uids = self._ledger(), {pod.uid for pod in pods}
        index = AllocationIndex(ledger.allocations.values(), pods)
        daemons = {daemon.uuid for daemon in self._mps.daemons()}
        clients: dict[str, set[int]] = {}
        for container in self._containers.running():
            names = {gpu for allocation in index.exact(container) for gpu in allocation.gpus} if container.pod_uid in uids else ()
            uuids = {ledger.gpu_registry.by_name[name].uuid for name in names} & daemons
            for pid in await self._pids_of(container) if uuids else ():
                for uuid in uuids:
                    clients.setdefault(uuid, set()).add(pid)
        if clients:
            await self._mps.end_clients(clients)

    async def _pids_of(self, container: Container) -> Sequence[int]:
        try:
            return await asyncio.to_thread(self._containers.pids, container)
        except CriError as error:
            log.warning("mps_clients_not_ended", container=container.describe(), reason=str(error))
            return ()
