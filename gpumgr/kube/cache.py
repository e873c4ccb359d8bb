"""In-memory cache of this node's pods, kept up to date by a watch."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

import msgspec

from gpumgr.kube.client import ApiServer
from gpumgr.kube.hami_formats import MIG_ALLOCATIONS
from gpumgr.kube.pod_annotations import is_ours
from gpumgr.kube.pods import parse_pod
from gpumgr.kube.reflector import Reflector, WatchTimes
from gpumgr.kube.watched import Watched
from gpumgr.placement.pods import PodKey, PodView
from gpumgr.settings.hami_resources import ReplicaResources

#: Gets the pod before and after a change; None means that it does not exist.
OnChange = Callable[[PodView | None, PodView | None], None]


class PodCache:
    """The pods with `spec.nodeName` = this node. `run` keeps the cache up to date; all other methods only read."""

    def __init__(
        self,
        server: ApiServer,
        node_name: str,
        *,
        watch_times: WatchTimes | None = None,
        resources: ReplicaResources | None = None,
        mig_resource: str | None = None,
    ) -> None:
        """`resources`: HAMi's resources, if pods may request them. `mig_resource`: the resource of MIG devices, or a prefix that ends in
        "-"."""
        #: Whether a pod that can't be read gets an event.
        self.write_events = True
        self._resources, self._mig_resource = resources, mig_resource
        self._by_uid: dict[str, _Known] = {}
        self._by_key: dict[PodKey, PodView] = {}
        self._listeners: list[OnChange] = []
        self._changed = asyncio.Event()
        query = {"fieldSelector": f"spec.nodeName={node_name}"}
        self._reflector = Reflector(
            server,
            Watched(path="/api/v1/pods", query=query, parse=self._parse, write_events=lambda: self.write_events),
            on_change=self._follow,
            watch_times=watch_times,
        )

    @property
    def synced(self) -> bool:
        """Whether all pods have been listed once. A later outage does not change that."""
        return self._reflector.synced.is_set()

    @property
    def reachable(self) -> bool:
        """Whether all pods are known and the last request succeeded."""
        return self.synced and self._reflector.answered and not self.unreadable

    @property
    def unreadable(self) -> int:
        """How many pods can't be read."""
        return self._reflector.unreadable

    async def wait_synced(self) -> None:
        await self._reflector.synced.wait()

    async def run(self) -> NoReturn:
        await self._reflector.run()

    def get(self, pod: PodKey) -> PodView | None:
        """The pod with this name. If the cache has two such pods, returns the one that changed last."""
        return self._by_key.get(pod)

    def by_uid(self, uid: str) -> PodView | None:
        return known.pod if (known := self._by_uid.get(uid)) is not None else None

    def annotations(self, uid: str) -> Mapping[str, str]:
        """The agent's annotations of this pod, and HAMi's annotation with MIG devices. Listeners are not called if only these change."""
        return known.annotations if (known := self._by_uid.get(uid)) is not None else {}

    def all(self) -> Iterable[PodView]:
        return [known.pod for known in self._by_uid.values()]

    async def wait_for(self, pod: PodKey, timeout_seconds: float, *, uid: str | None = None) -> PodView | None:
        """Returns the pod as soon as it is in the cache, or None after the timeout. With `uid`, only that pod counts; otherwise a pod that
        has ended does not count, because a new pod may get its name."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while (known := self.get(pod)) is None or (known.ended if uid is None else known.uid != uid):
                    await self._changed.wait()
                return known
        return None

    async def wait_ended(self, uids: Collection[str], timeout_seconds: float) -> None:
        """Returns when all these pods have ended or are deleted, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while any((view := self.by_uid(uid)) is not None and not view.ended for uid in uids):
                    await self._changed.wait()

    def subscribe(self, listener: OnChange) -> None:
        """Calls `listener` at once for each known pod, with None as its earlier state. Later calls follow each change of the cache, in the
        event loop. `listener` must neither block nor raise."""
        self._listeners.append(listener)
        for known in self.all():
            listener(None, known)

    def _parse(self, item: Mapping[str, Any]) -> "_Known":
        annotations = item["metadata"].get("annotations") or {}
        ours = {key: str(value) for key, value in annotations.items() if is_ours(key) or key == MIG_ALLOCATIONS}
        return _Known(parse_pod(item, self._resources, self._mig_resource), ours)

    def _follow(self, old: "_Known | None", new: "_Known | None") -> None:
        before, after = old.pod if old is not None else None, new.pod if new is not None else None
        if old is not None:
            self._by_uid.pop(old.uid, None)
        if new is not None:
            self._by_uid[new.uid] = new
        if before == after:
            return
        if before is not None and (named := self._by_key.get(before.key)) is not None and named.uid == before.uid:
            del self._by_key[before.key]
        if after is not None:
            self._by_key[after.key] = after
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener(before, after)


class _Known(msgspec.Struct, frozen=True):
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
