"""The verbs of the extender: a question to the index, and an answer in kube-scheduler's terms.

Between reading the index and changing it there is no `await`, so verbs that overlap need no lock.
"""

import math
import time
from collections.abc import Callable

import aiohttp
import structlog

from gpumgr.cluster.choose import Misfit
from gpumgr.cluster.explain import explain
from gpumgr.cluster.index import ClusterIndex, PlacedPod, Rejection, named_shares
from gpumgr.cluster.quota import Quotas, rank_within_quota
from gpumgr.cluster.request import Policy
from gpumgr.errors import GpumgrError
from gpumgr.kubeapi.client import ApiServer
from gpumgr.scheduler.binding import BindingError, binding_annotations, send_binding
from gpumgr.scheduler.objects import WatchedPod, parse_watched_pod
from gpumgr.scheduler.watches import ClusterWatches
from gpumgr.scheduler.wire import BindArgs, BindResult, FilterArgs, FilterResult, HostPriority
from gpumgr.settings.schema import SchedulerSettings

_log = structlog.get_logger(__name__)

#: The highest score of extender/v1.
MAX_SCORE = 10
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
NOT_SYNCED = "gpumgr scheduler has not read all nodes and pods yet; kube-scheduler will try again"


class Extender:
    """`clock` is monotonic, in seconds. All verbs answer errors in the answer's `Error`."""

    def __init__(
        self,
        server: ApiServer,
        index: ClusterIndex,
        quotas: Quotas,
        watches: ClusterWatches,
        settings: SchedulerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._index, self._watches, self._settings, self._clock = server, index, watches, settings, clock
        self._quotas = quotas

    @property
    def ready(self) -> bool:
        return self._watches.synced

    def filter(self, args: FilterArgs) -> FilterResult:
        """One node (or setting `candidates`), or the reasons why no node fits. One node's GPUs are assumed for the pod from now on."""
        if not self.ready:
            return FilterResult(error=NOT_SYNCED)
        try:
            pod, names = parse_watched_pod(args.pod), args.names()
        except _UNREADABLE as error:
            return FilterResult(error=f"the request can't be read: {type(error).__name__}: {error}")
        if not pod.wants_gpu or not names:
            return self._passed(args, list(names))
        if pod.refusal is not None:
            return FilterResult(node_names=[], failed_and_unresolvable_nodes={names[0]: pod.refusal})
        if self._quotas.problem is not None:
            return FilterResult(error=self._quotas.problem)
        self._expire()
        if self._index.placement(pod.uid) is not None and not self._index.is_assumed(pod.uid):
            return FilterResult(error="the pod is bound already")
        self._index.remove(pod.uid)
        self._watches.pending[pod.uid] = pod
        ranked = rank_within_quota(
            self._index, self._quotas, pod.namespace, pod.request, self._policy(pod), names, self._settings.candidates
        )
        if isinstance(ranked, Rejection):
            return FilterResult(node_names=[], failed_and_unresolvable_nodes={names[0]: ranked.text})
        if self._settings.candidates == 1:
            name, choice = ranked[0]
            state = self._index.node(name)
            assert state is not None, "a node that fits is in the index"
            self._assume(pod.on(name, named_shares(state, choice)))
        return self._passed(args, [name for name, _ in ranked])

    def prioritize(self, args: FilterArgs) -> list[HostPriority]:
        """The best node has MAX_SCORE, the others less by their rank. Nodes of pods without GPUs, and errors, have 0."""
        try:
            pod, names = parse_watched_pod(args.pod), args.names()
        except _UNREADABLE:
            return []
        scores = dict.fromkeys(names, 0)
        if self.ready and names and pod.request.containers:
            ordered = self._index.order(pod.request, self._policy(pod), names)
            if not isinstance(ordered, Rejection):
                for place, name in enumerate(ordered):
                    scores[name] = MAX_SCORE - MAX_SCORE * place // len(ordered)
        return [HostPriority(name, score) for name, score in scores.items()]

    async def bind(self, args: BindArgs) -> BindResult:
        """Validates the assumed GPUs again, or chooses others of this node, and binds the pod."""
        if not self.ready:
            return BindResult(NOT_SYNCED)
        try:
            await self._bind(args)
        except GpumgrError as error:
            _log.warning("pod_not_bound", pod=f"{args.pod_namespace}/{args.pod_name}", node=args.node, reason=str(error))
            return BindResult(str(error))
        return BindResult()

    async def _bind(self, args: BindArgs) -> None:
        """Raises GpumgrError."""
        pod = self._watches.pending.get(args.pod_uid) or await self._read_pod(args)
        if pod.refusal is not None:
            raise BindingError(pod.refusal)
        placed = self._validated(pod, args.node)
        node = self._index.node(args.node)
        assert node is not None, "a node with a choice is in the index"
        self._index.remove(pod.uid)
        excess = self._quotas.problem or self._quotas.refusal(pod.namespace, self._quotas.holding(placed, node))
        if excess is not None:
            raise BindingError(excess)
        # The assumption must not end before the request does.
        self._index.assume(placed, until=math.inf)
        try:
            annotations = binding_annotations(pod, placed, node, now_nanoseconds=time.time_ns())
            await send_binding(self._server, pod, args.node, annotations)
        except BindingError as error:
            if not error.uncertain and self._index.is_assumed(pod.uid):
                self._index.remove(pod.uid)
            raise
        finally:
            if self._index.is_assumed(pod.uid):  # the watch has not shown the pod on its node yet
                self._assume(placed)
        _log.info("pod_bound", pod=f"{pod.namespace}/{pod.name}", pod_uid=pod.uid, node=args.node)

    def _validated(self, pod: WatchedPod, node: str) -> PlacedPod:
        """What was assumed if it still has its room, else another choice on the node; the quota allows it. Raises BindingError."""
        self._expire()
        placed = self._index.placement(pod.uid)
        if placed is not None and not self._index.is_assumed(pod.uid):
            raise BindingError(f"the pod is bound to node {placed.node} already")
        if placed is not None and placed.node == node and placed.request == pod.request and self._index.fits(placed):
            return placed
        self._index.remove(pod.uid)
        choice = self._index.choose_on(node, pod.uid, pod.request, self._policy(pod))
        state = self._index.node(node)
        if isinstance(choice, Misfit) or state is None:
            misfit = choice if isinstance(choice, Misfit) else Misfit(container=None)
            raise BindingError(f"node {node} {explain([(node, misfit)])}")
        return pod.on(node, named_shares(state, choice))

    async def _read_pod(self, args: BindArgs) -> WatchedPod:
        """Raises BindingError."""
        path = f"/api/v1/namespaces/{args.pod_namespace}/pods/{args.pod_name}"
        try:
            pod = parse_watched_pod(await self._server.read("GET", path))
        except (GpumgrError, aiohttp.ClientError, TimeoutError, OSError, *_UNREADABLE) as error:
            raise BindingError(f"the pod can't be read: {error}") from error
        if pod.uid != args.pod_uid:
            raise BindingError(f"the pod has the UID {pod.uid}, the request has {args.pod_uid}")
        return pod

    def _policy(self, pod: WatchedPod) -> Policy:
        return pod.policy or self._settings.policy

    def _assume(self, placed: PlacedPod) -> None:
        self._index.assume(placed, until=self._clock() + self._settings.assume_seconds)

    def _expire(self) -> None:
        for uid in self._index.expire(self._clock()):
            _log.info("assumption_ended", pod_uid=uid, after_seconds=self._settings.assume_seconds)

    def _passed(self, args: FilterArgs, names: list[str]) -> FilterResult:
        if args.node_names is not None:
            return FilterResult(node_names=names)
        items = args.items()
        return FilterResult(nodes={"metadata": {}, "items": [items[name] for name in names]})
