"""Node mode dra as users install it: the chart's DaemonSet, DeviceClass, rights and policy."""

from collections.abc import Iterator

import pytest

from . import daemonset
from .agent import Agent
from .cluster import Cluster
from .daemonset import Installed
from .node import cleared
from .places import CDI_SPECS, KUBELET_ROOT
from .processes import wait_until
from .test_dra import DraNode, claiming, request, template
from .test_pods import gpu_nodes, shown

RESOURCES = "/apis/resource.k8s.io/v1"


@pytest.fixture(scope="module")
def node(cluster: Cluster, running_agent: Agent) -> Iterator[DraNode]:
    changes = {
        "node": {"mode": "dra"},
        "kubelet": {
            "plugins_dir": str(KUBELET_ROOT / "plugins"),
            "plugins_registry_dir": str(KUBELET_ROOT / "plugins_registry"),
        },
        "enforcement": {"cdi_dir": str(CDI_SPECS)},
    }
    with cleared(cluster, running_agent):
        """An agent of mode dra registers nothing while pods of the device plugin hold GPUs."""
    with daemonset.installed(cluster, running_agent, changes, wait=False) as agent:
        made = DraNode(cluster, agent)
        wait_until("the node's ResourceSlice", lambda: bool(made.slices()), 120)
        yield made
        cluster.delete_all()
        cluster.api.request("DELETE", f"{RESOURCES}/namespaces/default/resourceclaimtemplates")


def test_a_share_is_prepared_by_the_daemonset(node: DraNode) -> None:
    (found,) = node.slices()
    assert len(found["spec"]["devices"]) == 8
    node.make(template("share", request("gpu", 30, "5Gi")))
    node.run([claiming("share", "share")])
    environment, devices = shown(node, "share")
    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert len(gpu_nodes(devices)) == 1


def test_an_update_of_the_daemonset_keeps_the_claims(node: DraNode) -> None:
    before = node.agent.ledger()
    assert before
    assert isinstance(node.agent, Installed)
    node.agent.start(wait=False, podAnnotations={"changed": "1"})
    node.agent.wait_rolled()
    wait_until("the node's ResourceSlice", lambda: bool(node.slices()), 120)
    assert node.agent.ledger() == before
    node.run([claiming("later", "share")])
    node.delete(["share", "later"])
    wait_until("an empty ledger", lambda: not node.agent.ledger(), every=0.3)
