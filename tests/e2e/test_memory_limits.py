"""The driver's data on processes: containers over their limit, unattributed processes, evictions; and a node without enforcement."""

import re

from gpumgr.sim.control import SimProcess

from .agent import Agent
from .cluster import Cluster
from .manifests import SLEEP, gpu_pod
from .node import Node
from .processes import wait_until
from .tenants import BLOCK, control, gpu_index, limited, pids, tenant


def test_without_enforcement_the_pods_event_reports_it(node: Node) -> None:
    """The event of its placement, so that saying it costs the API server nothing more."""
    node.run([gpu_pod("free", 30, 16)])
    said = "GpuLimitNotEnforced: nothing on this node keeps container main within its share (enforcement backend none)"
    node.event("free", "GpuPlaced", re.escape(said))
    uid = node.cluster.pods.all()["free"]["metadata"]["uid"]
    reasons = [each["reason"] for each in node.cluster.api.events("free", uid)]
    assert [reason for reason in reasons if reason.startswith("Gpu")] == ["GpuPlaced"]
    said = "GPU 0-7: memory none, cores none"
    wait_until("the node's word", lambda: node.cluster.node()["metadata"]["annotations"].get("gpumgr.io/enforcement") == said)


def test_memory_over_the_limit_is_reported_and_its_pod_evicted_if_configured(cluster: Cluster, running_agent: Agent) -> None:
    changes = {"enforcement": {"over_limit_samples": 2, "over_limit_slack_mebibytes": 0, "evict": True}}
    with limited(cluster, running_agent, changes) as node:
        node.run([tenant("greedy", SLEEP, 30, 16), tenant("modest", SLEEP, 30, 16)])
        gpu = gpu_index(node, "greedy")
        greedy, modest = pids(node, "greedy")[-1], pids(node, "modest")[-1]
        uid = cluster.pods.all()["greedy"]["metadata"]["uid"]
        others = [
            SimProcess(pid=modest, memory_bytes=2 * BLOCK, sm_percent=10),
            SimProcess(pid=1, memory_bytes=BLOCK, sm_percent=0),
        ]
        try:
            control().set_processes(gpu, [SimProcess(pid=greedy, memory_bytes=15 * BLOCK, sm_percent=40), *others])
            wait_until("the page of metrics with it", lambda: used(node) == {"greedy": 15 * BLOCK, "modest": 2 * BLOCK})
            wait_until("the unattributed process in the log", lambda: 1 in unattributed(node))
            control().set_processes(gpu, [SimProcess(pid=greedy, memory_bytes=20 * BLOCK, sm_percent=40), *others])
            cluster.wait_gone(["greedy"])
            wait_until("its event", lambda: "MiB" in over_limit(node, uid))
            assert not node.events("modest", "GpuMemoryOverLimit")
        finally:
            control().clear()


def over_limit(node: Node, uid: str) -> str:
    """The message of the event of the pod that was evicted."""
    found = node.cluster.api.events("greedy", uid)
    return "".join(each["message"] for each in found if each["reason"] == "GpuMemoryOverLimit")


def used(node: Node) -> dict[str | None, float]:
    """Pod -> bytes, by the page of metrics, which is drawn once in a while."""
    return {
        dict(labels).get("pod"): value
        for (name, labels), value in node.agent.metrics().items()
        if name == "gpumgr_container_memory_used_bytes"
    }


def unattributed(node: Node) -> set[int]:
    """The process ids that the log calls so."""
    return {int(line["pid"]) for line in node.agent.log() if line["event"] == "gpu_process_unattributed"}
