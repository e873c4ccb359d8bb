"""This node's pods out of memory: looked up by name and UID, waited for, listened to."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from gpumgr.allocator.annotations import is_ours
from gpumgr.allocator.pods import PodKey, PodView
from gpumgr.errors import GpumgrError
from gpumgr.kubeapi.client import ApiServer
from gpumgr.kubeapi.pods import parse_pod
from gpumgr.kubeapi.reflector import Pace, Reflector

#: (before, after); None stands for absence.
OnChange = Callable[[PodView | None, PodView | None], None]


class PodCache:
    """Pods with `spec.nodeName` = this node. `run` keeps it up to date; everything else only reads."""

    def __init__(self, server: ApiServer, node_name: str, *, pace: Pace | None = None) -> None:
        self._server = server
        self._by_uid: dict[str, PodView] = {}
        self._by_key: dict[PodKey, PodView] = {}
        self._annotations: dict[str, Mapping[str, str]] = {}
        self._waiting: defaultdict[PodKey, set[asyncio.Future[PodView]]] = defaultdict(set)
        self._listeners: list[OnChange] = []
        query = {"fieldSelector": f"spec.nodeName={node_name}"}
        self._reflector = Reflector(server, "/api/v1/pods", query, parse=self._parse, on_change=self._change, pace=pace)

    @property
    def synced(self) -> bool:
        """True once all pods have been seen; a later outage does not change that."""
        return self._reflector.synced.is_set()

    async def wait_synced(self) -> None:
        await self._reflector.synced.wait()

    async def run(self) -> NoReturn:
        """Until cancelled."""
        await self._reflector.run()

    def get(self, pod: PodKey) -> PodView | None:
        """The pod that has this name now; of two lives of one name the later one."""
        return self._by_key.get(pod)

    def by_uid(self, uid: str) -> PodView | None:
        return self._by_uid.get(uid)

    def annotations(self, uid: str) -> Mapping[str, str]:
        """Which of the annotations that we write this life of a pod has. Nobody hears of their changes."""
        return self._annotations.get(uid, {})

    def all(self) -> Iterable[PodView]:
        return self._by_uid.values()

    async def wait_for(self, pod: PodKey, timeout_seconds: float) -> PodView | None:
        """The pod, as soon as it is known; None if it is not within the time."""
        known = self.get(pod)
        if known is not None or timeout_seconds <= 0:
            return known
        waiter: asyncio.Future[PodView] = asyncio.get_running_loop().create_future()
        self._waiting[pod].add(waiter)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await waiter
        except TimeoutError:
            return None
        finally:
            self._waiting[pod].discard(waiter)
            if not self._waiting[pod]:
                del self._waiting[pod]

    def subscribe(self, listener: OnChange) -> None:
        """`listener` hears of every change, in the loop, after the cache has it. It must neither block nor raise."""
        self._listeners.append(listener)

    async def delete_pod(self, pod: PodView) -> bool:
        """Deletes this life of the pod (its UID is a precondition). False: it is gone already, or another has its name.

        Raises GpumgrError if the API server refuses, aiohttp.ClientError, TimeoutError or OSError if it does not answer.
        """
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": pod.uid}}
        async with self._server.request("DELETE", path, {}, body=body) as response:
            if response.status in (404, 409):
                return False
            if response.status >= 300:
                text = (await response.content.read(4096)).decode(errors="replace")
                raise GpumgrError(
                    f"the API server did not delete pod {pod.namespace}/{pod.name}: HTTP {response.status}: {text[:200]}"
                )
        return True

    def _parse(self, item: Mapping[str, Any]) -> PodView:
        """Raises what `parse_pod` raises."""
        view = parse_pod(item)
        ours = {key: str(value) for key, value in (item["metadata"].get("annotations") or {}).items() if is_ours(key)}
        if ours:
            self._annotations[view.uid] = ours
        else:
            self._annotations.pop(view.uid, None)
        return view

    def _change(self, before: PodView | None, after: PodView | None) -> None:
        if before is not None:
            self._by_uid.pop(before.uid, None)
            if after is None:
                self._annotations.pop(before.uid, None)
            if (named := self._by_key.get(before.key)) is not None and named.uid == before.uid:
                del self._by_key[before.key]
        if after is not None:
            self._by_uid[after.uid] = after
            self._by_key[after.key] = after
            for waiter in self._waiting.get(after.key, ()):
                if not waiter.done():
                    waiter.set_result(after)
        for listener in self._listeners:
            listener(before, after)


class NoPods:
    """The cache of a node without an API server: it knows nobody, and never will."""

    synced = False

    async def run(self) -> NoReturn:
        while True:
            await asyncio.Event().wait()

    def get(self, pod: PodKey) -> PodView | None:  # noqa: ARG002
        return None

    def by_uid(self, uid: str) -> PodView | None:  # noqa: ARG002
        return None

    def all(self) -> Iterable[PodView]:
        return ()

    async def wait_for(self, pod: PodKey, timeout_seconds: float) -> PodView | None:  # noqa: ARG002
        return None

    def subscribe(self, listener: OnChange) -> None:
        """There will be nothing to hear."""
