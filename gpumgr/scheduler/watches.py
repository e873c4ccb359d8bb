"""The watches of nodes and pods, which keep the index up to date."""

import asyncio
import math
from typing import NoReturn

import structlog

from gpumgr.aio import run_until
from gpumgr.cluster.index import ClusterIndex, PlacedPod
from gpumgr.kubeapi.client import ApiServer
from gpumgr.kubeapi.reflector import Reflector, WatchTimes
from gpumgr.scheduler.objects import WatchedNode, WatchedPod, parse_node, parse_watched_pod

_log = structlog.get_logger(__name__)

#: Ended pods hold nothing: for this watch they are deleted.
_RUNNING = "status.phase!=Succeeded,status.phase!=Failed"


class ClusterWatches:
    """`run` it as a daemon. `pending` has the pods with GPU requests that are not bound, by UID. `synced`: all nodes and all
    pods have been listed once. `promises`: annotations of pods that are not bound count, since kube-scheduler may be binding them."""

    def __init__(
        self, server: ApiServer, index: ClusterIndex, *, promises: bool = False, watch_times: WatchTimes | None = None
    ) -> None:
        self._index, self._promises = index, promises
        self.pending: dict[str, WatchedPod] = {}
        self._nodes: Reflector[WatchedNode] = Reflector(
            server, "/api/v1/nodes", {}, parse=parse_node, on_change=self._node_changed, watch_times=watch_times
        )
        self._pods: Reflector[WatchedPod] = Reflector(
            server,
            "/api/v1/pods",
            {"fieldSelector": _RUNNING},
            parse=parse_watched_pod,
            on_change=self._pod_changed,
            watch_times=watch_times,
        )

        self._listed, self._list_again = asyncio.Event(), asyncio.Event()
        self.synced = False

    async def run(self) -> NoReturn:
        while True:
            watching = await run_until(self._list_again.wait(), self._watch())
            if not watching.cancelled():
                watching.result()
            self._list_again.clear()
            for each in (self._nodes, self._pods):
                each.expire()

    async def refresh(self) -> None:
        """Lists everything again, while `run` runs. The index then has what the API server had when this was called."""
        self._listed.clear()
        self._list_again.set()
        await self._listed.wait()

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            for each in (self._nodes, self._pods):
                group.create_task(each.run())
            for each in (self._nodes, self._pods):
                await each.synced.wait()
            self.synced = True
            if not self._list_again.is_set():
                self._listed.set()

    def _node_changed(self, before: WatchedNode | None, after: WatchedNode | None) -> None:
        if before is not None and (after is None or after.state.name != before.state.name):
            self._index.remove_node(before.state.name)
        if after is None:
            return
        self._index.set_node(after.state)
        if after.problem is not None and (before is None or before.problem != after.problem):
            used = "its capacity" if after.state.gpus else "none of its GPUs"
            _log.warning("inventory_unusable", node=after.state.name, reason=after.problem, used_instead=used)

    def _pod_changed(self, before: WatchedPod | None, after: WatchedPod | None) -> None:
        if after is None:
            if before is not None:
                self.pending.pop(before.uid, None)
                self._index.remove(before.uid)
            return
        if after.problem is not None and (before is None or before.problem != after.problem):
            _log.warning("placement_unusable", pod=f"{after.namespace}/{after.name}", pod_uid=after.uid, reason=after.problem)
        if after.placed is not None:
            self._index.bind(after.placed)
        elif after.node is not None:
            self._index.remove(after.uid)
        if after.node is None and after.wants_gpu:
            self.pending[after.uid] = after
            if self._promises:
                self._keep_promise(after)
        else:
            self.pending.pop(after.uid, None)

    def _keep_promise(self, pod: WatchedPod) -> None:
        """The GPUs that /scheduler/predicates wrote to the pod are kept until it is bound, deleted or placed again. A newer choice that
        the pod does not show yet stays."""
        promise, current = pod.promise, self._index.placement(pod.uid)
        if promise is not None and (current is None or _same_gpus(current, promise)):
            self._index.assume(current or promise, until=math.inf)


def _same_gpus(placed: PlacedPod, promise: PlacedPod) -> bool:
    names = [[[gpu for gpu, _ in shares] for shares in each.shares or ()] for each in (placed, promise)]
    return placed.node == promise.node and (promise.shares is None or names[0] == names[1])
