"""Why a pod waits: the reason of every node, from the index, whether or not the pod has reached the verbs."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, Literal, get_args

import msgspec

from gpumgr.cluster.choose import Misfit
from gpumgr.cluster.explain import explain, memory_text
from gpumgr.cluster.index import ClusterIndex, Rejection
from gpumgr.cluster.quota import Quotas, rank_within_quota
from gpumgr.cluster.request import ContainerRequest, PodRequest, Policy
from gpumgr.cluster.summary import covers, in_total
from gpumgr.scheduler.objects import WatchedPod
from gpumgr.scheduler.overview import ClusterOverview
from gpumgr.units import Amounts

#: "refused": no agent grants the request. "quota": its namespace may hold no more. "resources": no node has enough in total.
#: "fragmentation": a node has enough in total, and no node has it on GPUs that the pod can use. "elsewhere": GPUs are free, so
#: kube-scheduler has not tried yet, or rejects these nodes itself.
Kind = Literal["refused", "quota", "resources", "fragmentation", "elsewhere"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

#: Nodes that are examined before the event loop serves others.
_SLICE: Final = 20
#: Different requests of waiting pods that are examined; the index keeps results for a bounded number of them, for the verbs above all.
MAX_REQUESTS: Final = 48


class NodeGroup(msgspec.Struct, kw_only=True):
    """Nodes with the same reason. `nodes`: (name, its own detail), if they were asked for."""

    reason: str
    count: int
    closest: str = ""
    nodes: list[tuple[str, str]] = []


class Waiting(msgspec.Struct, kw_only=True):
    """`request` in words. `limit`: what stands against the pod wherever it goes (its request, or a quota)."""

    kind: Kind
    request: str
    limit: str = ""
    groups: list[NodeGroup] = []


class Reasons:
    def __init__(
        self,
        index: ClusterIndex,
        overview: ClusterOverview,
        policy: Policy,
        quotas: Quotas,
    ) -> None:
        self._index, self._overview, self._policy, self._quotas = index, overview, policy, quotas

    def kind(self, pod: WatchedPod) -> tuple[Kind, str]:
        """With what stands against the pod wherever it goes, or "". Refresh the overview before."""
        if pod.refusal is not None:
            return "refused", pod.refusal
        names, policy = list(self._overview.names), pod.policy or self._policy
        if not names:
            return "resources", ""
        within = rank_within_quota(self._index, self._quotas, pod.namespace, pod.request, policy, names)
        if not isinstance(within, Rejection):
            return "elsewhere", ""
        if not isinstance(self._index.rank(pod.request, policy, names), Rejection):
            return "quota", within.text
        wanted = in_total(pod.request)
        return ("fragmentation" if any(covers(sums, wanted) for sums in self._overview.largest_sums) else "resources"), ""

    async def kinds(self, pods: Iterable[WatchedPod]) -> list[tuple[WatchedPod, Kind | None, str]]:
        """What `kind` says of each pod; None beyond MAX_REQUESTS different requests."""
        await self._overview.refresh()
        examined: set[PodRequest] = set()
        found: list[tuple[WatchedPod, Kind | None, str]] = []
        for pod in list(pods):
            if pod.request not in examined:
                if len(examined) == MAX_REQUESTS:
                    found.append((pod, None, ""))
                    continue
                examined.add(pod.request)
                await asyncio.sleep(0)
            found.append((pod, *self.kind(pod)))
        return found

    async def of(self, pod: WatchedPod, *, each_node: bool) -> Waiting:
        """The groups of nodes, the largest one first."""
        await self._overview.refresh()
        kind, limit = self.kind(pod)
        waiting = Waiting(kind=kind, request=request_text(pod.request), limit=limit)
        if pod.refusal is not None:
            return waiting
        excluded = self._quotas.excluded(pod.namespace, pod.request)
        denied = {name: reason for reason, names in excluded.items() for name in names}
        found: defaultdict[str, list[tuple[str, str, float]]] = defaultdict(list)
        for number, name in enumerate(list(self._overview.names)):
            if number % _SLICE == 0:
                await asyncio.sleep(0)
            reason, detail, lack = self._on(name, pod, denied.get(name))
            found[reason].append((name, detail, lack))
        for reason, nodes in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
            nearest = min(nodes, key=lambda node: (node[2], node[0]))
            closest = f"{nearest[0]}, {nearest[1]}" if nearest[1] else ""
            listed = sorted((name, detail) for name, detail, _ in nodes) if each_node else []
            waiting.groups.append(NodeGroup(reason=reason, count=len(nodes), closest=closest, nodes=listed))
        return waiting

    def _on(self, name: str, pod: WatchedPod, denied: str | None) -> tuple[str, str, float]:
        """The reason, what the node has, and how much it lacks: the lowest lacks least. `denied`: why the quota excludes the node."""
        if denied is not None:
            return f"are excluded by the quota: {denied}", "", 0.0
        sums, wanted = self._overview.sums(name), in_total(pod.request)
        if not covers(sums, wanted):
            lack = 1 - min(_share(sums.cores, wanted.cores), _share(sums.memory_mebibytes, wanted.memory_mebibytes))
            return f"have less than {_in_total(wanted)} free in total", _in_total(sums), lack
        choice = self._index.choose_on(name, pod.uid, pod.request, pod.policy or self._policy)
        if not isinstance(choice, Misfit):
            node = self._index.node(name)
            holding = self._quotas.choice_holding(choice, pod.request, node) if node is not None else {}
            if (refusal := self._quotas.refusal(pod.namespace, holding)) is not None:
                return f"are excluded by the quota: {refusal}", "", 0.0
            return "have the GPUs that it asks for", "", 0.0
        reason, _, detail = explain([(name, choice)]).removeprefix("has ").partition(" (")
        return f"have {reason}", detail.removeprefix("closest: ").removesuffix(")"), choice.distance


def request_text(request: PodRequest) -> str:
    """Such as "50 cores and 8 GiB of one GPU; init: 2 GPUs"."""
    return "; ".join(f"{'' if each.kind == 'app' else f'{each.kind}: '}{_container_text(each)}" for each in request.containers)


def _container_text(container: ContainerRequest) -> str:
    if container.whole:
        memory = f" with {memory_text(container.memory_mebibytes)} in all" if container.memory_mebibytes else ""
        return f"{container.gpus} GPU{'s' if container.gpus > 1 else ''}{memory}"
    return f"{container.cores} cores and {memory_text(container.memory_mebibytes)} of one GPU"


def _in_total(amounts: Amounts) -> str:
    return f"{amounts.cores} cores" + (f" and {memory_text(amounts.memory_mebibytes)}" if amounts.memory_mebibytes else "")


def _share(have: int, wanted: int) -> float:
    return min(1.0, have / wanted) if wanted else 1.0
