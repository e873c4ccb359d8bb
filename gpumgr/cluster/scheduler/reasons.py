"""Computes why pods wait, even if kube-scheduler has not called the extender for them. The work runs in short slices, so that no call of
kube-scheduler waits until all nodes are examined."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from gpumgr.cluster.core.choose import Misfit
from gpumgr.cluster.core.explain import Rejection, explain, memory_text
from gpumgr.cluster.core.node import covers
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import ContainerRequest, PodRequest, Policy
from gpumgr.cluster.scheduler.api import Kind, NodeGroup, Waiting
from gpumgr.cluster.scheduler.node_rows import NodeRows
from gpumgr.cluster.scheduler.objects import WatchedPod
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.common.aio import in_slices, sliced
from gpumgr.common.units import Amounts

#: The most different requests of waiting pods that are examined.
MAX_REQUESTS: Final = 48


class WaitingReasons:
    """`policy` applies to pods without one."""

    def __init__(self, watches: ClusterWatches, rows: NodeRows, policy: Policy) -> None:
        self._index, self._quotas, self._rows, self._policy = watches.index, watches.quotas, rows, policy

    async def kind(self, pod: WatchedPod, known: dict[tuple[PodRequest, Policy], Kind]) -> tuple[Kind | None, str]:
        """Returns the kind of reason, and the obstacle that does not depend on the node, or "". `known` keeps the results of
        `_without_quota` for the next pods. Kind None: the pod is not examined, because `known` is full (MAX_REQUESTS). Refresh the rows
        first."""
        if pod.refusal is not None:
            return "refused", pod.refusal
        if self._quotas.problem is not None:
            return "quota", self._quotas.problem
        request, policy = pod.request.without_cpu, pod.policy or self._policy
        if (kind := known.get((request, policy))) is None:
            if len(known) == MAX_REQUESTS:
                return None, ""
            kind = known[request, policy] = await self._without_quota(request, policy)
        if kind == "elsewhere" and pod.namespace in self._quotas.limits:
            question, names = Question(self._index, request, policy, pod.namespace, keep=False), list(self._rows.nodes)
            await in_slices(question.examine(names, reasons=False))
            if not question.fits(names):
                await in_slices(question.examine(names))
                if isinstance(within := question.rank(names), Rejection):
                    return "quota", within.text
        return kind, ""

    async def _without_quota(self, request: PodRequest, policy: Policy) -> Kind:
        """The kind of reason if there were no quotas. The index is asked only if a node has enough in total, because for most waiting pods
        no node has even that."""
        await asyncio.sleep(0)
        wanted = request.in_total
        if not any(covers(node.sums, wanted) for node in self._rows.nodes.values()):
            return "resources"
        # `keep=False`: the results that the index keeps for kube-scheduler's calls are not displaced.
        names, question = list(self._rows.nodes), Question(self._index, request, policy, keep=False)
        await in_slices(question.examine(names, reasons=False))
        return "elsewhere" if question.fits(names) else "fragmentation"

    async def kinds(self, pods: Iterable[WatchedPod]) -> list[tuple[WatchedPod, Kind | None, str]]:
        """The results of `kind` for several pods. Refresh the rows first."""
        known: dict[tuple[PodRequest, Policy], Kind] = {}
        return [(pod, *await self.kind(pod, known)) async for pod in sliced(list(pods))]

    async def why(self, pod: WatchedPod, *, each_node: bool) -> Waiting:
        """Groups the nodes by the reason why they can't take the pod, the largest group first."""
        await self._rows.refresh()
        kind, limit = await self.kind(pod, {})
        assert kind is not None, "one request is examined"
        waiting = Waiting(kind=kind, request=request_text(pod.request), limit=limit)
        if pod.refusal is not None:
            return waiting
        question = Question(self._index, pod.request, pod.policy or self._policy, pod.namespace)
        denials = question.denials(self._index.node_set(self._rows.nodes))
        denied = {name: each.reason for each in denials if each.entire for name in self._index.names(each.nodes)}
        found: defaultdict[str, list[tuple[str, str, float]]] = defaultdict(list)
        async for name, node in sliced(list(self._rows.nodes.items())):
            quota = (f"denied by quota: {denied[name]}", "", 0.0) if name in denied else None
            reason, detail, lack = quota or self._on(name, node.sums, pod)
            found[reason].append((name, detail, lack))
        for reason, nodes in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
            nearest = min(nodes, key=lambda node: (node[2], node[0]))
            closest = f"{nearest[0]}, {nearest[1]}" if nearest[1] else ""
            listed = sorted((name, detail) for name, detail, _ in nodes) if each_node else []
            waiting.groups.append(NodeGroup(reason=reason, count=len(nodes), closest=closest, nodes=listed))
        return waiting

    def _on(self, name: str, sums: Amounts, pod: WatchedPod) -> tuple[str, str, float]:
        """The reason, what the node has, and a number that grows with what the node lacks."""
        if not covers(sums, wanted := pod.request.in_total):
            lack = 1 - min(_share(sums.cores, wanted.cores), _share(sums.memory_mebibytes, wanted.memory_mebibytes))
            return f"less than {_in_total(wanted)} free in total", _in_total(sums), lack
        choice = self._index.choose_on(name, pod.uid, pod.request, pod.policy or self._policy, pod.namespace)
        if isinstance(choice, Rejection):
            return f"denied by quota: {choice.text}", "", 0.0
        if not isinstance(choice, Misfit):
            return "the GPUs that it asks for are free", "", 0.0
        reason, _, detail = explain([(1, name, choice)]).removeprefix("has ").partition(" (")
        return reason, detail.removeprefix("closest: ").removesuffix(")"), choice.distance


def request_text(request: PodRequest) -> str:
    """Such as "50 cores and 8 GiB of one GPU; init: 2 GPUs"."""
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
