"""All nodes with their free amounts, and the nodes that fit a request. The index has one writer; none of its methods waits.

The state is derived from nodes, bound pods, and assumed placements that have not been bound yet. An index that is filled with the same
nodes and bound pods in any order gives the same answers.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
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
from gpumgr.cluster.core.shape import Rejection
from gpumgr.common.units import CORES_PER_GPU, Amounts

#: How many sets of nodes are kept; each takes 700 bytes at 5,000 nodes.
_KEPT_NODE_SETS: Final = 256
#: Names of nodes, or a set of nodes: the bits of an integer (see `gpumgr.cluster.core.profiles`).
Names = Iterable[str] | int


@dataclass
class _Node:
    state: NodeState
    pods: dict[str, PlacedPod] = field(default_factory=dict)
    used: Used | None = None
    #: The CPU of all pods on the node, in thousandths.
    cpu_milli: int = 0

    @property
    def empty(self) -> bool:
        """Whether nothing is known of the node."""
        return not (self.pods or self.state.gpus or self.cpu_milli or self.state.cpu_milli)

    @property
    def cpu_free(self) -> int | None:
        return None if self.state.cpu_milli is None else max(0, self.state.cpu_milli - self.cpu_milli)


class ClusterIndex:
    """An assumed placement was decided, but is not known to be bound yet. It lasts until it is bound or removed. `cpu_per_gpu_milli`: what
    an average pod requests beside one GPU, in thousandths of a CPU, for the policy least-fragmentation. `quotas` is notified of each
    change of nodes and of pods with GPUs, before the method that changes the index returns."""

    def __init__(self, quotas: Quotas | None = None, *, cpu_per_gpu_milli: int = 8000) -> None:
        self.quotas = quotas or Quotas()
        self._nodes: dict[str, _Node] = {}
        self._node_of: dict[str, str] = {}
        #: Pods without GPUs: (node, thousandths of CPU), by UID.
        self._cpu_pods: dict[str, tuple[str, int]] = {}
        #: UUID of a GPU -> names of nodes. More than one if a GPU was moved, or an inventory was copied.
        self._nodes_of_gpu: defaultdict[str, set[str]] = defaultdict(set)
        #: UIDs of the pods with an assumed placement.
        self.assumed: set[str] = set()
        self._profiles = Profiles(max(1, cpu_per_gpu_milli // CORES_PER_GPU))
        self._node_sets: dict[Hashable, int] = {}
        #: For Question: what was asked -> the state in which it was rejected, and the rejection.
        self.rejections: dict[Hashable, tuple[Hashable, Rejection]] = {}
        #: Nodes with changes that `_profiles` does not have yet.
        self._stale: dict[str, None] = {}
        #: Differs after every change of nodes or of pods with GPUs. The CPU of pods without GPUs does not count: it decides for no request
        #: whether a node fits.
        self.version = 0
        #: Name of a node -> the version of its last change, the oldest first.
        self._versions: dict[str, int] = {}
        #: Names of nodes that have changed; NodeRows removes the names.
        self.changed: set[str] = set()

    # -- changes -----------------------------------------------------------------------------------------------------------

    def set_node(self, state: NodeState) -> None:
        """Adds a node, or replaces its state."""
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
        """The node's pods stay in the index until `remove` removes each of them, since the node may be created again."""
        self.set_node(NodeState(name=name))
        if self._nodes[name].empty:
            self._drop(name)

    def bind(self, pod: PlacedPod) -> None:
        """Records a pod that the API server shows on its node; this replaces what was assumed."""
        self.assume(pod)
        self.assumed.discard(pod.uid)

    def assume(self, pod: PlacedPod) -> None:
        """Records a pod that is expected on its node."""
        if self.placement(pod.uid) != pod:
            self._put(pod)
        self.assumed.add(pod.uid)

    def remove(self, uid: str) -> None:
        """Removes a pod that has ended, or a failed assumption. A pod that is not in the index is no error."""
        self.assumed.discard(uid)
        name = self._node_of.pop(uid, None)
        if name is None:
            return
        node = self._nodes[name]
        node.cpu_milli -= node.pods.pop(uid).request.cpu_milli
        self.quotas.pod_removed(uid)
        self._changed(name)
        if node.empty:
            self._drop(name)

    def use_cpu(self, uid: str, node: str, cpu_milli: int) -> None:
        """Counts the CPU of a pod without GPUs on its node."""
        if self._cpu_pods.get(uid) != (node, cpu_milli):
            self.free_cpu(uid)
            self._cpu_pods[uid] = (node, cpu_milli)
            self._count_cpu(node, cpu_milli)

    def free_cpu(self, uid: str) -> None:
        """Frees what `use_cpu` has counted for the pod, if anything."""
        if (known := self._cpu_pods.pop(uid, None)) is not None:
            node, cpu_milli = known
            self._count_cpu(node, -cpu_milli)
            if self._nodes[node].empty:
                self._drop(node)

    def settle(self) -> None:
        """Brings the profiles (groups of equal nodes) up to date with all changes. Queries do this first, so the first query after many
        changes takes long."""
        for _ in self.settling():
            pass

    def settling(self) -> Iterator[None]:
        """`settle` in steps, one for each node that has changed."""
        for name in sorted(self._stale):
            if name not in self._stale:
                continue  # another call has done it between two steps
            del self._stale[name]
            if (node := self._nodes.get(name)) is not None:
                self._profiles.put(node.state, self.used(name), node.cpu_free)
            else:
                self._profiles.remove(name)
            yield

    def compact(self) -> None:
        """Numbers the nodes again if many numbers have no node, and forgets removed nodes. Call it where no set of nodes is in use."""
        if self.profiles.compact():
            self._versions = {name: version for name, version in self._versions.items() if name in self._nodes}

    # -- queries -----------------------------------------------------------------------------------------------------------

    def placement(self, uid: str) -> PlacedPod | None:
        """Where the pod is bound or assumed."""
        name = self._node_of.get(uid)
        return self._nodes[name].pods[uid] if name is not None else None

    def node(self, name: str) -> NodeState | None:
        found = self._nodes.get(name)
        return found.state if found is not None else None

    def pods_on(self, name: str) -> Mapping[str, PlacedPod]:
        """Bound and assumed pods of a node, by UID."""
        found = self._nodes.get(name)
        return found.pods if found is not None else {}

    def used(self, name: str) -> Used:
        """What is used of each GPU of a node. It may exceed a GPU's capacity if the annotations of pods or the node's agent say so."""
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
        """Sets of nodes that were made with another numbering are void."""
        return self._profiles.numbering

    def node_set(self, names: Names) -> int:
        """The set of the nodes with these names. Equal sets are one object."""
        if isinstance(names, int):
            return names
        # kube-scheduler sends the same names in another order each time. Python salts the hashes of texts, so no client can craft two sets
        # with the same hash.
        names = frozenset(names)
        content = self.numbering, len(names), hash(names)
        if (known := self._node_sets.get(content)) is not None:
            return known
        nodes = self.profiles.nodes_of(names)
        if len(self._node_sets) >= _KEPT_NODE_SETS:
            self._node_sets.clear()
        if nodes.bit_count() == len(names):  # else names are left out, which may get a number later
            self._node_sets[content] = nodes
        return nodes

    def names(self, nodes: int) -> list[str]:
        return self._profiles.names_of(nodes)

    def changed_since(self, version: int) -> int:
        """The nodes that have changed after this version; -1: all that have ever changed."""
        later = takewhile(lambda item: item[1] > version, reversed(self._versions.items()))
        return self.profiles.nodes_of(frozenset(name for name, _ in later))

    def with_gpus(self, uuids: Iterable[str]) -> set[str]:
        """The names of the nodes that have one of these GPUs."""
        return {name for uuid in uuids for name in self._nodes_of_gpu.get(uuid, ())}

    @property
    def placed_pods(self) -> int:
        """Bound and assumed pods."""
        return len(self._node_of)

    def fits(self, pod: PlacedPod) -> bool:
        """Whether the GPUs of a placement are known, are offered, and have room for it."""
        node = self._nodes.get(pod.node)
        taken = _taken(node.state, pod, node.state.positions) if node is not None else None
        if node is None or taken is None:
            return False
        without = self.used_without(pod.node, pod.uid)
        return all(node.state.gpus[gpu].has_room(without[gpu], amounts) for gpu, amounts in taken.items())

    def choose_on(
        self, name: str, uid: str, request: PodRequest, policy: Policy, namespace: str = ""
    ) -> NodeChoice | Misfit | Rejection:
        """A choice on this node within the quota of the namespace, as if the pod had nothing there yet."""
        if (node := self.node(name)) is None:
            return Misfit(container=None)
        return self.quotas.choose(namespace, node, self.used_without(name, uid), request, policy)

    def used_without(self, name: str, uid: str) -> Used:
        """What `used` would be without this pod."""
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
        self._versions.pop(name, None)
        self._versions[name] = self.version
        self.changed.add(name)
        self._stale[name] = None

    def _count_cpu(self, name: str, cpu_milli: int) -> None:
        self._node(name).cpu_milli += cpu_milli
        self._stale[name] = None


def placed_pod(pod: AskingPod, node: NodeState | None, choice: NodeChoice) -> PlacedPod:
    """The pod on the GPUs of this choice."""
    assert node is not None, "a node with a choice is in the index"
    shares = named_shares(node, choice)
    return PlacedPod(
        uid=pod.uid, node=node.name, request=pod.request, shares=shares, namespace=pod.namespace, priority=pod.priority
    )


def named_shares(node: NodeState, choice: NodeChoice) -> tuple[NamedShares, ...]:
    """The choice in terms that outlive a change of the node: UUIDs where the node has them."""
    return tuple(tuple((node.gpus[gpu].uuid or gpu, amounts) for gpu, amounts in shares) for shares in choice.shares)


def used_on(node: NodeState, pods: Iterable[PlacedPod]) -> Used:
    """Adds up what the node reports, then what pods with known GPUs take, then a likely choice for the other pods. The order of `pods` has
    no influence."""
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
            # A choice would take long: the pod counts on all GPUs until the agent reports them.
            used = tuple(held + Amounts(CORES_PER_GPU, gpu.memory_mebibytes) for held, gpu in zip(used, node.gpus, strict=True))
            continue
        # An agent of gpumgr follows the constraints when it chooses; gpu-manager does not read them, so its pods may be on any GPU.
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
    """What the pod takes of each GPU, by position. None: its GPUs are not known, or no longer on this node."""
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
    """All cores of a GPU include all its memory. A MIG device has its own memory, even if it has all cores."""
    whole = amounts.whole and not amounts.slices
    return replace(amounts, memory_mebibytes=node.gpus[gpu].memory_mebibytes) if whole else amounts
