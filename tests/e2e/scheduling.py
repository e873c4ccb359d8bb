"""The extender below a real kube-scheduler: their processes and rights, nodes that exist in the API alone, and the pods that they place."""

import json
import socket
import ssl
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml

from gpumgr.kube.cluster_annotations import (
    INVENTORY_ANNOTATION,
    PLACEMENT_ANNOTATION,
    Inventory,
    InventoryGpu,
    decode_placement,
    encode,
)
from gpumgr.placement.devices import score_matrix
from tests.topologies import topology_from_matrix

from . import manifests
from .api import PODS
from .cluster import Cluster
from .manifests import Json, container, pod
from .places import PROJECT, STATE
from .processes import free_ports, wait_until

CONFIG = PROJECT / "config" / "scheduler"
SCHEDULER = "gpumgr-scheduler"
PAGE_TOKEN = STATE / "page-token"
SYSTEM_PODS = "/api/v1/namespaces/kube-system/pods"
#: 64 blocks.
GPU_MEBIBYTES = 16384
#: Nodes of the API, and how many GPUs they have.
COUNTS = {"api-a": 2, "api-b": 4, "api-c": 4}
NODES = tuple(COUNTS)
MODELS = {"api-a": "Tesla T4", "api-b": "NVIDIA A100-SXM4-80GB", "api-c": "NVIDIA H100 80GB HBM3"}


def uuid(node: str, gpu: int) -> str:
    return f"GPU-{node}-{gpu}"


def inventory(node: str, count: int, model: str, linked: Callable[[int, int], bool], numa: int) -> str:
    """GPUs that are linked are joined by NVLinks; each NUMA node has `numa` of them."""
    rows = [["X" if a == b else "NV4" if linked(a, b) else "SYS" for b in range(count)] for a in range(count)]
    gpus = tuple(InventoryGpu(uuid=uuid(node, n), model=model, memory=GPU_MEBIBYTES, numa=n // numa) for n in range(count))
    return encode(Inventory(topology_manager="none", gpus=gpus, levels=score_matrix(topology_from_matrix(rows))))


def api_node(name: str, count: int, described: str | None = None) -> Json:
    """`described`: its inventory; by default GPUs 0 and 2, 1 and 3 are linked; 0 and 1, 2 and 3 are on one NUMA node."""
    described = described or inventory(name, count, MODELS[name], lambda a, b: abs(a - b) == 2, 2)
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "250", manifests.CORE: str(100 * count), manifests.MEMORY: str(64 * count)}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "api-only": "true"},
            "annotations": {INVENTORY_ANNOTATION: described},
        },
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
    }


def scheduled_pod(name: str, *containers: tuple[int, int], annotations: Mapping[str, str] | None = None, **spec: Any) -> Json:
    """A pod for the API-only nodes, by default of the second kube-scheduler; `containers`: cores and blocks."""
    spec = {"schedulerName": SCHEDULER, "nodeSelector": {"api-only": "true"}, **spec}
    made = pod(name, [container(f"c{place}", *each) for place, each in enumerate(containers)], bound=False, **spec)
    made["metadata"]["annotations"] = dict(annotations or {})
    return made


def filter_status(port: int, tls: ssl.SSLContext | None = None) -> int | None:
    """The status of an answer to filter: 200 of a leader, 503 of another replica, None of a process that does not listen."""
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        tls.wrap_socket(plain, server_hostname="127.0.0.1") if tls else nullcontext(plain) as connection,
    ):
        connection.sendall(b"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        if answer := connection.recv(4096):
            return int(answer.split()[1])
    return None


class Scheduled:
    """Pods of the second kube-scheduler; they may land on the API-only nodes. `page`: the port of the extender's pages, if it has one."""

    def __init__(self, cluster: Cluster, page: int = 0) -> None:
        self._cluster, self.page = cluster, page
        self._names: list[str] = []

    def create(self, name: str, *containers: tuple[int, int], **spec: Any) -> None:
        self._names.append(name)
        self._cluster.create([scheduled_pod(name, *containers, **spec)])

    def place(self, name: str, *containers: tuple[int, int], **spec: Any) -> tuple[str, list[list[str]]]:
        """Creates a pod and waits until it is bound: its node, and the GPUs of each container."""
        self.create(name, *containers, **spec)
        return self.placed(name)

    def placed(self, name: str) -> tuple[str, list[list[str]]]:
        wait_until(f"pod {name} bound", lambda: self.node_of(name) is not None)
        found = self._cluster.pods.all()[name]
        placement = decode_placement(found["metadata"]["annotations"][PLACEMENT_ANNOTATION])
        assert placement.node == found["spec"]["nodeName"]
        return placement.node, [[share.gpu for share in shares] for _, shares in sorted(placement.containers.items())]

    def node_of(self, name: str) -> str | None:
        node: str | None = self._cluster.pods.all().get(name, {}).get("spec", {}).get("nodeName")
        return node

    def conditions(self, name: str) -> list[Json]:
        """What kube-scheduler has written of the pod: that it is bound, or why not."""
        found = self._cluster.pods.all().get(name, {}).get("status", {}).get("conditions", ())
        return [each for each in found if each["type"] == "PodScheduled"]

    def annotations(self, name: str) -> Mapping[str, str]:
        found: Mapping[str, str] = self._cluster.pods.all()[name]["metadata"]["annotations"]
        return found

    def rejection(self, name: str) -> str:
        """The text of kube-scheduler's event, once it and the pod's condition are there: they are written one after the other."""
        uid = self._cluster.api.request("GET", f"{PODS}/{name}")["metadata"]["uid"]

        def told() -> list[str]:
            found = [each["message"] for each in self._cluster.api.events(name, uid) if each["reason"] == "FailedScheduling"]
            return found if self.conditions(name) else []

        return wait_until(f"event and condition of pod {name}", told)[-1]

    def end(self, *names: str) -> None:
        """Deletes pods as a kubelet would: at once and for good."""
        for name in names:
            self._cluster.delete([name], grace=0)
        self._cluster.wait_gone(names)
        self._names = [name for name in self._names if name not in names]

    def end_all(self) -> None:
        self.end(*self._names)

    def used(self) -> dict[str, list[int]]:
        """The cores of each GPU that the extender counts as used, by node. It learns of a pod's end from its watch."""
        url = f"http://{own_address()}:{self.page}/api/cluster"
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {PAGE_TOKEN.read_text()}"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            nodes = json.load(answer)["nodes"]
        return {each["name"]: [gpu[1] for gpu in each["gpus"]] for each in nodes if each["name"] in COUNTS}

    def free(self, name: str) -> None:
        """Ends a pod, and waits until the extender does not count it any more: the places of later pods depend on that."""
        before, bound = self.used(), self.node_of(name) is not None
        self.end(name)
        if bound:
            wait_until(f"pod {name} forgotten by the extender", lambda: self.used() != before)

    def free_all(self) -> None:
        """The same with all. A pod that ended between the extender's filter and its bind counts for a minute (scheduler.assume_seconds)."""
        self.end_all()
        wait_until("all pods forgotten by the extender", lambda: not any(map(any, self.used().values())), 120)


def own_address() -> str:
    """An address of this machine besides the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def start_extender(cluster: Cluster, kubeconfig: Path, port: int, *settings: str, page: int = 0) -> None:
    """`page`: the port of its pages; 0: any."""
    PAGE_TOKEN.touch(mode=0o600)
    PAGE_TOKEN.write_text("page-token")
    # The API server's proxies do not connect to loopback addresses.
    pages = (f"http.address={own_address()}", f"scheduler.http_port={page}", f"http.token_file={PAGE_TOKEN}")
    start_replica(cluster, "gpumgr-scheduler", kubeconfig, port, *pages, *settings, pod=SCHEDULER)


def start_replica(
    cluster: Cluster, name: str, kubeconfig: Path, port: int, *settings: str, pod: str = "", tls: bool = False
) -> None:
    """`gpumgr scheduler` as the process `name`, which listens at this port. `pod`: in the namespace kube-system; "": it has none."""
    loopback = () if tls else ("--insecure-loopback",)
    cluster.processes.start(
        name,
        [sys.executable, "-m", "gpumgr", "scheduler", "--kubeconfig", kubeconfig, "--listen", f"127.0.0.1:{port}", *loopback,
         *(f"--set={each}" for each in ("log.format=json", *settings))],
        {"POD_NAME": pod, "POD_NAMESPACE": "kube-system"} if pod else None,
        cwd=PROJECT,
    )  # fmt: skip


@contextmanager
def rights(cluster: Cluster) -> Iterator[Path]:
    """The rights that are shipped, and an object for the pod that the extender runs in; a kubeconfig with the rights."""
    own = pod(SCHEDULER, [container("extender")], bound=False, nodeName=NODES[0], serviceAccountName=SCHEDULER)
    own["metadata"]["namespace"] = "kube-system"
    with cluster.applied((CONFIG / "rbac.yaml").read_text()):
        cluster.api.request("POST", SYSTEM_PODS, own)
        try:
            yield cluster.credentials(f"kube-system/{SCHEDULER}")
        finally:
            cluster.api.request("DELETE", f"{SYSTEM_PODS}/{SCHEDULER}?gracePeriodSeconds=0")


def start_kube_scheduler(
    cluster: Cluster, extender: Json | None, *, process: str = "gpu-kube-scheduler", scheduler: str = SCHEDULER
) -> None:
    """For pods with this scheduler's name, with the configuration that is shipped, but for these keys of the extender; None: without it."""
    config = yaml.safe_load((CONFIG / "kube-scheduler.yaml").read_text())
    config["clientConnection"]["kubeconfig"] = str(cluster.kubeconfig("admin"))
    config["profiles"][0]["schedulerName"] = scheduler
    if extender is None:
        del config["extenders"]
    else:
        config["extenders"][0].update({"httpTimeout": "30s", **extender})  # the machine may stall
    file = STATE / f"{process}.yaml"
    file.write_text(json.dumps(config))
    binary = cluster.binaries / "kubernetes" / "kube-scheduler"
    cluster.processes.start(process, [binary, f"--config={file}", "--secure-port=0"])


def _is_ready(page: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{own_address()}:{page}/readyz", timeout=30):
            return True
    except OSError:
        return False


@contextmanager
def extended(cluster: Cluster, *settings: str, nodes: Sequence[str] = NODES, **extender: Any) -> Iterator[Scheduled]:
    """The extender with the rights that are shipped, a kube-scheduler with the configuration that is shipped but for these keys of the
    extender, and these nodes of the API."""
    port, page = free_ports(2)
    with rights(cluster) as credentials, api_nodes(cluster, nodes):
        start_extender(cluster, credentials, port, *settings, page=page)
        try:
            wait_until("an extender that knows all nodes and pods", lambda: _is_ready(page))
            start_kube_scheduler(cluster, {"urlPrefix": f"http://127.0.0.1:{port}/scheduler", **extender})
            yield Scheduled(cluster, page)
        finally:
            cluster.processes.stop("gpu-kube-scheduler")
            assert cluster.processes.stop("gpumgr-scheduler") == 0


@contextmanager
def api_nodes(cluster: Cluster, names: Sequence[str] = NODES) -> Iterator[None]:
    for name in names:
        cluster.api.request("POST", "/api/v1/nodes", api_node(name, COUNTS[name]))
    try:
        yield
    finally:
        for name in names:
            cluster.api.request("DELETE", f"/api/v1/nodes/{name}")
