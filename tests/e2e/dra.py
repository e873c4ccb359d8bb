"""A node in mode dra, claims and their pods, and the policies for vcuda pods."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import yaml

from tools import chart

from .agent import Agent
from .api import PODS, ApiError
from .cluster import Cluster
from .manifests import SHOW, Json, binding, container, gpu_pod, pod
from .node import Node, cleared
from .places import KUBELET_ROOT, NODE, PROJECT
from .processes import wait_until
from .test_claims import start_controller

DRIVER = "gpu.gpumgr.io"
RESOURCES = "/apis/resource.k8s.io/v1"
CLAIMS = f"{RESOURCES}/namespaces/default/resourceclaims"
TEMPLATES = f"{RESOURCES}/namespaces/default/resourceclaimtemplates"
CLASSES = f"{RESOURCES}/deviceclasses"


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


def using(body: Json, **claims: str) -> Json:
    """The pod with these ResourceClaims (name in the pod -> the claim's own) in place of those of a template."""
    body["spec"]["resourceClaims"] = [{"name": name, "resourceClaimName": claim} for name, claim in claims.items()]
    return body


class DraNode(Node):
    def make(self, *templates: Json) -> None:
        for each in templates:
            self.cluster.api.request("POST", TEMPLATES, each)

    def claim(self, name: str, *requests: Json) -> Json:
        """A ResourceClaim of its own, which no pod has yet."""
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": template("any", *requests)["spec"]["spec"],
        }
        return self.cluster.api.request("POST", CLAIMS, body)

    def forge(self, name: str, allocation: Json) -> None:
        """A claim and a pod of this name, allocated and bound by hand, past kube-scheduler."""
        made = self.claim(name, request("gpu", 10, "1Gi"))
        body = using(claiming(name, "unused"), gpu=name)
        body["spec"]["schedulerName"] = "none"
        pod = self.cluster.api.request("POST", PODS, body)
        reserved = [{"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]}]
        made["status"] = {"allocation": allocation, "reservedFor": reserved}
        self.cluster.api.request("PUT", f"{CLAIMS}/{name}/status", made)
        self.cluster.api.request("POST", f"{PODS}/{name}/binding", binding(name, {}, node=NODE))

    def refused(self, name: str, text: str) -> None:
        """Waits until an event of the pod has this text, and removes the pod with its claim of the same name."""

        def there() -> bool:
            return any(text in each["message"] for each in self.events(name, "FailedPrepareDynamicResources"))

        wait_until(f"{text!r} about {name}", there)
        self.delete([name])
        self.cluster.api.request("DELETE", f"{CLAIMS}/{name}")

    def slices(self) -> Sequence[Json]:
        items: Sequence[Json] = self.cluster.api.request("GET", f"{RESOURCES}/resourceslices")["items"]
        return [each for each in items if each["spec"]["driver"] == DRIVER]

    def delete_claims(self) -> None:
        """Deletes what a failed test has left: no pod uses claims now. Those of ended pods go at the same time by themselves."""
        self.cluster.api.request("DELETE", CLAIMS)
        wait_until("no claims", lambda: not self.cluster.api.request("GET", CLAIMS)["items"])

    def claim_of(self, name: str) -> Json:
        (status,) = self.cluster.pods.all()[name]["status"]["resourceClaimStatuses"]
        return self.cluster.api.request("GET", f"{CLAIMS}/{status['resourceClaimName']}")


@contextmanager
def in_mode_dra(cluster: Cluster, agent: Agent, changes: Mapping[str, Mapping[str, Any]]) -> Iterator[DraNode]:
    """The agent in mode dra, with further settings; an ordinary one again afterwards."""
    with cleared(cluster, agent):
        pass  # an agent of mode dra registers nothing while pods of the device plugin hold GPUs
    cluster.api.request("POST", CLASSES, yaml.safe_load((PROJECT / "config" / "dra" / "device-class.yaml").read_text()))
    cluster.start_controllers()
    agent.stop()
    agent.configure(
        {
            **changes,
            "node": {"name": NODE, "mode": "dra", **changes.get("node", {})},
            "kubelet": {
                "plugins_dir": str(KUBELET_ROOT / "plugins"),
                "plugins_registry_dir": str(KUBELET_ROOT / "plugins_registry"),
            },
            "enforcement": {"orphan_grace_seconds": 1, **changes.get("enforcement", {})},
        }
    )
    node = DraNode(cluster, agent)
    try:
        agent.start(wait=False)
        wait_until("the node's ResourceSlice", lambda: bool(node.slices()))
        yield node
    finally:
        agent.revive()  # without it no claim ends, and so no pod
        cluster.delete_all()
        cluster.api.request("DELETE", TEMPLATES)
        agent.stop()
        cluster.stop_controllers()
        agent.configure({})
        cluster.api.request("DELETE", f"{CLASSES}/{DRIVER}")


@contextmanager
def vcuda_by_claims(cluster: Cluster) -> Iterator[None]:
    """The chart's policies and controller make claims of the limits of vcuda pods in the namespace."""
    text = chart.render({"claims": {"enabled": True}}, "--kube-version=1.37.2")
    objects = [each for each in yaml.safe_load_all(text) if each and each["metadata"]["name"].startswith("gpumgr-claims")]
    objects = [each for each in objects if each["kind"] != "Deployment"]

    def rewritten() -> bool:
        """The API server applies new policies one after another: for a moment the pod may be refused."""
        return "resourceClaims" in stored()

    def stored() -> Json:
        """The spec that a vcuda pod would get; none if it is refused."""
        try:
            found = cluster.api.request("POST", f"{PODS}?dryRun=All", gpu_pod("any", 30, 20, bound=False))
        except ApiError:
            return {}
        return dict(found["spec"])

    try:
        with cluster.applied(objects, "--wait=false"):
            try:
                cluster.kubectl("label", "namespace", "default", "gpumgr.io/mode=dra")
                start_controller(cluster)
                wait_until("the policies", rewritten, every=0.2)
                yield
            finally:
                cluster.delete_all()
                cluster.processes.stop("claims")
                cluster.kubectl("label", "namespace", "default", "gpumgr.io/mode-")
    finally:
        # Their effect outlives them by a moment, in which the next test's pods would be rewritten or refused.
        wait_until("no policy", lambda: bool(made := stored()) and "resourceClaims" not in made, every=0.2)
