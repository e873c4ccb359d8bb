"""Simulated pods as documents of the API server."""

from gpumgr.sim.apiserver_written import Document
from gpumgr.sim.kubelet_pods import PodStatus, SimContainer, SimPod


def document_of(pod: SimPod, status: PodStatus, node: str, created: str, *, controlled: bool) -> Document:
    said = {"phase": status.phase, "reason": status.reason, "message": status.message}
    owners = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": pod.name, "uid": f"rs-{pod.uid}", "controller": True}]
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
            "creationTimestamp": created,
            **({"ownerReferences": owners} if controlled else {}),
        },
        "spec": {
            "nodeName": node,
            "initContainers": [_container(each) for each in pod.containers if each.kind != "app"],
            "containers": [_container(each) for each in pod.containers if each.kind == "app"],
        },
        "status": {key: value for key, value in said.items() if value is not None},
    }


def _container(container: SimContainer) -> Document:
    amounts = {resource: str(count) for resource, count in container.limits.items()}
    document: Document = {"name": container.name, "resources": {"limits": amounts, "requests": amounts}}
    if container.kind == "sidecar":
        document["restartPolicy"] = "Always"
    return document
