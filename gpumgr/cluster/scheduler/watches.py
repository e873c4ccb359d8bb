"""The watches of nodes, pods and quotas, which keep the index up to date."""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import msgspec
import structlog

from gpumgr.cluster.core.index import ClusterIndex
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.quota import Quotas
from gpumgr.cluster.scheduler.objects import (
    CpuPod,
    QuotaLabels,
    WatchedNode,
    WatchedPod,
    decode_pod,
    parse_node,
    parse_watched_pod,
)
from gpumgr.cluster.scheduler.quota_sources import (
    QuotaSources,
    parse_quotas,
    parse_resource_quota,
)
from gpumgr.common.aio import in_slices, run_until
from gpumgr.common.units import VCUDA_NAMES
from gpumgr.kube.client import ApiServer
from gpumgr.kube.reflector import Reflector, WatchTimes, prompt_watches
from gpumgr.kube.watched import Keyed, Watched
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import SchedulerSettings

_log = structlog.get_logger(__name__)

NOT_SYNCED: Final = "gpumgr scheduler has not read all nodes and pods yet; kube-scheduler will try again"
#: Ended pods hold nothing. With this selector the watch reports a pod that ends as deleted.
_RUNNING = "status.phase!=Succeeded,status.phase!=Failed"


class ClusterWatches:
    """Run `run` as a daemon. `pending`: unbound pods with GPU requests, by UID. `nominated`: pods with a nominated node, by UID. `ending`:
    UIDs of pods that are being deleted. `synced`: everything has been listed once. A subclass may add to `_watched`, override `_complete`,
    and keep more pods. `hami`: HAMi's resources, if pods may request them. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        server: ApiServer,
        settings: SchedulerSettings,
        *,
        hami: ReplicaResources | None = None,
        watch_times: WatchTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hami, self._clock = hami, clock
        self._gpu_resources = VCUDA_NAMES if hami is None else (*VCUDA_NAMES, hami.count_resource)
        self.quotas = Quotas()
        self.index = ClusterIndex(self.quotas, cpu_per_gpu_milli=round(1000 * settings.cpus_per_gpu))
        sources = QuotaSources(self.quotas, settings.quota_configmap)
        self.pending: dict[str, WatchedPod] = {}
        self.nominated: dict[str, WatchedPod] = {}
        self.ending: set[str] = set()
        self._labels = labels = QuotaLabels(settings.quota_model_label, settings.quota_pool_label)
        times = watch_times or prompt_watches(settings.max_silence_seconds)
        self._watch = watch = partial(Reflector[Any], server, watch_times=times, clock=clock)
        self.nodes: dict[str, WatchedNode] = {}
        nodes = watch(
            Watched(path="/api/v1/nodes", parse=lambda item: parse_node(item, labels, hami)), on_change=self._node_changed
        )
        pods = watch(
            Watched(path="/api/v1/pods", query={"fieldSelector": _RUNNING}, decode=self._decode_pod, parse=self._parse_pod),
            on_change=self._pod_changed,
        )
        self._watched: list[Reflector[Any]] = [nodes, pods]
        if settings.quota_configmap:
            namespace, _, name = settings.quota_configmap.partition("/")
            limits = watch(
                Watched(
                    path=f"/api/v1/namespaces/{namespace}/configmaps",
                    query={"fieldSelector": f"metadata.name={name}"},
                    parse=parse_quotas,
                    thread_bytes=0,  # YAML of 64 KiB takes 70 ms
                ),
                on_change=sources.configmap_changed,
            )
            self._watched.append(limits)
        if hami is not None:
            resource_quotas = watch(
                Watched(path="/api/v1/resourcequotas", parse=lambda item: parse_resource_quota(item, hami)),
                on_change=sources.resource_quota_changed,
            )
            self._watched.append(resource_quotas)
        self._listed, self._list_again = asyncio.Event(), asyncio.Event()
        self.synced = False

    def parse_pod(self, item: Mapping[str, Any]) -> WatchedPod:
        """Raises what `parse_watched_pod` raises."""
        return parse_watched_pod(item, self._hami)

    @property
    def problem(self) -> str | None:
        """Why the index may not be up to date; None: it is."""
        if not self.synced:
            return NOT_SYNCED
        now = self._clock()
        outdated = next((each for each in self._watched if each.outdated_at <= now), None)
        return f"{outdated.outdated}; no pod is placed until it answers" if outdated is not None else None

    @property
    def silences(self) -> Mapping[str, float]:
        """Resource -> seconds since the API server last sent something."""
        found: dict[str, float] = {}
        for each in self._watched:
            found[each.resource] = max(found.get(each.resource, 0.0), each.silent_seconds)
        return found

    @property
    def unreadable(self) -> int:
        return sum(each.unreadable for each in self._watched)

    async def run(self) -> NoReturn:
        while True:
            watching = await run_until(self._list_again.wait(), self._watch_all())
            if not watching.cancelled():
                watching.result()
            self._list_again.clear()
            for each in self._watched:
                each.expire()

    async def refresh(self) -> None:
        """Lists everything again, so that afterwards the index has all changes from before this call. `run` must be running."""
        self._listed.clear()
        self._list_again.set()
        await self._listed.wait()

    async def _watch_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for each in self._watched:
                group.create_task(each.run())
            for each in self._watched:
                await each.synced.wait()
            await in_slices(self.index.settling())
            if not self.synced:
                gc.collect()
                gc.freeze()  # a full collection of all listed objects would delay a filter by hundreds of milliseconds
            self.synced = True
            if not self._list_again.is_set():
                self._listed.set()

    def _decode_pod(self, item: msgspec.Raw) -> Any:
        """Raises ValueError."""
        return decode_pod(item, self._gpu_resources)

    def _parse_pod(self, pod: Any) -> Keyed:
        """`pod`: what `_decode_pod` returned. Raises what `parse_watched_pod` raises."""
        return pod if isinstance(pod, CpuPod) else self.parse_pod(pod)

    def _complete(self, state: NodeState) -> NodeState:
        """Adds to a node what its object does not have."""
        return state

    def _node_changed(self, before: WatchedNode | None, after: WatchedNode | None) -> None:
        if before is not None and (after is None or after.state.name != before.state.name):
            self.index.remove_node(before.state.name)
            self.nodes.pop(before.state.name, None)
        if after is None:
            return
        self.index.set_node(self._complete(after.state))
        self.nodes[after.state.name] = after
        self.index.changed.add(after.state.name)
        if after.problem is not None and (before is None or before.problem != after.problem):
            used = "its capacity" if after.state.gpus else "none of its GPUs"
            _log.warning("inventory_unusable", node=after.state.name, reason=after.problem, used_instead=used)

    def _pod_changed(self, before: WatchedPod | CpuPod | None, after: WatchedPod | CpuPod | None) -> None:
        if after is None:
            if before is not None:
                self.pending.pop(before.uid, None)
                self.nominated.pop(before.uid, None)
                self.ending.discard(before.uid)
                self.index.remove(before.uid)
            return
        if isinstance(after, CpuPod):
            self.index.use_cpu(after.uid, after.node, after.cpu_milli)
            return
        if after.problem is not None and (before is None or isinstance(before, CpuPod) or before.problem != after.problem):
            _log.warning("placement_unusable", pod=f"{after.namespace}/{after.name}", pod_uid=after.uid, reason=after.problem)
        if after.placed is not None:
            self.index.bind(after.placed)
        elif after.node is not None:  # the pod is bound, and can't hold any GPU
            self.index.use_cpu(after.uid, after.node, after.request.cpu_milli)
        for known, belongs in (
            (self.pending, after.node is None and after.wants_gpu),
            (self.nominated, after.nominated is not None),
        ):
            if belongs:
                known[after.uid] = after
            else:
                known.pop(after.uid, None)
        if after.ending:
            self.ending.add(after.uid)
