"""Node mode dra on the real kubelet, scheduler and controllers: claims are prepared, limited, freed, and survive restarts."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest

from .agent import Agent
from .api import ApiError
from .cluster import Cluster
from .manifests import SHOW, Json, container, pod
from .node import Node
from .places import CDI_SPECS, KUBELET_ROOT, NODE
from .processes import wait_until
from .test_pods import gpu_nodes, shown

DRIVER = "gpu.gpumgr.io"
RESOURCES = "/apis/resource.k8s.io/v1"
CLASS: Json = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": DRIVER},
    "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
}
RIGHTS: Json = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "gpumgr-dra"},
    "rules": [
        {
            "apiGroups": ["resource.k8s.io"],
            "resources": ["resourceslices"],
            "verbs": ["get", "list", "watch", "create", "update", "delete"],
        },
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
    ],
}
BINDING: Json = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "gpumgr-dra"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gpumgr-dra"},
    "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "gpumgr"}],
}
OBJECTS = (
    (f"{RESOURCES}/deviceclasses", CLASS),
    ("/apis/rbac.authorization.k8s.io/v1/clusterroles", RIGHTS),
    ("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", BINDING),
)


def template(name: str, *requests: Json) -> Json:
    spec: Json = {"devices": {"requests": list(requests)}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": spec},
    }


def request(name: str, cores: int = 0, memory: str = "", count: int = 1) -> Json:
    """A share, or `count` whole GPUs."""
    wanted: Json = {"deviceClassName": DRIVER, "count": count}
    if cores:
        wanted["capacity"] = {"requests": {"cores": str(cores), "memory": memory}}
    return {"name": name, "exactly": wanted}


def claiming(name: str, shape: str, *containers: Json) -> Json:
    """A pod with one claim "gpu" of a template; containers without claims of their own use its request "gpu"."""
    every = list(containers) or [container(command=SHOW)]
    for each in every:
        each["resources"].setdefault("claims", [{"name": "gpu", "request": "gpu"}])
    return pod(name, every, bound=False, resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": shape}])


class DraNode(Node):
    def make(self, *templates: Json) -> None:
        for each in templates:
            with suppress(ApiError):
                self.cluster.api.request("POST", f"{RESOURCES}/namespaces/default/resourceclaimtemplates", each)

    def slices(self) -> Sequence[Json]:
        items: Sequence[Json] = self.cluster.api.request("GET", f"{RESOURCES}/resourceslices")["items"]
        return [each for each in items if each["spec"]["driver"] == DRIVER]

    def claim_of(self, name: str) -> Json:
        (status,) = self.cluster.pods.all()[name]["status"]["resourceClaimStatuses"]
        path = f"{RESOURCES}/namespaces/default/resourceclaims/{status['resourceClaimName']}"
        return self.cluster.api.request("GET", path)


@pytest.fixture(scope="module")
def dra_node(cluster: Cluster, running_agent: Agent) -> Iterator[DraNode]:
    for path, body in OBJECTS:
        cluster.api.request("POST", path, body)
    cluster.start_controllers()
    running_agent.stop()
    running_agent.configure(
        {
            "node": {"name": NODE, "mode": "dra"},
            "kubelet": {
                "plugins_dir": str(KUBELET_ROOT / "plugins"),
                "plugins_registry_dir": str(KUBELET_ROOT / "plugins_registry"),
            },
            "enforcement": {"backend": "none", "cdi_dir": str(CDI_SPECS), "orphan_grace_seconds": 1},
        }
    )
    node = DraNode(cluster, running_agent)
    try:
        running_agent.start(wait=False)
        wait_until("the node's ResourceSlice", lambda: bool(node.slices()))
        yield node
    finally:
        cluster.delete_all()
        running_agent.stop()
        cluster.stop_controllers()
        running_agent.configure({})
        for path, body in OBJECTS:
            cluster.api.request("DELETE", f"{path}/{body['metadata']['name']}")


@pytest.fixture
def node(dra_node: DraNode) -> DraNode:
    dra_node.cluster.delete_all()
    dra_node.agent.wait_empty()
    return dra_node


def test_the_slice_has_every_gpu_with_its_capacity(node: DraNode) -> None:
    (found,) = node.slices()
    assert found["spec"]["nodeName"] == NODE
    assert len(found["spec"]["devices"]) == 8
    for device in found["spec"]["devices"]:
        assert device["allowMultipleAllocations"] is True
        assert device["capacity"]["cores"]["value"] == "100"


def test_shares_are_packed_and_see_one_gpu(node: DraNode) -> None:
    node.make(template("share", request("gpu", 30, "5Gi")))
    names = ["a", "b", "c"]
    node.run([claiming(name, "share") for name in names])
    holdings = [node.ledger_of(name)[0] for name in names]
    assert len({holding.gpus for holding in holdings}) == 1
    environment, devices = shown(node, "a")
    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert len(gpu_nodes(devices)) == 1
    node.delete(names)
    node.agent.wait_empty()
