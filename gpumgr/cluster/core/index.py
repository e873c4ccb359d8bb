"""The index of the cluster's nodes with their free amounts. It has one writer; none of its methods waits.

The answers depend only on the nodes, the bound pods and the assumed placements, not on the order in which they were added.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.node import NodeState, Used, plus_taken
from gpumgr.cluster.core.profiles import Profiles
from gpumgr.cluster.core.quota import Quotas
from gpumgr.cluster.core.request import (
    MAX_GPU_CONTAINERS,
    NOTHING,
    AskingPod,
    NamedShares,
    PlacedPod,
    PodRequest,
    Policy,
    Shares,
    taken_by,
)
from gpumgr.common.units import CORES_PER_GPU, Amounts

#: Each set of nodes takes 700 bytes at 5,000 nodes.
_KEPT_NODE_SETS: Final = 256
#: Names of nodes, or a set of nodes as an integer (see `profiles`).
Names = Iterable[str] | int


@dataclass
class _Node:
    state: NodeState
    pods: dict[str, PlacedPod] = field(default_factory=dict)
    used: Used | None = None
    cpu_milli: int = 0

    @property
    def empty(self) -> bool:
        return not (self.pods or self.state.gpus or self.cpu_milli or self.state.cpu_milli)

    @property
    def cpu_free(self) -> int | None:
        return None if self.state.cpu_milli is None else max(0, self.state.cpu_milli - self.cpu_milli)


class ClusterIndex:
    """The nodes, and the bound and assumed pods. An assumed pod is placed, but not yet known to be bound; it stays assumed until it is
    bound or removed. `cpu_per_gpu_milli`: what an average pod requests with one GPU, in thousandths of a CPU (for the policy
    least-fragmentation). A method that changes nodes or pods with GPUs notifies `quotas` before it returns."""

    def __init__(self, quotas: Quotas | None = None, *, cpu_per_gpu_milli: int = 8000) -> None:
        self.quotas = quotas or Quotas()
        self._nodes: dict[str, _Node] = {}
        self._node_of: dict[str, str] = {}
        #: Pods without GPUs: UID -> (node, thousandths of CPU).
        self._cpu_pods: dict[str, tuple[str, int]] = {}
        #: UUID -> names of nodes; several if a GPU was moved, or an inventory was copied.
        self._nodes_of_gpu: defaultdict[str, set[str]] = defaultdict(set)
        self.assumed: set[str] = set()
        self._profiles = Profiles(max(1, cpu_per_gpu_milli // CORES_PER_GPU))
        #: What `compacting` has made so far.
        self._renumbered: Profiles | None = None
        self._node_sets: dict[Hashable, int] = {}
        #: For Question: what was asked since the last change -> the rejection.
        self.rejections: dict[Hashable, Rejection] = {}
        #: Changed nodes that `_profiles` does not have yet.
        self._stale: dict[str, None] = {}
        #: Grows with each change of nodes or of pods with GPUs. The CPU of other pods does not count, because it never decides whether a
        #: node fits.
        self.version = 0
        #: Node -> the version of its last change, the oldest first.
        self._versions: dict[str, int] = {}
        #: Names of changed nodes, for NodeRows, which removes the names.
        self.changed: set[str] = set()

    # -- changes -----------------------------------------------------------------------------------------------------------

    def set_node(self, state: NodeState) -> None:
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
            self.quotas.node_changed(state, node.pods.values())

    def remove_node(self, name: str) -> None:
        """The node's pods stay until `remove`, because the node may be created again."""
        self.set_node(NodeState(name=name))
        if self._nodes[name].empty:
            self._drop(name)

    def bind(self, pod: PlacedPod) -> None:
        """Records a pod that the API server shows on its node. The pod is no longer assumed."""
        self.assume(pod)
        self.assumed.discard(pod.uid)

    def assume(self, pod: PlacedPod) -> None:
        """Records a pod that is expected on its node."""
        if self.placement(pod.uid) != pod:
            self._put(pod)
        self.assumed.add(pod.uid)

    def remove(self, uid: str) -> None:
        """Removes a pod that has ended (also one without GPUs), or an assumed pod that was not bound. An unknown pod is no error."""
        self.assumed.discard(uid)
        if (counted := self._cpu_pods.pop(uid, None)) is not None:
            name, cpu_milli = counted
            self._count_cpu(name, -cpu_milli)
        elif uid in self._node_of:
            name = self._node_of.pop(uid)
            node = self._nodes[name]
            node.cpu_milli -= node.pods.pop(uid).request.cpu_milli
            self.quotas.pod_removed(uid)
            self._changed(name)
        else:
            return
        if self._nodes[name].empty:
            self._drop(name)

    def use_cpu(self, uid: str, node: str, cpu_milli: int) -> None:
        """Counts the CPU of a pod without GPUs."""
        if self._cpu_pods.get(uid) != (node, cpu_milli):
            self.remove(uid)
            self._cpu_pods[uid] = (node, cpu_milli)
            self._count_cpu(node, cpu_milli)

    def settle(self) -> None:
        """Updates the profiles (groups of equal nodes). After many changes this takes long. The property `profiles` calls this method."""
        for _ in self.settling():
            pass

    def settling(self) -> Iterator[None]:
        """`settle` in steps, one for each changed node."""
        for name in sorted(self._stale):
            if name not in self._stale:
                continue  # another call has done it between two steps
            del self._stale[name]
            for profiles in filter(None, (self._profiles, self._renumbered)):
                self._settle_in(profiles, name)
            yield

    def compacting(self) -> Iterator[None]:
        """If many slots (numbers of nodes) are unused, renumbers the nodes and forgets removed ones, in steps, one for each node."""
        if not self.profiles.sparse:
            return
        self._renumbered = renumbered = Profiles(self._profiles.cpu_per_core, self.numbering + 1)
        for name in sorted(self._nodes):
            self._settle_in(renumbered, name)
            yield
        former, self._profiles, self._renumbered = self._profiles, renumbered, None
        self._versions = {name: version for name, version in self._versions.items() if name in self._nodes}
        for name in [*former.places]:  # to free the memory of all at once takes up to 30 ms
            former.remove(name)
            yield

    # -- queries -----------------------------------------------------------------------------------------------------------

    def placement(self, uid: str) -> PlacedPod | None:
        name = self._node_of.get(uid)
        return self._nodes[name].pods[uid] if name is not None else None

    def node(self, name: str) -> NodeState | None:
        found = self._nodes.get(name)
        return found.state if found is not None else None

    def pods_on(self, name: str) -> Mapping[str, PlacedPod]:
        found = self._nodes.get(name)
        return found.pods if found is not None else {}

    def used(self, name: str) -> Used:
        """The use of each GPU of the node; more than the GPU has, if annotations of pods or the agent report so much."""
        node = self._nodes[name]
        if node.used is None:
            node.used = used_on(node.state, node.pods.values())
        return node.used

    @property
    def profiles(self) -> Profiles:
        """Up to date with all changes."""
        self.settle()
        return self._profiles

    @property
    def numbering(self) -> int:
        """Sets of nodes are void after this number has changed."""
        return self._profiles.numbering

    def node_set(self, names: Names) -> int:
        """The set of these nodes, cached by their names."""
        if isinstance(names, int):
            return names
        # kube-scheduler sends the same names in changing order. Python salts hashes of texts, so no client can craft two sets with the same
        # hash.
        names = frozenset(names)
        content = self.numbering, len(names), hash(names)
        if (known := self._node_sets.get(content)) is not None:
            return known
        nodes = self.profiles.nodes_of(names)
        if len(self._node_sets) >= _KEPT_NODE_SETS:
            self._node_sets.clear()
        if nodes.bit_count() == len(names):  # otherwise some names have no number yet, so the set may grow
            self._node_sets[content] = nodes
        return nodes

    def names(self, nodes: int) -> list[str]:
        return self._profiles.names_of(nodes)

    def changed_since(self, version: int) -> int:
        """The nodes that have changed after this version; -1: all that ever changed."""
        later = takewhile(lambda item: item[1] > version, reversed(self._versions.items()))
        return self.profiles.nodes_of(frozenset(name for name, _ in later))

    def with_gpus(self, uuids: Iterable[str]) -> set[str]:
        return {name for uuid in uuids for name in self._nodes_of_gpu.get(uuid, ())}

    @property
    def placed_pods(self) -> int:
        return len(self._node_of)

    def fits(self, pod: PlacedPod) -> bool:
        """Whether the placement's GPUs are known, are offered and have room."""
        node = self._nodes.get(pod.node)
        taken = _taken(node.state, pod, node.state.positions) if node is not None else None
        if node is None or taken is None:
            return False
        without = self.used_without(pod.node, pod.uid)
        return all(node.state.gpus[gpu].has_room(without[gpu], amounts) for gpu, amounts in taken.items())

    def choose_on(
        self, name: str, uid: str, request: PodRequest, policy: Policy, namespace: str = ""
    ) -> NodeChoice | Misfit | Rejection:
        """The choice within the namespace's quota, as if the pod had nothing there yet."""
        if (node := self.node(name)) is None:
            return Misfit(container=None)
        return self.quotas.choose(namespace, node, self.used_without(name, uid), request, policy)

    def used_without(self, name: str, uid: str) -> Used:
        node = self._nodes[name]
        return used_on(node.state, [pod for pod in node.pods.values() if pod.uid != uid]) if uid in node.pods else self.used(name)

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
        self.quotas.pod_placed(pod, self._nodes[pod.node].state)
        self._changed(pod.node)

    def _drop(self, name: str) -> None:
        del self._nodes[name]
        self._note(name)

    def _changed(self, name: str) -> None:
        self._nodes[name].used = None
        self._note(name)

    def _note(self, name: str) -> None:
        self.version += 1
        self.rejections.clear()
        self._versions.pop(name, None)
        self._versions[name] = self.version
        self.changed.add(name)
        self._stale[name] = None

    def _settle_in(self, profiles: Profiles, name: str) -> None:
        if (node := self._nodes.get(name)) is not None:
            profiles.put(node.state, self.used(name), node.cpu_free)
        else:
            profiles.remove(name)

    def _count_cpu(self, name: str, cpu_milli: int) -> None:
        self._node(name).cpu_milli += cpu_milli
        self._stale[name] = None


def placed_pod(pod: AskingPod, node: NodeState | None, choice: NodeChoice) -> PlacedPod:
    assert node is not None, "a node with a choice is in the index"
    shares = named_shares(node, choice)
    return PlacedPod(
        uid=pod.uid, node=node.name, request=pod.request, shares=shares, namespace=pod.namespace, priority=pod.priority
    )


def named_shares(node: NodeState, choice: NodeChoice) -> tuple[NamedShares, ...]:
    """The choice in terms that stay valid if the node changes: UUIDs where known."""
    return tuple(tuple((node.gpus[gpu].uuid or gpu, amounts) for gpu, amounts in shares) for shares in choice.shares)


def used_on(node: NodeState, pods: Iterable[PlacedPod]) -> Used:
    """Sums what the node reports, what pods with known GPUs take, and a likely choice for other pods; independent of the order of
    `pods`."""
    used, positions = (NOTHING,) * len(node.gpus), node.positions
    for shares in node.reported_shares.values():
        used = plus_taken(used, _summed(shares))
    unknown = []
    for pod in sorted(pods, key=lambda pod: pod.uid):
        if pod.uid in node.reported_shares:
            continue
        taken = _taken(node, pod, positions)
        if taken is None:
            unknown.append(pod)
        else:
            used = plus_taken(used, taken)
    for pod in unknown:
        if len(pod.request.containers) > MAX_GPU_CONTAINERS:
            # A choice would take long, so the pod counts on all GPUs until the agent reports them.
            used = tuple(held + Amounts(CORES_PER_GPU, gpu.memory_mebibytes) for held, gpu in zip(used, node.gpus, strict=True))
            continue
        # gpumgr's agent follows the constraints. gpu-manager does not read them, so its pods may be on any GPU.
        anywhere = PodRequest(pod.request.containers)
        for wanted in dict.fromkeys((replace(anywhere, constraints=pod.request.constraints), anywhere)):
            choice = choose(node, used, wanted, "binpack")
            if isinstance(choice, NodeChoice):
                used = plus_taken(used, choice.taken)
                break
    return used


def _summed(shares: Shares) -> Mapping[int, Amounts]:
    taken: dict[int, Amounts] = {}
    for gpu, amounts in shares:
        taken[gpu] = taken.get(gpu, NOTHING) + amounts
    return taken


def _taken(node: NodeState, pod: PlacedPod, positions: Mapping[str | int, int]) -> Mapping[int, Amounts] | None:
    """None: a GPU of the pod is not known, or no longer on this node."""
    if pod.shares is None or len(pod.shares) != len(pod.request.containers):
        return None
    found: list[Shares] = []
    for shares in pod.shares:
        resolved = [(positions.get(gpu), amounts) for gpu, amounts in shares]
        found.append(tuple((gpu, _filled(node, gpu, each)) for gpu, each in resolved if gpu is not None))
        if len(found[-1]) != len(shares):
            return None
    return taken_by(pod.request, found)


def _filled(node: NodeState, gpu: int, amounts: Amounts) -> Amounts:
    """Adds all memory of the GPU if the pod has all its cores. A MIG device keeps its own memory, even if it has all cores."""
    whole = amounts.whole and not amounts.slices
    return replace(amounts, memory_mebibytes=node.gpus[gpu].memory_mebibytes) if whole else amounts
