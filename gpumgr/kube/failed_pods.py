"""Deletes pods that the kubelet failed because the agent refused them (setting kubernetes.delete_failed_pods)."""

import asyncio
from typing import Final

import structlog

from gpumgr.common.aio import wait_at_most
from gpumgr.kube.cache import PodCache
from gpumgr.kube.client import API_FAILURES
from gpumgr.ledger.pods import PodView

log = structlog.get_logger(__name__)

#: Reason of a pod that the kubelet fails because a device plugin refused it.
REFUSED: Final = "UnexpectedAdmissionError"


class FailedPods:
    """Their owner then creates new ones at once instead of after its back-off. A deletion that the API server does not carry out is tried
    again until the pod has gone, in pauses that grow from the first to the second number of `pause_seconds`."""

    def __init__(self, pods: PodCache, *, pause_seconds: tuple[float, float] = (1.0, 60.0)) -> None:
        self._pods, self._pause_seconds = pods, pause_seconds
        self._due: dict[str, PodView] = {}
        self._logged: set[str] = set()
        self._wake = asyncio.Event()

    def changed(self, before: PodView | None, after: PodView | None) -> None:
        """For PodCache.subscribe."""
        if before is not None and (after is None or after.uid != before.uid or after.deleted):
            self._due.pop(before.uid, None)
            self._logged.discard(before.uid)
        refused = after is not None and after.reason == REFUSED and after.wants_gpu and after.controlled
        if after is not None and refused and not after.deleted:
            self._due[after.uid] = after
            self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        pause = self._pause_seconds[0]
        while True:
            if not self._due:
                pause = self._pause_seconds[0]
                await self._wake.wait()
            self._wake.clear()
            for view in list(self._due.values()):
                await self._delete(view)
            if self._due:
                await wait_at_most(self._wake, pause)
                pause = min(2 * pause, self._pause_seconds[1])

    async def _delete(self, view: PodView) -> None:
        try:
            deleted = await self._pods.delete_pod(view)
        except API_FAILURES as error:
            if view.uid not in self._logged:
                self._logged.add(view.uid)
                log.warning("failed_pod_not_deleted", pod="/".join(view.key), pod_uid=view.uid, error=str(error))
            return
        self._due.pop(view.uid, None)
        self._logged.discard(view.uid)
        if deleted:
            log.info("failed_pod_deleted", pod="/".join(view.key), pod_uid=view.uid)
