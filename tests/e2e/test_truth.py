"""What the driver says of containers' processes: offenders, strangers, evictions; and a node on which nothing enforces."""

from gpumgr.sim.control import SimProcess

from .agent import Agent
from .cluster import Cluster
from .manifests import SLEEP, gpu_pod
from .node import Node
from .tenants import BLOCK, control, gpu_index, limited, pids, tenant


def test_nothing_enforces_and_the_pods_event_says_so(node: Node) -> None:
    """The event of its placement, so that saying it costs the API server nothing more."""
    node.run([gpu_pod("free", 30, 16)])
    said = "GpuLimitNotEnforced: nothing on this node keeps container main within its share (enforcement backend none)"
    assert said in node.event("free", "GpuPlaced")
    uid = node.cluster.pods.all()["free"]["metadata"]["uid"]
    reasons = [each["reason"] for each in node.cluster.api.events("free", uid)]
    assert [reason for reason in reasons if reason.startswith("Gpu")] == ["GpuPlaced"]
    assert node.cluster.node()["metadata"]["annotations"]["gpumgr.io/enforcement"] == "none"


def test_a_container_over_its_memory_is_told_and_strangers_are_seen(cluster: Cluster, running_agent: Agent) -> None:
    changes = {"enforcement": {"over_limit_samples": 2, "over_limit_slack_mebibytes": 0}}
    with limited(cluster, running_agent, changes) as node:
        node.run([tenant("greedy", SLEEP, 30, 16), tenant("modest", SLEEP, 30, 16)])
        gpu = gpu_index(node, "greedy")
        greedy, modest = pids(node, "greedy")[-1], pids(node, "modest")[-1]
        control().set_processes(
            gpu,
            [
                SimProcess(pid=greedy, memory_bytes=20 * BLOCK, sm_percent=40),
                SimProcess(pid=modest, memory_bytes=2 * BLOCK, sm_percent=10),
                SimProcess(pid=1, memory_bytes=BLOCK, sm_percent=0),
            ],
        )
        try:
            assert "MiB" in node.event("greedy", "GpuMemoryOverLimit", 20)
            used = {
                dict(labels).get("pod"): value
                for (name, labels), value in node.agent.metrics().items()
                if name == "gpumgr_container_memory_used_bytes"
            }
            assert used == {"greedy": 20 * BLOCK, "modest": 2 * BLOCK}
            assert any(line["event"] == "gpu_stranger" and line["pid"] == 1 for line in node.agent.log())
            assert not node.events("modest", "GpuMemoryOverLimit")
        finally:
            control().clear()


def test_an_offender_is_evicted_if_the_operator_chose_so(cluster: Cluster, running_agent: Agent) -> None:
    changes = {"enforcement": {"over_limit_samples": 2, "over_limit_slack_mebibytes": 0, "evict": True}}
    with limited(cluster, running_agent, changes) as node:
        node.run([tenant("greedy", SLEEP)])
        control().set_processes(gpu_index(node, "greedy"), [SimProcess(pid=pids(node, "greedy")[-1], memory_bytes=20 * BLOCK)])
        try:
            cluster.wait_gone(["greedy"], 30)
        finally:
            control().clear()
