"""How many more pods of a shape fit on a cluster, each shape on its own."""

from gpumgr.cluster.core.choose import NodeChoice, choose
from gpumgr.cluster.core.node import NodeState, PodUse, Used, added
from gpumgr.cluster.core.profiles import Profile, Profiles
from gpumgr.cluster.core.request import PodRequest, Policy
from gpumgr.cluster.simulation.live import LiveCluster, LivePod


class Capacity:
    """What fits on a node does not depend on other nodes, so nodes are counted one by one, and equal ones together."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster, self._profiles = cluster, Profiles(cpu_per_core=1)
        for name, node in cluster.nodes.items():
            self._profiles.put(node.state, cluster.index.used(name), None)

    def more(self, pod: LivePod, policy: Policy) -> int:
        """More pods like this one, with this setting; the pod's own policy has precedence."""
        counts: dict[Profile | str, int] = {}
        total = 0
        for name in self._cluster.names(pod):
            # Nodes with equal GPUs differ by UUIDs only.
            key = name if pod.request.constraints.uuids else self._profiles.places[name].profile
            if key not in counts:
                used = self._cluster.index.used(name)
                counts[key] = _fitting(self._cluster.nodes[name].state, used, pod.request, pod.policy or policy)
            free = self._cluster.free(name)
            total += min([counts[key], *(max(0, free.get(each, 0)) // wanted for each, wanted in pod.requests.items() if wanted)])
        return total


def _fitting(state: NodeState, used: Used, request: PodRequest, policy: Policy) -> int:
    count = 0
    while isinstance(choice := choose(state, used, request, policy), NodeChoice):
        use = PodUse()
        for container, shares in zip(request.containers, choice.shares, strict=True):
            use.add(container.kind, shares)
        used = added(used, use.taken)
        count += 1
    return count
