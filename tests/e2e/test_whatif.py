"""`gpumgr simulate fit` on a snapshot, compared with what the real kube-scheduler and the extender do afterwards."""

import json
import subprocess
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from .cluster import Cluster
from .manifests import Json, container, pod
from .places import PROJECT
from .test_scheduler import NODES, SCHEDULER, Scheduled, pods, scheduler

__all__ = ["pods", "scheduler"]

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
    for rank, (name, zone) in enumerate(ZONES.items()):
        change(cluster, name, {"zone": zone, "rank": str(rank)}, {"taints": [TAINT] if rank == 1 else []})
    yield pods
    for name in NODES:
        change(cluster, name, {}, {"taints": [], "unschedulable": False})


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


def fit(cluster: Cluster, made: Json) -> Json:
    command = [sys.executable, "-m", "gpumgr", "simulate", "fit", "-", "--output", "json"]
    command += ["--from-cluster", "--kubeconfig", str(cluster.kubeconfig("admin"))]
    done = subprocess.run(command, cwd=PROJECT, input=json.dumps(made), capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    answer: Json = json.loads(done.stdout)
    assert answer["problems"] == []
    return answer


def test_fit_is_what_kube_scheduler_and_the_extender_do(nodes: Scheduled, cluster: Cluster) -> None:
    """30 pods; some end, so that others fit again. From the 20th pod on, a node is cordoned."""
    random, there, fitting = Random(7), [], []
    try:
        for number in range(30):
            if number == 20:
                change(cluster, "api-c", {}, {"unschedulable": True})
            made = random_pod(random, f"what-if-{number}")
            answer = fit(cluster, made)
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
                nodes.end(ended)
                there.remove(ended)
    finally:
        nodes.end(*there)
    assert 12 < sum(fitting) < 22, fitting
