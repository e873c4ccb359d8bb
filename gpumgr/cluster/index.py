"""All nodes with their free amounts, and per request the nodes that fit. One writer; nothing in here waits.

The state is derived: nodes, bound pods, and assumed placements that have not been bound yet. An index that is filled with the same nodes
and bound pods in any order gives the same answers.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import merge
from itertools import islice
from typing import Final, Protocol

from gpumgr.cluster.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.explain import explain_counted
from gpumgr.cluster.node import NOTHING, NodeState, PodUse, Shares, Used, added
from gpumgr.cluster.profiles import Profiles
from gpumgr.cluster.request import PodRequest, Policy
from gpumgr.cluster.shape import Rejection, Shape
from gpumgr.units import CORES_PER_GPU, Amounts

#: Results that are kept for request shapes, about 200 bytes each; those of the least recently used shape are dropped.
MAX_RESULTS: Final = 500_000
#: A call of `prepare` follows so many of the oldest changes, for the request shapes that were asked for last.
PREPARED_SHAPES: Final = 8
PREPARED_CHANGES: Final = 4

#: (UUID of the GPU, or NVML's index where the node has no inventory; amounts) of each GPU of a container.
NamedShares = tuple[tuple[str | int, Amounts], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPod:
    """A pod on its node. `shares` has the GPUs of each container of the request; None: not known, so the index assumes a likely choice.
    `priority` is Kubernetes' priority."""

    uid: str
    node: str
    request: PodRequest
    shares: tuple[NamedShares, ...] | None = None
    namespace: str = ""
    priority: int = 0


class Listener(Protocol):
    """Is called for every change of the index, before the call that causes it returns."""

    def pod_placed(self, pod: PlacedPod, node: NodeState) -> None: ...
    def pod_removed(self, uid: str) -> None: ...
    def node_changed(self, node: NodeState, pods: Iterable[PlacedPod]) -> None: ...
    def node_removed(self, name: str) -> None: ...


@dataclass
class _Node:
    state: NodeState
    pods: dict[str, PlacedPod] = field(default_factory=dict)
    used: Used | None = None
    #: The CPU of all pods on the node, in thousandths.
    cpu_milli: int = 0

    @property
    def empty(self) -> bool:
        """Nothing is known of it."""
        return not (self.pods or self.state.gpus or self.cpu_milli or self.state.cpu_milli)

    @property
    def cpu_free(self) -> int | None:
        return None if self.state.cpu_milli is None else max(0, self.state.cpu_milli - self.cpu_milli)


class ClusterIndex:
    """Assumed placements were answered, and are not known to be bound yet. They last until they are bound or removed.
    `cpu_per_gpu_milli`: what an average pod requests beside one GPU, in thousandths of a CPU, for the policy least-fragmentation."""

    def __init__(
        self, listeners: Iterable[Listener] = (), *, cpu_per_gpu_milli: int = 8000, max_results: int = MAX_RESULTS
    ) -> None:
        self._listeners, self._cpu_per_core = tuple(listeners), max(1, cpu_per_gpu_milli // CORES_PER_GPU)
        self._max_results = max_results
        self._nodes: dict[str, _Node] = {}
        self._node_of: dict[str, str] = {}
        #: Pods without GPUs: (node, thousandths of CPU), by UID.
        self._cpu_pods: dict[str, tuple[str, int]] = {}
        #: The node of each GPU, by UUID.
        #: UUID -> names. More than one if a GPU was moved, or an inventory was copied.
        self._nodes_of_gpu: defaultdict[str, set[str]] = defaultdict(set)
        self._assumed: set[str] = set()
        self._profiles = Profiles()
        #: Nodes with changes that `_profiles` does not have yet.
        self._stale: dict[str, None] = {}
        self._version = 0
        self._shapes: OrderedDict[tuple[PodRequest, Policy], Shape] = OrderedDict()
        #: Names of nodes that have changed; who follows the index clears it.
        self.changed: set[str] = set()

    # -- changes -----------------------------------------------------------------------------------------------------------

    def set_node(self, state: NodeState) -> None:
        """The node is new or has changed."""
        node = self._node(state.name)
        if node.state != state:
            for uuid in {gpu.uuid for gpu in node.state.gpus} & self._nodes_of_gpu.keys():
                self._nodes_of_gpu[uuid].discard(state.name)
                if not self._nodes_of_gpu[uuid]:
                    del self._nodes_of_gpu[uuid]
            node.state = state
            for uuid in {gpu.uuid for gpu in state.gpus if gpu.uuid}:
                self._nodes_of_gpu[uuid].add(state.name)
            self._changed(state.name)
            for listener in self._listeners:
                listener.node_changed(state, node.pods.values())

    def remove_node(self, name: str) -> None:
        """Its pods stay on record until they are removed, too: the node may come back before."""
        self.set_node(NodeState(name=name))
        if self._nodes[name].empty:
            self._drop(name)

    def bind(self, pod: PlacedPod) -> None:
        """The API server shows the pod on its node; this replaces what was assumed."""
        if self.placement(pod.uid) != pod:
            self._put(pod)
        self._assumed.discard(pod.uid)

    def assume(self, pod: PlacedPod) -> None:
        """The pod is expected on its node."""
        self._put(pod)
        self._assumed.add(pod.uid)

    def remove(self, uid: str) -> None:
        """The pod has ended, or what was assumed has failed."""
        self._assumed.discard(uid)
        name = self._node_of.pop(uid, None)
        if name is None:
            return
        node = self._nodes[name]
        node.cpu_milli -= node.pods.pop(uid).request.cpu_milli
        for listener in self._listeners:
            listener.pod_removed(uid)
        self._changed(name)
        if node.empty:
            self._drop(name)

    def use_cpu(self, uid: str, node: str, cpu_milli: int) -> None:
        """A pod without GPUs is on the node."""
        if self._cpu_pods.get(uid) != (node, cpu_milli):
            self.free_cpu(uid)
            self._cpu_pods[uid] = (node, cpu_milli)
            self._count_cpu(node, cpu_milli)

    def free_cpu(self, uid: str) -> None:
        """The pod has ended. It need not be one of them."""
        if (known := self._cpu_pods.pop(uid, None)) is not None:
            node, cpu_milli = known
            self._count_cpu(node, -cpu_milli)
            if self._nodes[node].empty:
                self._drop(node)

    def settle(self) -> None:
        """Computes what follows from all changes so far. Every query does it, and takes long after many changes."""
        self._version += bool(self._stale)
        for name in self._stale:
            if name in self._nodes:
                self._profiles.put(self._nodes[name].state, self.used(name), self._nodes[name].cpu_free)
            else:
                self._profiles.remove(name)
        self._stale.clear()

    def prepare(self) -> None:
        """Computes a part of what the next queries need, for requests that have been asked before. It takes a millisecond at most."""
        self.settle()
        for shape in islice(reversed(self._shapes.values()), PREPARED_SHAPES):
            shape.update(self._profiles, PREPARED_CHANGES)

    # -- queries -----------------------------------------------------------------------------------------------------------

    def placement(self, uid: str) -> PlacedPod | None:
        """Where the pod is bound or assumed."""
        name = self._node_of.get(uid)
        return self._nodes[name].pods[uid] if name is not None else None

    def is_assumed(self, uid: str) -> bool:
        return uid in self._assumed

    def node(self, name: str) -> NodeState | None:
        found = self._nodes.get(name)
        return found.state if found is not None else None

    def pods_on(self, name: str) -> Mapping[str, PlacedPod]:
        """Bound and assumed pods of a node, by UID."""
        found = self._nodes.get(name)
        return found.pods if found is not None else {}

    def used(self, name: str) -> Used:
        """What is used of each GPU of a node. It may exceed a GPU's capacity if pods or the node claim so."""
        node = self._nodes[name]
        if node.used is None:
            node.used = used_on(node.state, node.pods.values())
        return node.used

    def rank(
        self, request: PodRequest, policy: Policy, names: Iterable[str], most: int = 1
    ) -> list[tuple[str, NodeChoice]] | Rejection:
        """The best nodes of `names` for the request, the best one first, at most `most` of them; there is at least one name."""
        ordered = self.order(request, policy, names, most)
        if isinstance(ordered, Rejection):
            return ordered
        shape = self._shape(request, policy)
        found = ((name, self._found(name, shape)) for name in ordered)
        return [(name, choice) for name, choice in found if isinstance(choice, NodeChoice)]

    def order(self, request: PodRequest, policy: Policy, names: Iterable[str], most: int | None = None) -> list[str] | Rejection:
        """The names of `rank`; without `most` all that fit."""
        if request.cpu_milli and (request, policy) not in self._shapes:
            # Waiting pods may have many different requests of CPU, and no results are computed for those that fit nowhere.
            first = self.order(request.without_cpu, policy, names, 1)
            if isinstance(first, Rejection):
                return first
        shape, offered = self._shape(request, policy), _set_of(names) if isinstance(names, tuple) else frozenset(names)
        if (kept := shape.rejection) is not None and kept[0] == self._version and kept[1] is offered:
            return kept[2]
        named = {name for gpu in request.constraints.uuids for name in self._nodes_of_gpu.get(gpu, ()) if name in offered}
        found = [(name, self._found(name, shape)) for name in sorted(named)]
        alike = offered - named if named else offered
        fitting = shape.fitting(alike)
        if found:
            ranks = [(shape.rank(each, self._nodes[name].cpu_free), name) for name, each in found if isinstance(each, NodeChoice)]
            fitting = merge(fitting, sorted(ranks))
        if ordered := [name for _, name in islice(fitting, most)]:
            return ordered
        closest = [(count, name, self._found(name, shape)) for count, name in shape.misfits(alike)]
        closest += [(1, name, each) for name, each in found]
        text = explain_counted((count, name, each) for count, name, each in closest if isinstance(each, Misfit))
        shape.rejection = (self._version, offered, Rejection(text))
        return shape.rejection[2]

    @property
    def version(self) -> int:
        """Differs after every change of nodes or placements."""
        self.settle()
        return self._version

    @property
    def placed_pods(self) -> int:
        """Bound and assumed pods."""
        return len(self._node_of)

    @property
    def assumed_pods(self) -> int:
        return len(self._assumed)

    def fits(self, pod: PlacedPod) -> bool:
        """Whether a placement with known GPUs has its room, on GPUs that are offered."""
        node = self._nodes.get(pod.node)
        taken = _taken(node.state, pod) if node is not None else None
        if node is None or taken is None:
            return False
        without = self.used(pod.node) if pod.uid not in node.pods else used_on(node.state, _but(node.pods, pod.uid))
        return all(node.state.gpus[gpu].has_room(without[gpu], amounts) for gpu, amounts in taken.items())

    def choose_on(self, name: str, uid: str, request: PodRequest, policy: Policy) -> NodeChoice | Misfit:
        """A choice on this node, as if the pod had nothing there yet."""
        node = self._nodes.get(name)
        if node is None:
            return Misfit(container=None)
        return choose(node.state, used_on(node.state, _but(node.pods, uid)), request, policy)

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _node(self, name: str) -> _Node:
        if name not in self._nodes:
            self._nodes[name] = _Node(NodeState(name=name))
            self._changed(name)
        return self._nodes[name]

    def _put(self, pod: PlacedPod) -> None:
        self.remove(pod.uid)
        node = self._node(pod.node)
        node.pods[pod.uid] = pod
        node.cpu_milli += pod.request.cpu_milli
        self._node_of[pod.uid] = pod.node
        for listener in self._listeners:
            listener.pod_placed(pod, self._nodes[pod.node].state)
        self._changed(pod.node)

    def _drop(self, name: str) -> None:
        del self._nodes[name]
        for listener in self._listeners:
            listener.node_removed(name)
        self.changed.add(name)
        self._stale[name] = None

    def _changed(self, name: str) -> None:
        self._nodes[name].used = None
        self.changed.add(name)
        self._stale[name] = None

    def _count_cpu(self, name: str, cpu_milli: int) -> None:
        self._node(name).cpu_milli += cpu_milli
        self._stale[name] = None

    def _shape(self, request: PodRequest, policy: Policy) -> Shape:
        """With results that are up to date."""
        self.settle()
        if policy != "least-fragmentation":
            request = request.without_cpu
        key = (request, policy)
        if (shape := self._shapes.get(key)) is not None:
            self._shapes.move_to_end(key)
            shape.update(self._profiles)
            return shape
        shape = self._shapes[key] = Shape(request, policy, self._cpu_per_core)
        shape.update(self._profiles)
        while len(self._shapes) > 1 and sum(map(len, self._shapes.values())) > self._max_results:
            self._shapes.popitem(last=False)
        return shape

    def _found(self, name: str, shape: Shape) -> NodeChoice | Misfit:
        node = self._nodes.get(name)
        return choose(node.state, self.used(name), shape.request, shape.policy) if node is not None else Misfit(container=None)


@lru_cache(maxsize=8)
def _set_of(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


def named_shares(node: NodeState, choice: NodeChoice) -> tuple[NamedShares, ...]:
    """The choice in terms that outlive a change of the node: UUIDs where the node has them."""
    return tuple(tuple((node.gpus[gpu].uuid or gpu, amounts) for gpu, amounts in shares) for shares in choice.shares)


def used_on(node: NodeState, pods: Iterable[PlacedPod]) -> Used:
    """What the node reports, then the pods with known GPUs, then a likely choice for the others; the order of `pods` has no influence."""
    used: Used = (NOTHING,) * len(node.gpus)
    for shares in node.other.values():
        used = added(used, _summed(shares))
    unknown = []
    for pod in sorted(pods, key=lambda pod: pod.uid):
        if pod.uid in node.other:
            used = added(used, _replicas(pod.request, node.other[pod.uid]))
            continue
        taken = _taken(node, pod)
        if taken is None:
            unknown.append(pod)
        else:
            used = added(used, taken)
    for pod in unknown:
        # The agent, which has chosen, follows the constraints; an older one does not read them.
        anywhere = PodRequest(pod.request.containers)
        for wanted in dict.fromkeys((replace(anywhere, constraints=pod.request.constraints), anywhere)):
            choice = choose(node, used, wanted, "binpack")
            if isinstance(choice, NodeChoice):
                used = added(used, _use(pod.request, choice.shares))
                break
    return used


def _replicas(request: PodRequest, shares: Shares) -> Mapping[int, Amounts]:
    """Those of a pod of which the node reports only the amounts: one on each GPU."""
    replicas = any(container.replica for container in request.containers) and not any(each.replicas for _, each in shares)
    return {gpu: Amounts(replicas=1) for gpu, _ in shares} if replicas else {}


def _summed(shares: Shares) -> Mapping[int, Amounts]:
    taken: dict[int, Amounts] = {}
    for gpu, amounts in shares:
        taken[gpu] = taken.get(gpu, NOTHING) + amounts
    return taken


def _taken(node: NodeState, pod: PlacedPod) -> Mapping[int, Amounts] | None:
    """None: its GPUs are not known, or not on this node any more."""
    if pod.shares is None or len(pod.shares) != len(pod.request.containers):
        return None
    positions = node.positions
    found: list[Shares] = []
    for shares in pod.shares:
        resolved = [(positions.get(gpu), amounts) for gpu, amounts in shares]
        found.append(tuple((gpu, _filled(node, gpu, each)) for gpu, each in resolved if gpu is not None))
        if len(found[-1]) != len(shares):
            return None
    return _use(pod.request, found)


def _filled(node: NodeState, gpu: int, amounts: Amounts) -> Amounts:
    """A whole GPU has all its memory; the largest MIG device has its own."""
    whole = amounts.whole and not amounts.slices
    return replace(amounts, memory_mebibytes=node.gpus[gpu].memory_mebibytes) if whole else amounts


def _use(request: PodRequest, shares: Iterable[Shares]) -> Mapping[int, Amounts]:
    use = PodUse()
    for container, each in zip(request.containers, shares, strict=True):
        use.add(container.kind, each)
    return use.taken


def _but(pods: Mapping[str, PlacedPod], uid: str) -> Iterable[PlacedPod]:
    return (pod for pod in pods.values() if pod.uid != uid)
