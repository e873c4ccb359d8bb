"""MIG devices on the real kubelet: one for each pod, found while the agent runs, kept over its restart."""

from collections.abc import Iterator

import pytest

from gpumgr.placement.devices import MigInstance
from gpumgr.sim.control import SimControl

from .agent import Agent
from .api import phase
from .cluster import Cluster
from .manifests import SHOW, Json, gpu_pod
from .node import Node, cleared, shown
from .places import AGENT_STATE
from .processes import wait_until

RESOURCE = "nvidia.com/mig-1g.10gb"
LARGE = "nvidia.com/mig-2g.20gb"
GPU = 7


def mig_uuid(number: int) -> str:
    return f"MIG-{number:08d}-1111-2222-3333-444444444444"


@pytest.fixture
def node(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    control = SimControl(AGENT_STATE / "sim" / "control.txt")
    instances = {
        number: MigInstance(
            uuid=mig_uuid(number), profile=profile, gpu_instance=number, compute_instance=0, memory_bytes=int(profile[3:5]) << 30
        )
        for number, profile in enumerate(("1g.10gb", "1g.10gb", "2g.20gb"))
    }
    with cleared(cluster, running_agent) as node:
        with running_agent.configured({"node": {"mig_strategy": "mixed"}}):
            control.set_mig_instances(GPU, instances)
            control.set_mig(GPU, enabled=True)
            wait_until("MIG devices offered", lambda: node.resources.allocatable(RESOURCE) == {RESOURCE: 2})
            wait_until("the other profile", lambda: node.resources.allocatable(LARGE) == {LARGE: 1})
            yield node
            cluster.delete_all()
            running_agent.wait_empty()
            control.set_mig(GPU, enabled=False)
            control.set_mig_instances(GPU, {})
        node.wait_offered(running_agent.offer)


def mig_pod(name: str, *resources: str) -> Json:
    body = gpu_pod(name, 1, bound=False, command=SHOW)
    body["spec"]["containers"][0]["resources"] = {"limits": dict.fromkeys(resources or (RESOURCE,), "1")}
    return body


def held(node: Node) -> dict[str, set[str]]:
    """Pod -> its MIG devices, as the kubelet lists them."""
    return {held.place[1]: set(held.ids) for held in node.resources.held(RESOURCE)}


@pytest.mark.hami_bug("B25: static MIG needs a pod of HAMi's scheduler, and its resources overwrite one annotation")
def test_each_pod_gets_a_mig_device_of_its_own_and_keeps_it_over_a_restart_of_the_agent(node: Node) -> None:
    node.run([mig_pod("first")])
    node.run([mig_pod("second")])
    before = held(node)
    assert sorted(map(sorted, before.values())) == [[mig_uuid(0)], [mig_uuid(1)]]
    for name, ids in before.items():
        assert shown(node, name)[0]["NVIDIA_VISIBLE_DEVICES"] == ",".join(ids)
    ledger = node.agent.ledger()
    assert {each.place[1] for each in ledger} == {"first", "second"}
    node.agent.kill()
    node.agent.start()
    wait_until("MIG devices offered", lambda: node.resources.allocatable(RESOURCE) == {RESOURCE: 2})
    assert node.agent.ledger() == ledger
    node.cluster.create([mig_pod("third")])

    def refused() -> bool:
        conditions = node.cluster.pods.all().get("third", {}).get("status", {}).get("conditions", ())
        return any(RESOURCE in each.get("message", "") for each in conditions)

    wait_until("the scheduler's reason", refused)
    assert phase(node.cluster.pods.all()["third"]) == "Pending"
    node.delete(["first"])
    node.wait_running(["third"])
    assert held(node)["third"] == before["first"]
    assert held(node)["second"] == before["second"]
    node.delete(["second"])
    # The kubelet would give it the environment of one of the two.
    node.cluster.create([mig_pod("both", RESOURCE, LARGE)])
    reason = "requests MIG devices of several profiles, and would see those of one; request one profile in each container"
    wait_until("the reason", lambda: any(reason in each["message"] for each in node.events("both", "GpuRefused")))
    assert phase(node.cluster.pods.all()["both"]) == "Pending"
    node.delete(["both"])
    node.run([mig_pod("large", LARGE)])
