"""Places pods on the nodes of a snapshot: by kube-scheduler's filters first, then by the index of `gpumgr scheduler`."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

import msgspec
from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit, NodeChoice
from gpumgr.cluster.core.explain import explain
from gpumgr.cluster.core.index import ClusterIndex, named_shares
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import NO_REQUEST, NamedShares, PlacedPod, PodRequest, Policy
from gpumgr.cluster.simulation.node_filters import Json, Resources, refusal, short, shortage_text


class LiveNode(msgspec.Struct, frozen=True, kw_only=True):
    """`taints` includes the taints that Kubernetes derives from the node's state."""

    state: NodeState
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    taints: tuple[Json, ...] = ()
    allocatable: Resources


class Spot(msgspec.Struct, frozen=True):
    """A place for a pod. `shares`: the GPUs of each container of the request; None: not known."""

    node: str
    shares: tuple[NamedShares, ...] | None = None


class LivePod(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """`name` includes the namespace. Pods with equal `rules` have equal demands on nodes. `home`: its place in the snapshot; None: it
    waits. `policy` None: the setting applies. `unchecked`: its demands that are not modelled here."""

    uid: str
    name: str
    spec: Json
    rules: str
    requests: Resources
    request: PodRequest = NO_REQUEST
    policy: Policy | None = None
    home: Spot | None = None
    why_not_movable: str = ""
    unchecked: tuple[str, ...] = ()

    def on(self, spot: Spot) -> PlacedPod:
        return PlacedPod(uid=self.uid, node=spot.node, request=self.request, shares=spot.shares)


class LiveCluster:
    """At first each pod with a `home` is at its home, and the other pods are not placed. `nodes` must have the node of each home. `policy`
    and `cpu_per_gpu_milli` are settings of the scheduler."""

    def __init__(
        self, nodes: Iterable[LiveNode], pods: Iterable[LivePod], policy: Policy, *, cpu_per_gpu_milli: int = 8000
    ) -> None:
        self.policy, self._cpu_per_gpu_milli = policy, cpu_per_gpu_milli
        self.nodes = {node.state.name: node for node in sorted(nodes, key=lambda each: each.state.name)}
        self.pods = {pod.uid: pod for pod in pods}
        self.index = ClusterIndex(cpu_per_gpu_milli=cpu_per_gpu_milli)
        self._there: dict[str, dict[str, LivePod]] = {name: {} for name in self.nodes}
        self._used: dict[str, Counter[str]] = {name: Counter() for name in self.nodes}
        self._names: dict[str, tuple[str, ...]] = {}
        for node in self.nodes.values():
            self.index.set_node(node.state)
        for pod in self.pods.values():
            if pod.home is not None:
                self.put(pod, pod.home)

    def part(self, names: Collection[str]) -> "LiveCluster":
        """These nodes alone, with the pods at home there."""
        pods = (pod for pod in self.pods.values() if pod.home is not None and pod.home.node in names)
        return LiveCluster((self.nodes[name] for name in names), pods, self.policy, cpu_per_gpu_milli=self._cpu_per_gpu_milli)

    def put(self, pod: LivePod, spot: Spot) -> None:
        if pod.request.containers:
            self._report(pod, there=spot is pod.home)
            self.index.bind(pod.on(spot))
        else:
            self.index.use_cpu(pod.uid, spot.node, pod.requests.get("cpu", 0))
        self._there[spot.node][pod.uid] = pod
        self._used[spot.node].update(pod.requests)

    def remove(self, pod: LivePod, node: str) -> None:
        self.index.remove(pod.uid)
        self._report(pod, there=False)
        del self._there[node][pod.uid]
        self._used[node].subtract(pod.requests)

    def there(self, node: str) -> Collection[LivePod]:
        """The pods that are placed on the node now."""
        return self._there[node].values()

    def free(self, node: str) -> Resources:
        return {name: amount - self._used[node][name] for name, amount in self.nodes[node].allocatable.items()}

    def names(self, pod: LivePod) -> tuple[str, ...]:
        """The nodes that are possible for the pod if enough is free there."""
        if pod.rules not in self._names:
            self._names[pod.rules] = tuple(name for name in self.nodes if self._refusal(pod, name) is None)
        return self._names[pod.rules]

    def spots(self, pod: LivePod, most: int = 1) -> list[Spot]:
        """At most `most` places for the pod, the best first."""
        names = self.names(pod)
        question = Question(self.index, pod.request, pod.policy or self.policy)
        found = (self.on(pod, name) for name in question.order(names))
        return list(islice((spot for spot in found if isinstance(spot, Spot)), most))

    def on(self, pod: LivePod, name: str) -> Spot | str:
        """The place that the pod gets on this node, or what the node lacks. Labels and taints are not checked here."""
        free = self.free(name)
        if (lacking := next(short(pod.requests, free), None)) is not None:
            return shortage_text(pod.requests, free, lacking)
        choice = self.index.choose_on(name, pod.uid, pod.request, pod.policy or self.policy)
        if isinstance(choice, Misfit):
            return explain([(1, name, choice)])
        assert isinstance(choice, NodeChoice), "there are no quotas"
        return Spot(name, named_shares(self.nodes[name].state, choice))

    def holds(self, pod: LivePod, spot: Spot) -> bool:
        """Whether the place is free for the pod. The pod must not be placed."""
        possible = spot.node in self.names(pod) and not any(short(pod.requests, self.free(spot.node)))
        return possible and (not pod.request.containers or self.index.fits(pod.on(spot)))

    def reasons(self, pod: LivePod) -> Iterator[tuple[str, str]]:
        """(name, reason) of each node, for a pod that fits nowhere."""
        return ((name, self._refusal(pod, name) or str(self.on(pod, name))) for name in self.nodes)

    def gpus(self, pod: LivePod, spot: Spot) -> list[int]:
        """The positions of the pod's GPUs on its node."""
        state = self.nodes[spot.node].state
        if spot is pod.home and pod.uid in state.reported_shares:
            return sorted(position for position, _ in state.reported_shares[pod.uid])
        return sorted({state.positions[gpu] for shares in spot.shares or () for gpu, _ in shares if gpu in state.positions})

    def _refusal(self, pod: LivePod, name: str) -> str | None:
        return refusal(pod.spec, name, self.nodes[name].labels, self.nodes[name].taints)

    def _report(self, pod: LivePod, *, there: bool) -> None:
        """Adds the agent's report about the pod to the state of its home if the pod is `there`, otherwise removes it."""
        home = self.nodes[pod.home.node].state if pod.home is not None else None
        if home is None or pod.uid not in home.reported_shares:
            return
        state = self.index.node(home.name) or home
        others = {uid: shares for uid, shares in state.reported_shares.items() if uid != pod.uid}
        self.index.set_node(replace(state, reported_shares=others | ({pod.uid: home.reported_shares[pod.uid]} if there else {})))
