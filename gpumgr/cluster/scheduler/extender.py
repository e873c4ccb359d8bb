"""The verbs of the extender: kube-scheduler's calls filter, prioritize, preempt and bind.

A verb has no `await` between reading the index and changing it, so verbs that overlap need no lock.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from heapq import nsmallest
from operator import attrgetter
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import structlog

from gpumgr.cluster.core.choose import Misfit, NodeChoice
from gpumgr.cluster.core.explain import Rejection, explain
from gpumgr.cluster.core.index import placed_pod
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import PlacedPod
from gpumgr.cluster.scheduler.binding import WRITE_SECONDS, BindingError, binding_annotations, pod_path, send_binding
from gpumgr.cluster.scheduler.leader import Leadership
from gpumgr.cluster.scheduler.objects import WatchedPod
from gpumgr.cluster.scheduler.preemption import Preemption
from gpumgr.cluster.scheduler.rejections import Rejections
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.cluster.scheduler.wire import BindArgs, BindResult, FilterArgs, FilterResult, HostPriority, PreemptArgs, PreemptResult
from gpumgr.common.aio import in_slices
from gpumgr.common.errors import GpumgrError
from gpumgr.common.foreign_text import UnreadableText, decode_stored, on_thread_if_long
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer
from gpumgr.placement.pods import TERMINAL_PHASES
from gpumgr.settings.schema import SchedulerSettings

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)

#: The highest score of extender/v1.
MAX_SCORE = 10
NOT_LEADING = "this replica of gpumgr scheduler does not lead; kube-scheduler will reach the one that does"
_MAX_LOOKS: Final = 20
#: A pod is looked up again after this time if the API server did not answer.
_LOOK_AGAIN_SECONDS: Final = 5.0
#: The API server may work on a request for this time after the connection is lost (--request-timeout).
_REQUEST_SECONDS: Final = 60.0


class _Assumed(msgspec.Struct):
    """A pod with assumed GPUs: they count as used by the pod before the watch shows it as bound. `due`: when the API server is asked about
    the pod. `sending`: a Binding is under way. `sent`: a Binding may have bound it."""

    pod: WatchedPod
    due: float
    sending: bool = False
    sent: bool = False


class Extender:
    """`clock` is monotonic, in seconds. `leadership` None: there is no other replica. `answer_filter`, `preempt` and `prioritize` raise
    UnreadableText."""

    def __init__(
        self,
        server: ApiServer,
        watches: ClusterWatches,
        settings: SchedulerSettings,
        *,
        leadership: Leadership | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._watches, self._settings, self._clock = server, watches, settings, clock
        self._index, self._quotas = watches.index, watches.quotas
        self._preemption = Preemption(watches, settings, clock=clock)
        self._leadership = leadership
        self._rejections = Rejections(watches, clock=clock)
        #: By UID. The pods are kept as kube-scheduler sent them, because the watch may show a pod later, or never. `look_up_assumed`
        #: removes entries without assumed GPUs.
        self._assumed: dict[str, _Assumed] = {}

    @property
    def answers(self) -> bool:
        """False: this replica does not lead, or has not read all objects since it took the Lease."""
        return self._leadership is None or self._leadership.answers

    @property
    def problem(self) -> str | None:
        return self._watches.problem

    async def answer_filter(self, args: FilterArgs) -> FilterResult:
        """Decodes the request, computes missing results of the index in short slices of the event loop, and calls `filter`."""
        pod, names = await self._parsed(args.pod, args.names)
        await in_slices(self._index.settling())
        offered, numbering = self._index.node_set(names) if pod.wants_gpu else 0, self._index.numbering
        if self.problem is None:
            await self._preemption.keep_nominated()
            if pod.wants_gpu and pod.refusal is None:
                # This may take a second at thousands of nodes. No `await` follows before `filter`.
                await in_slices(self._question(pod).examine(offered, self._settings.candidates))
        if not self.answers:
            return FilterResult(error=NOT_LEADING)
        if self._index.numbering != numbering:
            offered = self._index.node_set(names)
        result = self.filter(pod, names, offered)
        whole_nodes = args.node_names is None
        if whole_nodes and result.node_names is not None and not (result.failed_nodes or result.failed_and_unresolvable_nodes):
            items = args.items()
            return FilterResult(nodes={"metadata": {}, "items": [items[name] for name in result.node_names]})
        return result

    def filter(self, pod: WatchedPod, names: Sequence[str], offered: int) -> FilterResult:
        """Returns the best nodes among `names`, or the reasons why no node fits. `offered`: the same nodes as a bit mask, from the index's
        `node_set` in its present numbering.

        The setting `candidates` limits the number of nodes. If it is 1, the GPUs of the node are assumed for the pod from now on.
        """
        if (problem := self.problem) is not None:
            return FilterResult(error=problem)
        if not (pod.containers and names):  # the pod requests no GPU, or no node is offered
            return FilterResult(node_names=list(names))
        if pod.refusal is not None:
            return FilterResult(node_names=[], failed_and_unresolvable_nodes={names[0]: pod.refusal})
        if self._quotas.problem is not None:
            return FilterResult(error=self._quotas.problem)
        if self._preemption.kept:
            self._preemption.refresh()
        placed = self._index.placement(pod.uid)
        if placed is not None and pod.uid not in self._index.assumed:
            return FilterResult(error="the pod is bound already")
        if self._may_be_bound(pod.uid):
            # kube-scheduler may lack the answer to a Binding that succeeded, so the pod keeps its node and its GPUs.
            if placed is None or placed.node not in names:
                return FilterResult(error="it is not clear yet whether the pod is bound; kube-scheduler will try again")
            return FilterResult(node_names=[placed.node])
        self._forget(pod.uid)
        return self._choose(pod, names[0], offered)

    def _choose(self, pod: WatchedPod, first: str, offered: int) -> FilterResult:
        question = self._question(pod)
        ranked = question.rank(offered, self._settings.candidates)
        if isinstance(ranked, Rejection):
            with self._preemption.without_lower(pod.priority) as more:
                ranked = question.rank(offered, self._settings.candidates) if more else ranked
        if isinstance(ranked, Rejection):
            self._preemption.restore(pod.uid)
            self._rejections.add(pod, question.policy, offered)
            if pod.nominated is not None:
                # With an unresolvable failure kube-scheduler would end the nomination, or evict further pods.
                return FilterResult(node_names=[], failed_nodes={first: ranked.text})
            return FilterResult(node_names=[], failed_and_unresolvable_nodes={first: ranked.text})
        self._rejections.pods.pop(pod.uid, None)
        if self._settings.candidates == 1:
            name, choice = ranked[0]
            self._place(pod, placed_pod(pod, self._index.node(name), choice))
        elif self._preemption.kept:
            self._preemption.restore(pod.uid)
        return FilterResult(node_names=[name for name, _ in ranked])

    def _question(self, pod: WatchedPod) -> Question:
        return Question(self._index, pod.request, pod.policy or self._settings.policy, pod.namespace)

    async def preempt(self, args: PreemptArgs) -> PreemptResult:
        """The victims on one node. There are none if no eviction helps, if the index is outdated, if the quotas can't be used, or if the
        pod may be bound already or is refused."""
        pod, proposed = await self._parsed(args.pod, args.proposed)
        if self.problem is None:
            await self._preemption.keep_nominated()
        if self.problem is not None or self._quotas.problem is not None or self._may_be_bound(pod.uid) or pod.refusal is not None:
            return PreemptResult()
        if pod.uid not in self._preemption.kept:
            self._forget(pod.uid)
        return await self._preemption.preempt(pod, proposed, self._rejections.names(pod.uid))

    async def prioritize(self, args: FilterArgs) -> list[HostPriority]:
        """Fitting nodes get scores from MAX_SCORE down to 1 by their rank; with more than MAX_SCORE nodes, some scores are equal. Nodes
        that do not fit get 0, and so do all nodes for a pod without GPUs."""
        pod, names = await self._parsed(args.pod, args.names)
        scores = dict.fromkeys(names, 0)
        if self.problem is None and names and pod.request.containers:
            question = Question(self._index, pod.request, pod.policy or self._settings.policy)
            await in_slices(self._index.settling())
            await in_slices(question.examine(names, None, reasons=False))
            ordered = question.order(names)
            scores |= {name: MAX_SCORE - MAX_SCORE * place // len(ordered) for place, name in enumerate(ordered)}
        return list(map(HostPriority, scores, scores.values()))

    async def bind(self, args: BindArgs) -> BindResult:
        """Binds the pod on its assumed GPUs if they are still free, otherwise on other GPUs of this node."""
        if (problem := self.problem) is not None:
            return BindResult(problem)
        try:
            await self._bind(args)
        except GpumgrError as error:
            _log.warning("pod_not_bound", pod=f"{args.pod_namespace}/{args.pod_name}", node=args.node, reason=str(error))
            return BindResult(str(error))
        return BindResult()

    async def retryable(self) -> WatchedPod | None:
        """A rejected pod that fits by now, for `retry_waiting_pods`. None if there is none, or if this replica can't answer now."""
        if self.problem is not None or not self.answers:
            return None
        await self._preemption.keep_nominated()
        await in_slices(self._index.settling())
        return await self._rejections.fitting()

    async def run(self) -> NoReturn:
        """A daemon that looks up assumed pods, and renumbers the nodes after many nodes were removed."""
        while True:
            await asyncio.sleep(1)
            await in_slices(self._index.settling())
            await in_slices(self._index.compacting())
            await self.look_up_assumed()

    async def look_up_assumed(self) -> None:
        """Asks the API server about the assumed pods that are due. A pod that is not bound, has ended or is deleted loses its GPUs. The
        GPUs of a bound pod stay assumed until the watch shows the pod on its node."""
        self._assumed = {uid: each for uid, each in self._assumed.items() if uid in self._index.assumed}
        due = [each for each in self._assumed.values() if each.due <= self._clock() and not each.sending]
        await asyncio.gather(*map(self._look_up, nsmallest(_MAX_LOOKS, due, key=attrgetter("due"))))

    async def _parsed(self, item: msgspec.Raw, more: Callable[[], _T]) -> tuple[WatchedPod, _T]:
        """Raises UnreadableText."""
        try:
            pod = await on_thread_if_long(lambda text: self._watches.parse_pod(decode_stored(text, dict[str, Any])), item)
            return pod, more()
        except UNREADABLE as error:
            raise UnreadableText(f"{type(error).__name__}: {error}") from error

    async def _bind(self, args: BindArgs) -> None:
        """Raises GpumgrError."""
        await self._preemption.keep_nominated()
        filtered = self._assumed.get(args.pod_uid)
        pod = self._watches.pending.get(args.pod_uid) or (filtered.pod if filtered else None)
        if pod is None:
            pod = await self._read_pod(args.pod_namespace, args.pod_name, args.pod_uid)
        if pod.refusal is not None:
            raise BindingError(pod.refusal)
        if (assumed := self._assumed.get(pod.uid)) is not None and assumed.sending:
            raise BindingError("the pod is being bound already")
        placed = self._validated(pod, args.node)
        node = self._index.node(args.node)
        assert node is not None, "a node with a choice is in the index"
        if not self._may_be_bound(pod.uid):
            _, held = self._quotas.held(pod.uid)
            excess = self._quotas.problem or self._quotas.refusal(pod.namespace, self._quotas.holding(placed, node), held)
            if excess is not None:
                self._forget(pod.uid)
                raise BindingError(excess)
        sent, read_now = self._may_be_bound(pod.uid), False
        self._place(pod, placed, sending=True, sent=sent)
        try:
            self._check_lease()
            annotations = binding_annotations(pod, placed, node, now_nanoseconds=time.time_ns())
            await send_binding(self._server, pod, args.node, annotations, self._check_lease)
            sent = True
        except BindingError as error:
            sent, read_now = sent or error.uncertain or error.conflict, error.conflict
            if not sent:
                self._forget(pod.uid)
            raise
        finally:  # unless the binding has certainly failed, the GPUs stay assumed until the watch shows the pod on its node
            if pod.uid in self._index.assumed:
                self._assume(pod, placed, sent=sent)
                if read_now:
                    self._assumed[pod.uid].due = self._clock()
            else:
                self._assumed.pop(pod.uid, None)
        _log.info("pod_bound", pod=f"{pod.namespace}/{pod.name}", pod_uid=pod.uid, node=args.node)

    def _check_lease(self) -> None:
        """Raises BindingError."""
        if self._leadership is not None and not self._leadership.outlives(WRITE_SECONDS):
            raise BindingError("the Lease of this replica may end before the binding does; kube-scheduler will try again")

    async def _look_up(self, assumed: _Assumed) -> None:
        uid, found, assumed.due = assumed.pod.uid, None, self._clock() + _LOOK_AGAIN_SECONDS
        try:
            found = await self._read_pod(assumed.pod.namespace, assumed.pod.name, uid)
        except BindingError as error:
            if error.uncertain:
                return
        placed = self._index.placement(uid)
        if placed is None or uid not in self._index.assumed or self._assumed.get(uid) is not assumed:
            return  # a verb or the watch has changed it in the meantime
        if found is not None and found.node is not None:
            self._assume(found, found.placed or placed, sent=True)
        else:
            self._forget(uid)
            _log.info("assumption_ended", pod_uid=uid)

    def _forget(self, uid: str) -> None:
        self._assumed.pop(uid, None)
        if uid in self._index.assumed:
            self._index.remove(uid)

    def _validated(self, pod: WatchedPod, node: str) -> PlacedPod:
        """The pod's assumed GPUs if they are still free, or if their Binding was sent; otherwise other GPUs of the node that the quota
        allows. Raises BindingError."""
        self._preemption.refresh()
        placed = self._index.placement(pod.uid)
        if placed is not None and pod.uid not in self._index.assumed:
            raise BindingError(f"the pod is bound to node {placed.node} already")
        sent = self._may_be_bound(pod.uid)
        if placed is not None and placed.node == node and placed.request == pod.request and (sent or self._index.fits(placed)):
            return placed
        self._forget(pod.uid)
        wanted = pod.uid, pod.request, pod.policy or self._settings.policy, pod.namespace
        choice = self._index.choose_on(node, *wanted)
        if not isinstance(choice, NodeChoice):
            with self._preemption.without_lower(pod.priority):
                choice = self._index.choose_on(node, *wanted)
        if isinstance(choice, Rejection):
            raise BindingError(choice.text)
        if isinstance(choice, Misfit):
            raise BindingError(f"node {node} {explain([(1, node, choice)])}")
        return placed_pod(pod, self._index.node(node), choice)

    async def _read_pod(self, namespace: str, name: str, uid: str) -> WatchedPod:
        """Raises BindingError, which is `uncertain` unless this pod has ended or does not exist."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                item = await self._server.read("GET", pod_path(namespace, name))
            pod, phase = self._watches.parse_pod(item), (item.get("status") or {}).get("phase")
        except AnswerError as error:
            raise BindingError(f"the pod can't be read: {error}", uncertain=error.status != 404) from error
        except (*API_FAILURES, *UNREADABLE) as error:
            raise BindingError(f"the pod can't be read: {type(error).__name__}: {error}", uncertain=True) from error
        if pod.uid != uid:
            raise BindingError(f"the pod has the UID {pod.uid}, the request has {uid}")
        if phase in TERMINAL_PHASES:
            raise BindingError(f"the pod has ended ({phase})")
        return pod

    def _may_be_bound(self, uid: str) -> bool:
        assumed = self._assumed.get(uid)
        return assumed is not None and (assumed.sending or assumed.sent)

    def _place(self, pod: WatchedPod, placed: PlacedPod, *, sending: bool = False, sent: bool = False) -> None:
        self._assume(pod, placed, sending=sending, sent=sent)
        if self._preemption.kept:
            self._preemption.placed(placed)

    def _assume(self, pod: WatchedPod, placed: PlacedPod, *, sending: bool = False, sent: bool = False) -> None:
        seconds = max(self._settings.assume_seconds, _REQUEST_SECONDS if sent else 0.0)
        self._assumed[pod.uid] = _Assumed(pod, self._clock() + seconds, sending, sent)
        self._index.assume(placed)
