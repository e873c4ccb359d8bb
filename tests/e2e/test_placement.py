"""Pods that a scheduler bound with the annotation gpumgr.io/placement: the kubelet and the agent follow it."""

import json

from .api import PODS
from .manifests import gpu_pod
from .node import Node, inventory, name_of
from .places import NODE
from .processes import wait_until


def bind(node: Node, name: str, uuid: str, cores: int, blocks: int) -> None:
    """Creates a pod that no scheduler takes, and binds it as gpumgr's scheduler does: one Binding with annotations."""
    pod = gpu_pod(name, cores, blocks)
    pod["spec"].pop("nodeName", None)
    pod["spec"]["schedulerName"] = "the-test"
    node.cluster.create([pod])
    placement = {"version": 1, "node": NODE, "containers": {"main": [[uuid, cores, blocks * 256]]}}
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": {"gpumgr.io/placement": json.dumps(placement)}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
    }
    node.cluster.api.request("POST", f"{PODS}/{name}/binding", binding)


def test_a_bound_pod_gets_the_gpu_that_its_placement_names(node: Node) -> None:
    """Best fit would choose the GPU that is in use. Only the pod that the agent placed is in the inventory."""
    node.run([gpu_pod("other", 30, 16)])
    (other,) = node.ledger_of("other")
    uid = node.cluster.pods.all()["other"]["metadata"]["uid"]
    uuids = [gpu["uuid"] for gpu in inventory(node)["gpus"]]
    position = [name_of(each) for each in uuids].index(other.gpus[0])
    # An inventory may come between the calls for cores and for memory.
    held = {uid: [[position, 30, 16 * 256]]}
    wait_until("the inventory with the other pod", lambda: inventory(node).get("other") == held)
    before = inventory(node)
    free = [uuid for uuid in uuids if name_of(uuid) not in other.gpus]
    bind(node, "named", free[-1], 20, 16)
    node.wait_running(["named"])
    node.check()
    assert [holding.gpus for holding in node.ledger_of("named")] == [(name_of(free[-1]),)]
    bind(node, "full", free[-1], 90, 16)
    node.wait_phase("full", "Failed")
    node.event("full", "GpuRefused", "no GPU has 90 cores")
    assert node.ledger_of("full") == []
    assert inventory(node) == before
