"""What people and metrics see of the cluster: a row and sums for each node, and why a pod waits, even if kube-scheduler has not called the
extender for it. "Verbs" are the extender's calls: filter, prioritize, preempt and bind.

Nodes are computed again only after a change. All work runs in slices, so that a verb never waits for all nodes.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from gpumgr.cluster.core.choose import Misfit, NodeChoice
from gpumgr.cluster.core.explain import explain, memory_text
from gpumgr.cluster.core.node import NodeState, Totals, Used, covers, free_sum, summarize
from gpumgr.cluster.core.request import NOTHING, ContainerRequest, PodRequest, Policy
from gpumgr.cluster.core.shape import Rejection
from gpumgr.cluster.core.within_quota import RankWithinQuota
from gpumgr.cluster.scheduler.api import Kind, NodeGroup, Waiting
from gpumgr.cluster.scheduler.objects import WatchedNode, WatchedPod
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.common.aio import in_slices
from gpumgr.common.units import Amounts
from gpumgr.placement.evaluators.constraints import UNCONSTRAINED

#: The number of nodes that are computed, or examined for a pod, before the event loop serves other tasks.
_COMPUTED: Final = 100
_EXAMINED: Final = 20
#: The most different requests of waiting pods that are examined.
MAX_REQUESTS: Final = 48
_CLOSED: Final = {(True, False): 0, (True, True): 1, (False, False): 2, (False, True): 2}


class _Node(msgspec.Struct, frozen=True):
    """`row` is the node's row of the page, as JSON. `sums`: what is free on its offered GPUs together."""

    row: msgspec.Raw
    totals: Totals
    sums: Amounts
    inventory: str


class ClusterOverview:
    """The nodes with GPUs or an inventory, as of the last `refresh`. `policy` applies to pods without one."""

    def __init__(self, watches: ClusterWatches, policy: Policy) -> None:
        self._index, self._quotas, self._watched, self._policy = watches.index, watches.quotas, watches.nodes, policy
        self._nodes: dict[str, _Node] = {}
        self._lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Computes the nodes that have changed in the index."""
        async with self._lock:
            while self._index.changed:
                for _ in range(min(_COMPUTED, len(self._index.changed))):
                    self._update(self._index.changed.pop())
                await asyncio.sleep(0)

    def _update(self, name: str) -> None:
        self._nodes.pop(name, None)
        state, watched = self._index.node(name), self._watched.get(name)
        if state is not None and watched is not None and (state.gpus or watched.inventory != "none"):
            used = self._index.used(name)
            row = msgspec.Raw(msgspec.json.encode(_row(state, used, watched)))
            self._nodes[name] = _Node(row, *summarize(state, used), watched.inventory)

    @property
    def rows(self) -> list[msgspec.Raw]:
        return [node.row for node in self._nodes.values()]

    async def totals(self) -> Totals:
        """The sums over all nodes."""
        totals = Totals()
        for number, node in enumerate(list(self._nodes.values())):
            if number % _COMPUTED == 0:
                await asyncio.sleep(0)
            totals.update(node.totals)
        return totals

    @property
    def inventories(self) -> Counter[str]:
        """How many nodes have each value of WatchedNode.inventory."""
        return Counter(node.inventory for node in self._nodes.values())

    # -- why pods wait -----------------------------------------------------------------------------------------------------

    async def kind(self, pod: WatchedPod, known: dict[tuple[PodRequest, Policy], Kind] | None = None) -> tuple[Kind, str]:
        """Returns the kind of reason, and the obstacle that does not depend on the node, or "". Call `refresh` first. `known` stores
        the results that do not depend on the namespace, for the next pods."""
        if pod.refusal is not None:
            return "refused", pod.refusal
        if self._quotas.problem is not None:
            return "quota", self._quotas.problem
        known = {} if known is None else known
        policy = pod.policy or self._policy
        request = pod.request.without_cpu
        if (kind := known.get((request, policy))) is None:
            kind = known[request, policy] = await self._without_quota(request, policy)
        if kind == "elsewhere" and pod.namespace in self._quotas.limits:
            question = RankWithinQuota(self._index, self._quotas, pod.namespace, request, policy, list(self._nodes))
            await in_slices(question.examine())
            if isinstance(within := question.rank(), Rejection):
                return "quota", within.text
        return kind, ""

    async def _without_quota(self, request: PodRequest, policy: Policy) -> Kind:
        """The kind of reason without the quota. The index is asked only if some node has enough in total: most waiting pods lack even
        that."""
        if not await self._enough_in_total(request):
            return "resources"
        # Results that the index keeps for the verbs are not displaced.
        names, shape = list(self._nodes), self._index.shape(request, policy, keep=False)
        await in_slices(self._index.examine(shape, names, reasons=False))
        return "elsewhere" if self._index.any_fits(shape, names) else "fragmentation"

    async def _enough_in_total(self, request: PodRequest) -> bool:
        """Whether a node has enough in total on the GPUs that the constraints allow."""
        await asyncio.sleep(0)
        wanted = request.in_total
        names = [name for name, node in self._nodes.items() if covers(node.sums, wanted)]
        if request.constraints == UNCONSTRAINED:
            return bool(names)
        for number, name in enumerate(names):
            if number % _EXAMINED == 0:
                await asyncio.sleep(0)
            if (state := self._index.node(name)) is not None:
                gpus = zip(state.gpus, self._index.used(name), state.allowed(request), strict=True)
                if covers(free_sum((gpu, held) for gpu, held, allowed in gpus if allowed), wanted):
                    return True
        return False

    async def kinds(self, pods: Iterable[WatchedPod]) -> list[tuple[WatchedPod, Kind | None, str]]:
        """Calls `kind` for each pod; None once MAX_REQUESTS different requests have been examined. Call `refresh` first."""
        known: dict[tuple[PodRequest, Policy], Kind] = {}
        found: list[tuple[WatchedPod, Kind | None, str]] = []
        for number, pod in enumerate(list(pods)):
            if number % _COMPUTED == 0:
                await asyncio.sleep(0)
            full = (
                len(known) == MAX_REQUESTS
                and pod.refusal is None
                and (pod.request.without_cpu, pod.policy or self._policy) not in known
            )
            found.append((pod, None, "") if full else (pod, *await self.kind(pod, known)))
        return found

    async def why(self, pod: WatchedPod, *, each_node: bool) -> Waiting:
        """Why the pod waits, with the groups of nodes, the largest first."""
        await self.refresh()
        kind, limit = await self.kind(pod)
        waiting = Waiting(kind=kind, request=request_text(pod.request), limit=limit)
        if pod.refusal is not None:
            return waiting
        denials = self._quotas.denials(pod.namespace, pod.request)
        denied = {name: each.reason for each in denials if each.entire for name in each.nodes}
        found: defaultdict[str, list[tuple[str, str, float]]] = defaultdict(list)
        for number, name in enumerate(list(self._nodes)):
            if number % _EXAMINED == 0:
                await asyncio.sleep(0)
            reason, detail, lack = (f"denied by quota: {denied[name]}", "", 0.0) if name in denied else self._on(name, pod)
            found[reason].append((name, detail, lack))
        for reason, nodes in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
            nearest = min(nodes, key=lambda node: (node[2], node[0]))
            closest = f"{nearest[0]}, {nearest[1]}" if nearest[1] else ""
            listed = sorted((name, detail) for name, detail, _ in nodes) if each_node else []
            waiting.groups.append(NodeGroup(reason=reason, count=len(nodes), closest=closest, nodes=listed))
        return waiting

    def _on(self, name: str, pod: WatchedPod) -> tuple[str, str, float]:
        """The reason, what the node has, and a number that is lower the less the node lacks."""
        sums, wanted = self._nodes[name].sums if name in self._nodes else NOTHING, pod.request.in_total
        if not covers(sums, wanted):
            lack = 1 - min(_share(sums.cores, wanted.cores), _share(sums.memory_mebibytes, wanted.memory_mebibytes))
            return f"less than {_in_total(wanted)} free in total", _in_total(sums), lack
        node = self._index.node(name)
        choice: NodeChoice | Misfit | Rejection = Misfit(container=None)
        if node is not None:
            used, policy = self._index.used_without(name, pod.uid), pod.policy or self._policy
            choice = self._quotas.choose(pod.namespace, node, used, pod.request, policy)
        if isinstance(choice, Rejection):
            return f"denied by quota: {choice.text}", "", 0.0
        if not isinstance(choice, Misfit):
            return "the GPUs that it asks for are free", "", 0.0
        reason, _, detail = explain([(1, name, choice)]).removeprefix("has ").partition(" (")
        return reason, detail.removeprefix("closest: ").removesuffix(")"), choice.distance


def _row(state: NodeState, used: Used, watched: WatchedNode) -> dict[str, Any]:
    """`gpus` has for each GPU [model's position in `models`, used cores, used MiB, all MiB, 0 = offered, 1 = cordoned, 2 = unhealthy]."""
    models = sorted({gpu.model for gpu in state.gpus})
    return {
        "name": state.name,
        "models": models,
        "gpus": [
            (models.index(gpu.model), held.cores, held.memory_mebibytes, gpu.memory_mebibytes, _CLOSED[gpu.healthy, gpu.cordoned])
            for gpu, held in zip(state.gpus, used, strict=True)
        ],
        "ready": watched.ready,
        "inventory": watched.inventory,
        **({"pool": state.pool} if state.pool else {}),
        **({"problem": watched.problem} if watched.problem else {}),
    }


def request_text(request: PodRequest) -> str:
    """The request in words, such as "50 cores and 8 GiB of one GPU; init: 2 GPUs"."""
    texts = [f"{'' if each.kind == 'app' else f'{each.kind}: '}{_container_text(each)}" for each in request.containers]
    constraints = request.constraints
    return "; ".join(texts) + constraints.text + (" on one NUMA node" if constraints.same_numa_node else "")


def _container_text(container: ContainerRequest) -> str:
    if container.replica is not None:
        return str(container.replica)
    if container.whole:
        memory = f" with {memory_text(container.memory_mebibytes)} in all" if container.memory_mebibytes else ""
        return f"{container.gpus} GPU{'s' if container.gpus > 1 else ''}{memory}"
    return f"{container.cores} cores and {memory_text(container.memory_mebibytes)} of one GPU"


def _in_total(amounts: Amounts) -> str:
    return f"{amounts.cores} cores" + (f" and {memory_text(amounts.memory_mebibytes)}" if amounts.memory_mebibytes else "")


def _share(have: int, wanted: int) -> float:
    return min(1.0, have / wanted) if wanted else 1.0
