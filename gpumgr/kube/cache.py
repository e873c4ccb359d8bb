"""In-memory cache of this node's pods: lookup by name and UID, waiting for a pod, listeners, deletion of failed pods."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NoReturn

import msgspec
import structlog

from gpumgr.common.aio import wait_at_most
from gpumgr.kube.client import API_FAILURES, ApiServer
from gpumgr.kube.hami_formats import MIG_ALLOCATIONS
from gpumgr.kube.pod_annotations import is_ours
from gpumgr.kube.pods import parse_pod
from gpumgr.kube.reflector import Reflector, Watched, WatchTimes
from gpumgr.placement.pods import PodKey, PodView
from gpumgr.settings.hami_resources import ReplicaResources

log = structlog.get_logger(__name__)

#: Reason of a pod that the kubelet fails because a device plugin refused it.
REFUSED: Final = "UnexpectedAdmissionError"
#: Takes the pod before and after a change; None means that it does not exist.
OnChange = Callable[[PodView | None, PodView | None], None]


class PodCache:
    """Pods with `spec.nodeName` = this node. `run` keeps it up to date; all other methods only read."""

    def __init__(
        self,
        server: ApiServer,
        node_name: str,
        *,
        watch_times: WatchTimes | None = None,
        resources: ReplicaResources | None = None,
        mig_resource: str | None = None,
        write_events: bool = True,
    ) -> None:
        """`resources`: HAMi's, where they count; `mig_resource`: see `parse_pod`; `write_events`: see `Watched`."""
        self._server, self._resources, self._mig_resource = server, resources, mig_resource
        self._by_uid: dict[str, PodView] = {}
        self._by_key: dict[PodKey, PodView] = {}
        self._annotations: dict[str, Mapping[str, str]] = {}
        #: Pod -> the futures that wait for it, with the UID that each waits for (None: any).
        self._waiting: defaultdict[PodKey, dict[asyncio.Future[PodView], str | None]] = defaultdict(dict)
        self._listeners: list[OnChange] = []
        self._changed = asyncio.Event()
        query = {"fieldSelector": f"spec.nodeName={node_name}"}
        self._reflector = Reflector(
            server,
            Watched(path="/api/v1/pods", query=query, parse=self._parse, write_events=write_events),
            on_change=self._follow,
            watch_times=watch_times,
        )

    @property
    def synced(self) -> bool:
        """True once all pods have been listed; a later outage does not change that."""
        return self._reflector.synced.is_set()

    @property
    def reachable(self) -> bool:
        """Whether all pods are known, and the API server has answered the last request."""
        return self.synced and self._reflector.answered and not self.unreadable

    @property
    def unreadable(self) -> int:
        """How many pods can't be read."""
        return self._reflector.unreadable

    async def wait_synced(self) -> None:
        await self._reflector.synced.wait()

    async def run(self) -> NoReturn:
        """Runs until it is cancelled."""
        await self._reflector.run()

    def get(self, pod: PodKey) -> PodView | None:
        """The pod that has this name now; of two pods with this name the later one."""
        return self._by_key.get(pod)

    def by_uid(self, uid: str) -> PodView | None:
        return self._by_uid.get(uid)

    def annotations(self, uid: str) -> Mapping[str, str]:
        """The agent's annotations of the pod with this UID, and the annotation with HAMi's MIG devices. Listeners are not called for their
        changes."""
        return self._annotations.get(uid, {})

    def all(self) -> Iterable[PodView]:
        return self._by_uid.values()

    async def wait_for(self, pod: PodKey, timeout_seconds: float, *, uid: str | None = None) -> PodView | None:
        """The pod as soon as it is in the cache, with `uid` only if it has this UID; None after the timeout."""
        known = self.get(pod)
        if uid not in (None, known.uid if known else None):
            known = None
        if known is not None or timeout_seconds <= 0:
            return known
        waiter: asyncio.Future[PodView] = asyncio.get_running_loop().create_future()
        waiters = self._waiting[pod]
        waiters[waiter] = uid
        try:
            async with asyncio.timeout(timeout_seconds):
                return await waiter
        except TimeoutError:
            return None
        finally:
            del waiters[waiter]
            if not self._waiting[pod]:
                del self._waiting[pod]

    async def wait_ended(self, uids: Collection[str], timeout_seconds: float) -> None:
        """Returns once these pods have ended or are deleted, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while any((view := self._by_uid.get(uid)) is not None and not view.ended for uid in uids):
                    await self._changed.wait()

    def subscribe(self, listener: OnChange) -> None:
        """`listener` is called at once for each pod that is known already (before: None), and then for every change, in the event loop,
        after the cache has it. It must neither block nor raise."""
        self._listeners.append(listener)
        for known in self.all():
            listener(None, known)

    async def delete_pod(self, pod: PodView) -> bool:
        """Deletes the pod, with its UID as a precondition. False: it is deleted already, or another pod has its name.

        Raises AnswerError if the API server refuses, aiohttp.ClientError, TimeoutError or OSError if it does not answer.
        """
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": pod.uid}}
        return await self._server.send("DELETE", path, body, but=(404, 409))

    def _parse(self, item: Mapping[str, Any]) -> "_Known":
        """Raises what `parse_pod` raises."""
        annotations = item["metadata"].get("annotations") or {}
        ours = {key: str(value) for key, value in annotations.items() if is_ours(key) or key == MIG_ALLOCATIONS}
        return _Known(parse_pod(item, self._resources, self._mig_resource), ours)

    def _follow(self, old: "_Known | None", new: "_Known | None") -> None:
        before, after = old.pod if old is not None else None, new.pod if new is not None else None
        if before is not None:
            self._annotations.pop(before.uid, None)
        if new is not None and new.annotations:
            self._annotations[new.uid] = new.annotations
        if before != after:
            self._change(before, after)

    def _change(self, before: PodView | None, after: PodView | None) -> None:
        if before is not None:
            self._by_uid.pop(before.uid, None)
            if (named := self._by_key.get(before.key)) is not None and named.uid == before.uid:
                del self._by_key[before.key]
        if after is not None:
            self._by_uid[after.uid] = after
            self._by_key[after.key] = after
            for waiter, uid in self._waiting.get(after.key, {}).items():
                if not waiter.done() and uid in (None, after.uid):
                    waiter.set_result(after)
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener(before, after)


class _Known(msgspec.Struct, frozen=True):
    """A pod of the watch."""

    pod: PodView
    annotations: Mapping[str, str]

    @property
    def uid(self) -> str:
        return self.pod.uid


class NoPods:
    """The cache of a node without an API server: always empty."""

    synced = False
    reachable = False

    def get(self, pod: PodKey) -> PodView | None:  # noqa: ARG002
        return None

    def by_uid(self, uid: str) -> PodView | None:  # noqa: ARG002
        return None

    def all(self) -> Iterable[PodView]:
        return ()

    async def wait_for(self, pod: PodKey, timeout_seconds: float, *, uid: str | None = None) -> PodView | None:  # noqa: ARG002
        return None

    async def wait_ended(self, uids: Collection[str], timeout_seconds: float) -> None:
        """There is nothing to wait for."""


class FailedPods:
    """Deletes pods that the kubelet marked Failed because the agent refused them (setting kubernetes.delete_failed_pods).

    Their owner then creates new ones at once instead of after its back-off. A deletion that fails is tried again until the pod has gone,
    after pauses that grow from the first to the second number of `pause_seconds`."""

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
