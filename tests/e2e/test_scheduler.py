"""The extender below a real kube-scheduler, on nodes that exist in the API alone: their inventories are the test's."""

import json
import subprocess
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from gpumgr.cli import group

from .agent import Agent
from .api import PODS
from .cluster import Cluster
from .manifests import Json, container, pod
from .node import cleared
from .places import PROJECT, STATE
from .processes import gpumgr, wait_until
from .scheduling import COUNTS, NODES, PAGE_TOKEN, SCHEDULER, Scheduled, extended, own_address, uuid


@pytest.fixture(scope="module")
def scheduler(cluster: Cluster, running_agent: Agent) -> Iterator[Scheduled]:
    """Three nodes of the API. The node with a kubelet has no agent, so it offers no GPUs."""
    with cleared(cluster, running_agent):
        running_agent.stop()
    wait_until("no pods", lambda: not cluster.pods.all())
    with extended(cluster) as scheduled:
        yield scheduled


@pytest.fixture
def pods(scheduler: Scheduled) -> Iterator[Scheduled]:
    try:
        yield scheduler
    finally:
        scheduler.free_all()


def test_pods_land_on_the_fullest_node_and_gpu_that_fit(pods: Scheduled) -> None:
    assert pods.place("first", (60, 16)) == ("api-a", [[uuid("api-a", 0)]])
    assert pods.place("beside", (30, 16)) == ("api-a", [[uuid("api-a", 0)]])
    assert pods.place("other-gpu", (50, 16)) == ("api-a", [[uuid("api-a", 1)]])
    assert pods.place("pair", (200, 0)) == ("api-b", [[uuid("api-b", 0), uuid("api-b", 2)]])
    assert pods.place("two", (40, 32), (40, 32)) == ("api-b", [[uuid("api-b", 1)], [uuid("api-b", 1)]])
    told = pods.annotations("pair")
    assert told["tencent.com/predicate-gpu-idx-0"] == "0,2"
    assert (told["tencent.com/predicate-node"], told["tencent.com/gpu-assigned"]) == ("api-b", "false")
    assert told["tencent.com/predicate-time"].isdecimal()


def test_a_pod_that_fits_on_no_gpu_waits_with_the_reason_until_one_is_free(pods: Scheduled) -> None:
    """The sum of every node is large enough, so kube-scheduler alone would bind the pod."""
    for name, count in COUNTS.items():
        for gpu in range(count):
            pods.place(f"{name}-{gpu}", (60, 32), nodeSelector={"kubernetes.io/hostname": name})
    pods.create("waits", (50, 16))
    assert pods.rejection("waits").startswith(
        "0/4 nodes are available: 1 for the 3 nodes with enough in total: 3 have no GPU with 50 free cores and 4 GiB "
        "(closest: api-a GPU 0, 40 cores and 8 GiB), 1 node(s) didn't match Pod's node affinity/selector."
    )
    freed = pods.placed("api-c-2")
    pods.end("api-c-2")
    assert pods.placed("waits") == freed


@pytest.fixture
def scheduler_pod(pods: Scheduled, cluster: Cluster) -> Iterator[Scheduled]:
    """Replaces the pod of the scheduler: the API server's proxy leads to the process."""
    made = pod("the-scheduler", [container("scheduler", 0, 0)], bound=False)
    made["metadata"]["labels"] = {"gpumgr.io/scheduler-leader": "true"}
    made["spec"].update({"nodeName": "api-a", "terminationGracePeriodSeconds": 0})
    made["spec"]["containers"][0]["ports"] = [{"name": "http", "containerPort": pods.page}]
    cluster.create([made])
    address = own_address()
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    found = cluster.api.request("GET", f"{PODS}/the-scheduler")
    cluster.api.request("PUT", f"{PODS}/the-scheduler/status", {**found, "status": {**found["status"], **status}})
    try:
        yield pods
    finally:
        cluster.delete(["the-scheduler"], grace=0)
        cluster.wait_gone(["the-scheduler"])


def test_why_explains_waiting_pods_from_any_machine(scheduler_pod: Scheduled, cluster: Cluster) -> None:
    """Also a pod that kube-scheduler's own filters reject, so that the extender is not called for it."""
    pods = scheduler_pod
    pods.create("scattered", (400, 0), nodeSelector={"kubernetes.io/hostname": "api-b"})
    pods.placed("scattered")
    for gpu in range(4):
        pods.place(f"c-{gpu}", (60, 32), nodeSelector={"kubernetes.io/hostname": "api-c"})
    pods.create("waits", (200, 0), nodeSelector={"kubernetes.io/hostname": "api-c"})
    pods.create("nowhere", (50, 16), nodeSelector={"no-such": "label"})
    pods.rejection("waits")
    pods.rejection("nowhere")
    assert why(cluster, "default/waits").startswith("Pod default/waits waits. It requests 2 GPUs.\n")
    told = why(cluster, "default/nowhere", "--all")
    assert "GPUs are free for it: kube-scheduler has not tried yet, or rejects these nodes itself.\n" in told
    assert "\n    api-c: GPU 0, 40 cores and 8 GiB\n" in told
    assert "\nkube-scheduler: 0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector." in told
    assert why(cluster, "default/c-0").startswith("Pod default/c-0 is bound to node api-c.\n")


def why(cluster: Cluster, *arguments: str) -> str:
    """With a token: the nodes have no kubelet, so that no port is forwarded."""
    done = gpumgr("why", *arguments, "--kubeconfig", cluster.kubeconfig("admin"), "--token-file", PAGE_TOKEN)
    assert done.returncode == 0, done.stderr
    return done.stdout


PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture
def priorities(cluster: Cluster) -> Iterator[None]:
    made = {f"gpumgr-{value}": value for value in (5, 6, 10)}
    for name, value in made.items():
        cluster.api.request("POST", PRIORITIES, {"metadata": {"name": name}, "value": value})
    try:
        yield
    finally:
        for name in made:
            cluster.api.request("DELETE", f"{PRIORITIES}/{name}")


@pytest.mark.usefixtures("priorities")
def test_preemption_evicts_the_pods_of_one_gpu_and_the_pod_lands_there(pods: Scheduled, cluster: Cluster) -> None:
    """kube-scheduler itself proposes low-0 and low-1, the pods of the lowest priority, which have different GPUs."""
    here = {"nodeSelector": {"kubernetes.io/hostname": "api-a"}}
    for name, gpu, priority in (("low-0", 0, None), ("mid-0", 0, "gpumgr-5"), ("low-1", 1, None), ("mid-1", 1, "gpumgr-6")):
        more = {"priorityClassName": priority} if priority else {}
        assert pods.place(name, (50, 16), **here, **more) == ("api-a", [[uuid("api-a", gpu)]])
    pods.create("vip", (100, 0), priorityClassName="gpumgr-10", **here)
    wait_until("a nomination", lambda: cluster.pods.all().get("vip", {}).get("status", {}).get("nominatedNodeName") == "api-a")
    wait_until("two victims", lambda: len(ending(cluster)) == 2)
    pods.create("thief", (50, 16), **here)
    pods.rejection("thief")
    assert ending(cluster) == {"low-0", "mid-0"}
    pods.end("low-0", "mid-0")
    assert pods.placed("vip") == ("api-a", [[uuid("api-a", 0)]])
    assert pods.node_of("thief") is None


def ending(cluster: Cluster) -> set[str]:
    return {name for name, found in cluster.pods.all().items() if found["metadata"].get("deletionTimestamp")}


# -- `gpumgr simulate fit` on a snapshot, compared with what kube-scheduler and the extender do afterwards ---------------------

ZONES = dict(zip(NODES, "xyy", strict=True))
TAINT = {"key": "team", "value": "x", "effect": "NoSchedule"}


def change(cluster: Cluster, name: str, labels: Json, spec: Json) -> None:
    found = cluster.api.request("GET", f"/api/v1/nodes/{name}")
    found["metadata"]["labels"].update(labels)
    found["spec"].update(spec)
    cluster.api.request("PUT", f"/api/v1/nodes/{name}", found)


@pytest.fixture
def nodes(pods: Scheduled, cluster: Cluster) -> Iterator[Scheduled]:
    """They differ by labels, and one has a taint."""
    try:
        for rank, (name, zone) in enumerate(ZONES.items()):
            change(cluster, name, {"zone": zone, "rank": str(rank)}, {"taints": [TAINT] if rank == 1 else []})
        # kube-scheduler watches nodes and pods apart, so it may see a pod before an earlier change of a node.
        pods.create("probe", (0, 0), nodeSelector={"rank": str(len(ZONES) - 1)})
        wait_until("kube-scheduler knows the labels", lambda: pods.node_of("probe") is not None)
        pods.end("probe")
        yield pods
    finally:
        for name in NODES:
            change(cluster, name, {}, {"taints": [], "unschedulable": False})


def cordon(pods: Scheduled, cluster: Cluster, name: str) -> None:
    """Back when kube-scheduler binds no pod to the node any more."""
    change(cluster, name, {}, {"unschedulable": True})

    def rejected() -> bool:
        pods.create("probe", (0, 0), nodeSelector={"kubernetes.io/hostname": name})
        wait_until("a decision on the probe", lambda: bool(pods.conditions("probe")))
        bound = pods.node_of("probe")
        pods.end("probe")
        return bound is None

    wait_until("kube-scheduler knows the cordon", rejected)


def random_pod(random: Random, name: str) -> Json:
    def one(place: int) -> Json:
        cores, blocks = random.choice([*((random.randint(1, 9) * 10, random.randint(1, 48)) for _ in "1234"), (100, 0), (200, 0)])
        made = container(f"c{place}", cores, blocks)
        if random.random() < 0.6:
            made["resources"]["requests"] = {"cpu": random.choice(["500m", "6", "25"]), "memory": random.choice(["1Gi", "200Gi"])}
        return made

    spec: dict[str, Any] = {"schedulerName": SCHEDULER}
    if random.random() < 0.2:
        spec["nodeSelector"] = {"zone": random.choice("xyyz")}
    if random.random() < 0.3:
        expression = random.choice(
            [
                {"key": "zone", "operator": "NotIn", "values": ["x"]},
                {"key": "rank", "operator": "Gt", "values": ["0"]},
                {"key": "rank", "operator": "Lt", "values": ["1"]},
                {"key": "zone", "operator": "Exists"},
            ]
        )
        terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    if random.random() < 0.8:
        spec["tolerations"] = [
            random.choice([{"key": "team", "value": "x"}, {"key": "team", "operator": "Exists"}, {"key": "team", "value": "y"}])
        ]
    containers = [one(place) for place in range(random.choice([1, 1, 1, 2]))]
    init = [container("before", 30, 8)] if random.random() < 0.15 else []
    made = pod(name, containers, init=init, bound=False, **spec)
    annotations = [{}, {}, {"gpumgr.io/policy": "spread"}, {"gpumgr.io/policy": "topology"}, {"gpumgr.io/avoid-gpu-model": "T4"}]
    made["metadata"]["annotations"] = random.choice(annotations)
    return made


def fit(cluster: Cluster, made: Json, *, alone: bool) -> Json:
    """With `alone` the command is a process of its own and reads its input: the imports of 30 of them would take longer than the pods."""
    text, file = json.dumps(made), STATE / "what-if.json"
    file.write_text(text)
    command = ["simulate", "fit", "-" if alone else str(file), "--output", "json"]
    command += ["--from-cluster", "--kubeconfig", str(cluster.kubeconfig("admin"))]
    if alone:
        process = [sys.executable, "-m", "gpumgr", *command]
        done = subprocess.run(process, cwd=PROJECT, input=text, capture_output=True, text=True, check=False)
        code, printed = done.returncode, done.stdout
    else:
        result = CliRunner().invoke(group, command, catch_exceptions=False)
        code, printed = result.exit_code, result.stdout
    assert code in (0, 1)
    answer: Json = json.loads(printed)
    assert answer["problems"] == []
    return answer


def test_fit_is_what_kube_scheduler_and_the_extender_do(nodes: Scheduled, cluster: Cluster) -> None:
    """30 pods; some end, so that others fit again. From the 20th pod on, a node is cordoned."""
    random, there, fitting = Random(7), [], []
    try:
        for number in range(30):
            if number == 20:
                cordon(nodes, cluster, "api-c")
            made = random_pod(random, f"what-if-{number}")
            answer = fit(cluster, made, alone=number == 0)
            name = made["metadata"]["name"]
            cluster.create([made])
            there.append(name)
            if answer["fits"]:
                node, gpus = nodes.placed(name)
                found = sorted({gpu for each in gpus for gpu in each})
                assert (node, found) == (answer["node"], sorted(gpu["uuid"] for gpu in answer["gpus"])), (made, answer)
            else:
                assert nodes.rejection(name).startswith("0/4 nodes are available"), answer
                assert nodes.node_of(name) is None, (made, answer)
                assert len(answer["reasons"]) == 4
            fitting.append(answer["fits"])
            if not answer["fits"] or random.random() < 0.3:
                ended = name if not answer["fits"] else there[random.randrange(len(there))]
                nodes.free(ended)
                there.remove(ended)
    finally:
        nodes.end(*there)
    assert 12 < sum(fitting) < 22, fitting
