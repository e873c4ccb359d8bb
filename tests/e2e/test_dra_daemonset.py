"""Node mode dra as users install it: the chart's DaemonSet, DeviceClass, rights and policy."""

from collections.abc import Iterator

import pytest

from . import daemonset
from .agent import Agent
from .cluster import Cluster
from .daemonset import Installed
from .dra import DRIVER, TEMPLATES, DraNode, claiming, request, template
from .node import gpu_nodes, shown
from .places import CDI_SPECS, KUBELET_ROOT
from .processes import wait_until

REGISTRY = KUBELET_ROOT / "plugins_registry"
SETTINGS = {
    "node": {"mode": "dra"},
    "kubelet": {"plugins_dir": str(KUBELET_ROOT / "plugins"), "plugins_registry_dir": str(REGISTRY)},
    "enforcement": {"cdi_dir": str(CDI_SPECS)},
}


@pytest.fixture(scope="module")
def node(cluster: Cluster, running_agent: Agent) -> Iterator[DraNode]:
    with daemonset.installed(cluster, running_agent, SETTINGS, wait=False) as agent:
        made = DraNode(cluster, agent)
        wait_until("the node's ResourceSlice", lambda: bool(made.slices()), 120)
        yield made
        cluster.delete_all()
        cluster.api.request("DELETE", TEMPLATES)


def test_a_share_is_prepared_by_the_daemonset(node: DraNode) -> None:
    (found,) = node.slices()
    assert len(found["spec"]["devices"]) == 8
    node.make(template("share", request("gpu", 30, "5Gi")))
    node.run([claiming("share", "share")])
    environment, devices = shown(node, "share")
    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert len(gpu_nodes(devices)) == 1


def test_in_an_update_with_a_surge_both_agents_are_registered_and_the_slice_stays(node: DraNode) -> None:
    agent, before = node.agent, node.agent.ledger()
    assert isinstance(agent, Installed)

    def sockets() -> list[str]:
        return sorted(path.name for path in REGISTRY.glob(f"{DRIVER}-*reg.sock"))

    first, (published,) = sockets(), node.slices()
    assert len(first) == 1
    agent.surge(SETTINGS)
    wait_until("two registrations", lambda: len(sockets()) == 2, 120, every=0.01)
    node.cluster.create([claiming("in-between", "share")])
    slices = set[str]()

    def rolled() -> bool:
        slices.update(each["metadata"]["uid"] if each else "none" for each in node.slices() or [{}])
        pod = agent.only()
        return pod is not None and len(sockets()) == 1

    wait_until("the second agent alone", rolled, 120)
    assert sockets() != first
    node.wait_running(["in-between"])
    assert slices == {published["metadata"]["uid"]}
    held = agent.ledger()
    assert [each for each in held if each in before] == before
    assert len(held) == len(before) + 1
    node.delete(["share", "in-between"])
    wait_until("an empty ledger", lambda: not agent.ledger(), every=0.3)
