"""Small clusters for tests of what-if questions."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.simulation.live import LiveCluster, LiveNode, LivePod, Spot
from gpumgr.common.units import Amounts
from tests.cluster_states import node_state, share


def live_node(state: NodeState, cpu: int = 8000, **more: Any) -> LiveNode:
    return LiveNode(state=replace(state, cpu_milli=cpu), allocatable={"cpu": cpu, "pods": 99}, **more)


def live_pod(uid: str, cores: int, on: str | None = None, gpu: int = 0, *, cpu: int = 0, **more: Any) -> LivePod:
    """A share of `cores` without memory, or (0) no GPU."""
    request = {"request": replace(share(cores, 1), cpu_milli=cpu)} if cores else {}
    shares = (((f"GPU-{on}-{gpu}", Amounts(cores, 256)),),) if cores else None
    made = {"name": f"team/{uid}", "spec": {}, "rules": "", "requests": {"cpu": cpu, "pods": 1}, **request}
    return LivePod(uid=uid, home=Spot(on, shares) if on else None, **{**made, **more})


def cluster(pods: Sequence[LivePod], **counts: int) -> LiveCluster:
    """Nodes by name with their numbers of GPUs."""
    return LiveCluster(
        [live_node(node_state(name, count) if count else NodeState(name=name)) for name, count in counts.items()], pods, "binpack"
    )


def contents(found: LiveCluster) -> dict[str, Any]:
    """What decides about further pods."""
    return {
        name: (found.index.used(name), found.free(name), sorted(pod.uid for pod in found.there(name))) for name in found.nodes
    }
