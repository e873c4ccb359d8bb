"""The whole path: the extender chooses node and GPU, kube-scheduler binds, and kubelet and agent follow on the real node, which has three
nodes of the API beside it."""

from collections.abc import Iterator

import pytest

from .agent import Agent
from .cluster import Cluster
from .manifests import Json, gpu_pod
from .node import Node, cleared, inventory, name_of
from .places import NODE
from .processes import free_ports, wait_until
from .test_scheduler import (
    COUNTS,
    NODES,
    SCHEDULER,
    Scheduled,
    api_node,
    grant_rights,
    start_extender,
    start_kube_scheduler,
    uuid,
    withdraw_rights,
)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    with cleared(cluster, running_agent) as node:
        credentials = grant_rights(cluster)
        (port,) = free_ports(1)
        for name, count in zip(NODES, COUNTS, strict=True):
            cluster.api.request("POST", "/api/v1/nodes", api_node(name, count))
        start_extender(cluster, credentials, port)
        start_kube_scheduler(cluster, {"urlPrefix": f"http://127.0.0.1:{port}/scheduler"})
        try:
            # A kube-scheduler that begins later than pods are created takes them in the order of their names.
            node.run([share("first", 10, 10, nodeSelector={"kubernetes.io/hostname": NODE})])
            yield node
        finally:
            cluster.processes.stop("gpu-kube-scheduler")
            cluster.processes.stop("gpumgr-scheduler")
            for name in NODES:
                cluster.api.request("DELETE", f"/api/v1/nodes/{name}")
            withdraw_rights(cluster)
            node.clear()


@pytest.fixture
def node(whole: Node) -> Node:
    whole.clear()
    whole.offer_all()
    # GPUs of ended pods are free for the scheduler once the inventory does not have them, nor a GPU that is out of service.
    wait_until("an inventory without pods", lambda: not inventory(whole).get("other") and all_offered(inventory(whole)))
    return whole


def all_offered(found: Json) -> bool:
    return not any(gpu.get("cordoned") or gpu.get("healthy") is False for gpu in found["gpus"])


def share(name: str, cores: int, memory: int, **spec: object) -> Json:
    made = gpu_pod(name, cores, memory, bound=False)
    made["spec"] |= {"schedulerName": SCHEDULER, **spec}
    return made


def chosen(node: Node, name: str) -> str:
    """The GPU that the scheduler chose for a pod."""
    _, ((gpu,),) = Scheduled(node.cluster).placed(name)
    return gpu


def test_twenty_pods_at_once_that_best_fit_packs_all_run(node: Node) -> None:
    """They fill the eight GPUs: four have 60 + 40 cores, four have 60 + 20 + 20. Any other choice leaves a pod without room."""
    cores = [60] * 8 + [40] * 4 + [20] * 8
    pods = [share(f"p{number}", each, each, nodeSelector={"kubernetes.io/hostname": NODE}) for number, each in enumerate(cores)]
    running = node.run(pods)
    assert len(running) == 20
    node.check()
    gpus: dict[str, list[int]] = {}
    for number, each in enumerate(cores):
        (holding,) = node.ledger_of(f"p{number}")
        assert holding.gpus == (name_of(chosen(node, f"p{number}")),), "the agent follows the scheduler"
        gpus.setdefault(holding.gpus[0], []).append(each)
    assert sorted(sorted(each) for each in gpus.values()) == [[20, 20, 60]] * 4 + [[40, 60]] * 4


def test_pods_go_to_the_node_and_the_gpu_that_the_scheduler_names(node: Node) -> None:
    """The one of four nodes with the GPU that the pod asks for; best fit on the node alone would choose another GPU."""
    named = inventory(node)["gpus"][5]["uuid"]
    first = share("beside", 30, 16, nodeSelector={"kubernetes.io/hostname": NODE})
    node.run([first])
    made = share("named", 30, 16)
    made["metadata"]["annotations"] = {"gpumgr.io/use-gpu-uuid": named}
    elsewhere = share("elsewhere", 30, 16)
    elsewhere["metadata"]["annotations"] = {"gpumgr.io/use-gpu-uuid": uuid("api-b", 3)}
    node.cluster.create([elsewhere])
    node.run([made])
    assert [each.gpus for each in node.ledger_of("named")] == [(name_of(named),)]
    assert chosen(node, "elsewhere") == uuid("api-b", 3)
    node.delete(["named", "beside"])
    node.cluster.delete(["elsewhere"], grace=0)
    node.check()
