"""The chart's scheduler on the real API server: its objects, its image in a pod, and a real kube-scheduler with its configuration."""

import base64
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from gpumgr.cli.doctor import command
from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION, decode_placement
from tools import chart

from . import image_agent
from .agent import Agent
from .cluster import Cluster
from .manifests import Json, container, pod
from .node import cleared
from .places import POD_LOGS, STATE
from .processes import free_ports, wait_until, written
from .scheduling import api_node, uuid

NAMESPACE = chart.NAMESPACE
NAME, CALLER = "e2e-scheduler", "e2e-kube-scheduler"
HOST = f"{NAME}.{NAMESPACE}.svc"


def values(cluster: Cluster) -> Json:
    """The agent's image; no pod network, and no Service that leads to the API server."""
    host, _, port = cluster.url.removeprefix("https://").partition(":")
    extender, page = free_ports(2)
    repository, _, tag = image_agent.NAME.partition(":")
    return {
        "fullnameOverride": "e2e",
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "none", "operator": "Exists"}]},  # the DaemonSet stays on paper
        ]}}},
        "settings": {"scheduler": {"http_port": page}, "log": {"format": "json"}},
        "scheduler": {
            "enabled": True,
            "replicas": 1,
            "port": extender,
            "hostNetwork": True,
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "extraEnv": [{"name": "KUBERNETES_SERVICE_HOST", "value": host}, {"name": "KUBERNETES_SERVICE_PORT", "value": port}],
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def installed(cluster: Cluster, running_agent: Agent) -> Iterator[list[Json]]:
    """The rendered objects, applied. The image of kube-scheduler is not on the node, so that Deployment has no pods."""
    with cleared(cluster, running_agent):
        running_agent.stop()
    cluster.start_controllers()
    cluster.import_image(image_agent.build_image())
    text = chart.render(values(cluster), "--kube-version=1.37.2")
    objects = [each for each in yaml.safe_load_all(text) if each]
    for each in objects:
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", CALLER):
            each["spec"]["replicas"] = 0
    cluster.api.request("POST", "/api/v1/nodes", api_node("api-a", 2))
    try:
        assert len(cluster.apply(objects)) == len(objects)
        yield objects
    finally:
        cluster.take_away(objects)
        cluster.api.request("DELETE", "/api/v1/nodes/api-a")
        wait_until("no pod of the scheduler", lambda: not schedulers(cluster), 120)
        # Each exists if its holder has ever led.
        cluster.kubectl("delete", "lease", NAME, CALLER, f"--namespace={NAMESPACE}", "--ignore-not-found")
        cluster.stop_controllers()


def schedulers(cluster: Cluster) -> list[Json]:
    found: list[Json] = cluster.api.request(
        "GET", f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app.kubernetes.io%2Fname%3Dgpumgr-scheduler"
    )["items"]
    return found


def log_of(found: Json) -> str:
    meta = found["metadata"]
    return "\n".join(written(sorted(POD_LOGS.glob(f"{NAMESPACE}_{meta['name']}_{meta['uid']}/*/*.log"))))


def endpoint(cluster: Cluster) -> tuple[str, int] | None:
    """Address and port behind the Service's port of the extender."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
    for each in cluster.api.request("GET", f"{path}?labelSelector=kubernetes.io%2Fservice-name%3D{NAME}")["items"]:
        ports = {port["name"]: int(port["port"]) for port in each.get("ports") or []}
        for found in each.get("endpoints") or []:
            if found["conditions"].get("ready") and "extender" in ports:
                return str(found["addresses"][0]), ports["extender"]
    return None


def wait_endpoint(cluster: Cluster) -> tuple[str, int]:
    try:
        return wait_until("the Service's endpoint", lambda: endpoint(cluster), 120, every=0.2)
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {[(each['status'], log_of(each)[-2000:]) for each in schedulers(cluster)]}") from error


def start_caller(cluster: Cluster, objects: list[Json], address: tuple[str, int]) -> None:
    """kube-scheduler as a process, with the rendered configuration and the rendered client certificate."""
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    config = yaml.safe_load(by_name["ConfigMap", CALLER]["data"]["kube-scheduler.yaml"])
    (extender,) = config["extenders"]
    folder = STATE / "client-tls"
    folder.mkdir(mode=0o700)
    for file, text in by_name["Secret", f"{NAME}-client-tls"]["data"].items():
        (folder / file).write_bytes(base64.b64decode(text))
    for key, path in extender["tlsConfig"].items():
        if key != "serverName":
            extender["tlsConfig"][key] = str(folder / Path(path).name)
    assert extender["tlsConfig"]["serverName"] == HOST
    extender["urlPrefix"] = "https://{}:{}/scheduler".format(*address)  # no cluster DNS here
    extender["httpTimeout"] = "30s"  # the machine may stall
    config["clientConnection"]["kubeconfig"] = str(
        cluster.credentials(f"{NAMESPACE}/{CALLER}")
    )  # the rights that the chart grants
    file = STATE / "caller.yaml"
    file.write_text(json.dumps(config))
    binary = cluster.binaries / "kubernetes" / "kube-scheduler"
    cluster.processes.start("e2e-kube-scheduler", [binary, f"--config={file}", "--secure-port=0"])


def test_a_pod_is_placed_by_what_the_chart_installs(cluster: Cluster, installed: list[Json]) -> None:
    address = wait_endpoint(cluster)
    (leader,) = schedulers(cluster)
    assert leader["metadata"]["labels"]["gpumgr.io/scheduler-leader"] == "true"
    assert address[0] == leader["status"]["podIP"]
    start_caller(cluster, installed, address)
    try:
        made = pod("chart-placed", [container(cores=60, memory=16)], bound=False, schedulerName="gpumgr-scheduler")
        made["spec"]["nodeSelector"] = {"api-only": "true"}
        cluster.create([made])
        try:
            cluster.pods.wait("the pod bound", lambda pods: "nodeName" in pods.get("chart-placed", {}).get("spec", {}), 60)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {log_of(leader)[-3000:]}") from error
        found = cluster.pods.all()["chart-placed"]
        placement = decode_placement(found["metadata"]["annotations"][PLACEMENT_ANNOTATION])
        assert (placement.node, placement.containers["main"][0].gpu) == ("api-a", uuid("api-a", 0))
        # The kubelet deletes the slices of a test of mode dra a while after the agent's end.
        slices = "/apis/resource.k8s.io/v1/resourceslices"
        wait_until("no ResourceSlice", lambda: not cluster.api.request("GET", slices)["items"])
        told = doctor(cluster)
    finally:
        cluster.processes.stop("e2e-kube-scheduler")
        cluster.delete(["chart-placed"], grace=0)
    assert {name: each["message"] for name, each in told.items() if each["state"] == "error"} == {}
    for name in ("configuration", "rbac", "leader", "admission", "inventories"):
        assert told[name]["state"] in ("ok", "warning"), told[name]
    assert told["leader"]["state"] == told["admission"]["state"] == told["rbac"]["state"] == "ok"


def doctor(cluster: Cluster) -> dict[str, Json]:
    """Check -> finding of `gpumgr doctor --cluster`."""
    done = CliRunner().invoke(command, ["--cluster", "--kubeconfig", str(cluster.kubeconfig("admin")), "--json"])
    assert done.exit_code in (0, 1), done.output
    return {each["check"]: each for each in json.loads(done.output)}


def test_an_upgrade_keeps_the_certificates(cluster: Cluster, installed: list[Json]) -> None:
    """Helm reads them from the cluster. A running kube-scheduler reads its client certificate at its start only."""

    def secrets(objects: Iterable[Json]) -> dict[str, Json]:
        return {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "Secret"}

    flags = ("--kube-version=1.37.2", "--dry-run=server", f"--kubeconfig={cluster.kubeconfig('admin')}")
    upgraded = yaml.safe_load_all(chart.render(values(cluster), *flags))
    assert secrets(filter(None, upgraded)) == secrets(installed)
    assert set(secrets(installed)) == {f"{NAME}-tls", f"{NAME}-client-tls"}
    another = yaml.safe_load_all(chart.render(values(cluster), "--kube-version=1.37.2"))
    assert secrets(filter(None, another)) != secrets(installed)
