"""Objects of the API as the what-if questions need them, and what a snapshot keeps of them."""

from collections.abc import Mapping
from typing import Any

import pytest

from gpumgr.cli.live_objects import live_cluster
from gpumgr.cli.simulate_live import _is_kept
from gpumgr.cluster.scheduler.objects import parse_watched_pod
from gpumgr.cluster.simulation.live import LivePod
from gpumgr.common.units import (
    CORE_LIMIT_ANNOTATION,
    MEMORY_LIMIT_ANNOTATION,
    RESIZE_ANNOTATION,
    SUSPEND_ANNOTATION,
    SUSPEND_WHEN_IDLE_ANNOTATION,
)
from gpumgr.kube.pods import CLUSTER_ANNOTATION
from tests.component.cluster.scheduler.conftest import inventory, node

Json = dict[str, Any]
READY = [{"type": "Ready", "status": "True"}]


def nodes(**changes: Any) -> list[Json]:
    made = node("a", 1, inventory("a", 1, other={"uid-reported": ((0, 10, 256),)}))
    made["status"] |= {"conditions": READY, "allocatable": {"cpu": "3900m", "memory": "1Gi", "pods": "5"}}
    return [{**made, **changes}]


def container(cpu: str | None = None, name: str = "c", limit: str | None = None, **more: Any) -> Json:
    resources = {"requests": {"cpu": cpu} if cpu else {}, "limits": {"cpu": limit} if limit else {}}
    return {"name": name, "resources": resources, **more}


def live(metadata: Mapping[str, Any] | None = None, budgets: list[Json] | None = None, **spec: Any) -> LivePod:
    owner = [{"kind": "ReplicaSet", "controller": True}]
    named = {"namespace": "team", "name": "x", "uid": "uid-x", "labels": {"app": "x"}, "ownerReferences": owner}
    item = {"metadata": {**named, **(metadata or {})}, "spec": {"nodeName": "a", "containers": [container()], **spec}}
    found, problems = live_cluster({"nodes": nodes(), "pods": [item], "poddisruptionbudgets": budgets or []}, "binpack")
    assert problems == []
    (pod,) = found.pods.values()
    return pod


def test_requests_are_in_the_units_of_the_simulation() -> None:
    resources = {"requests": {"cpu": "100m", "memory": "1500m", "x.io/a": "0"}}
    spec: Json = {"containers": [container("1.5"), {"name": "c", "resources": resources}], "overhead": {"memory": "1Gi"}}
    assert live(**spec).requests == {"cpu": 1600, "memory": (1 << 30) + 2, "pods": 1}


GPU = [{"name": "c", "resources": {"limits": {"tencent.com/vcuda-core": "10", "tencent.com/vcuda-memory": "1"}}}]
BUDGET = {"metadata": {"namespace": "team"}, "spec": {"selector": {"matchLabels": {"app": "x"}}}}


@pytest.mark.parametrize(
    ("metadata", "budgets", "spec", "reason"),
    [
        ({}, [], {}, ""),
        ({"annotations": {"kubernetes.io/config.mirror": "x"}}, [], {}, "is a mirror pod"),
        ({"ownerReferences": [{"kind": "DaemonSet", "controller": True}]}, [], {}, "belongs to a DaemonSet"),
        ({"ownerReferences": [{"kind": "ReplicaSet"}]}, [], {}, "has no controller"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, [], {}, "is being deleted"),
        ({}, [BUDGET], {}, "has a PodDisruptionBudget"),
        ({"namespace": "other"}, [BUDGET], {}, ""),
        ({}, [{**BUDGET, "spec": {}}], {}, ""),
        ({}, [{"metadata": {"namespace": "team"}}], {}, ""),
        ({}, [], {"containers": GPU}, "has GPUs that are not known"),
        ({"uid": "uid-reported"}, [], {"containers": GPU}, ""),
        ({}, [], {"volumes": [{"persistentVolumeClaim": {}}]}, "has volumes, which are not checked"),
        ({}, [], {"volumes": [{"emptyDir": {}}]}, ""),
        ({}, [], {"affinity": {"podAntiAffinity": {"required": [{}]}}}, "has pod affinities, which are not checked"),
        ({}, [], {"containers": [{"name": "c", "ports": [{"hostPort": 80}]}]}, "has host ports, which are not checked"),
    ],
)
def test_pods_that_may_not_be_moved(metadata: Json, budgets: list[Json], spec: Json, reason: str) -> None:
    assert live(metadata, budgets, **spec).why_not_movable == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"spec": {"unschedulable": True}}, "is unschedulable (cordoned)"),
        ({"status": {"capacity": {}, "conditions": [{"type": "Ready", "status": "False"}]}}, "is not Ready"),
        ({"status": {"capacity": {}, "conditions": [{"type": "Ready", "status": "Unknown"}]}}, "is not Ready (unreachable)"),
        ({"status": {"capacity": {}}}, "is not Ready"),
    ],
)
def test_the_state_of_a_node_counts_as_a_taint(changes: Json, reason: str | None) -> None:
    document = {"nodes": nodes(**changes), "pods": [], "poddisruptionbudgets": []}
    pod = live(containers=GPU, nodeName=None)
    assert dict(live_cluster(document, "binpack")[0].reasons(pod)).get("a") == reason or reason is None
    assert live_cluster(document, "binpack")[0].names(pod) == (("a",) if reason is None else ())


POD: Json = {"metadata": {"name": "x", "namespace": "team", "uid": "x"}, "spec": {"containers": []}}


def of_pod(**spec: Any) -> Json:
    return {**POD, "spec": {**POD["spec"], **spec}}


def of_node(**changes: Any) -> Json:
    return {"metadata": {"name": "x", "uid": "x"}, "status": {}, **changes}


def of_budget(**selector: Any) -> Json:
    return {**BUDGET, "spec": {"selector": selector}}


OTHERS: dict[str, list[tuple[Any, str, str]]] = {
    "pods": [
        ({**POD, "status": 5}, "team/x", "Expected `object | null`, got `int` - at `$.status`"),
        (of_pod(containers=[{}]), "team/x", "Object missing required field `name` - at `$.spec.containers[0]`"),
        (of_pod(volumes=[None]), "team/x", "Expected `object`, got `null` - at `$.spec.volumes[0]`"),
        ({"metadata": {"name": "x", "namespace": "team"}}, "team/x", "Object missing required field `uid` - at `$.metadata`"),
        ({"metadata": 5}, "without a name", "Expected `object`, got `int` - at `$.metadata`"),
    ],
    "nodes": [
        (of_node(status={"capacity": {"cpu": "many"}}), "x", "cpu: quantity 'many' can't be read"),
        (5, "without a name", "Expected `object`, got `int`"),
        (of_node(status={"capacity": 5}), "x", "Expected `object | null`, got `int` - at `$.status.capacity`"),
        (of_node(spec={"taints": [{"key": "x"}]}), "x", "Object missing required field `effect` - at `$.spec.taints[0]`"),
    ],
    "poddisruptionbudgets": [
        ({}, "without a name", "Object missing required field `metadata`"),
        (of_budget(matchLabels="app"), "team", "Expected `object | null`, got `str` - at `$.spec.selector.matchLabels`"),
        (
            of_budget(matchExpressions=[{"key": "app", "operator": "is"}]),
            "team",
            "Invalid enum value 'is' - at `$.spec.selector.matchExpressions[0].operator`",
        ),
    ],
}


@pytest.mark.parametrize(("kind", "item", "name", "problem"), [(kind, *each) for kind, found in OTHERS.items() for each in found])
def test_an_object_of_another_structure_is_left_out_and_named(kind: str, item: Json, name: str, problem: str) -> None:
    protected = {**POD, "metadata": {**POD["metadata"], "uid": "protected"}}
    document: Json = {"nodes": nodes(), "pods": [protected], "poddisruptionbudgets": []}
    document[kind].append(item)
    cluster, (found,) = live_cluster(document, "binpack")
    assert list(cluster.pods) == ["protected"]
    what = {
        "pods": f"pod {name} is left out, and what it uses counts as free",
        "nodes": f"node {name} is left out",
        "poddisruptionbudgets": f"PodDisruptionBudget {name} is left out, and the pods that it selects count as not protected",
    }[kind]
    assert found.startswith(f"{what}: {problem}")
    assert found.endswith("; correct it, or make a new snapshot")


def test_a_comparison_without_a_value_matches_nothing() -> None:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "size", "operator": "Gt", "values": []}]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    document = {"nodes": nodes(), "pods": [], "poddisruptionbudgets": []}
    assert live_cluster(document, "binpack")[0].names(live(affinity=affinity)) == ()


def test_a_second_node_of_one_name_is_named() -> None:
    document = {"nodes": nodes() + nodes(), "pods": [], "poddisruptionbudgets": []}
    assert live_cluster(document, "binpack")[1] == ["node a is there twice; only the last one counts"]


def test_missing_budgets_are_named() -> None:
    assert live_cluster({"nodes": nodes(), "pods": []}, "binpack")[1] == [
        "PodDisruptionBudgets can't be listed: no pod counts as protected by one"
    ]


# -- what a snapshot keeps ---------------------------------------------------------------------------------------------------

#: Only the node's agent uses these, or they are HAMi's records of pods with HAMi's resources, which the simulation does not read.
NOT_KEPT = {
    CORE_LIMIT_ANNOTATION,
    MEMORY_LIMIT_ANNOTATION,
    RESIZE_ANNOTATION,
    SUSPEND_ANNOTATION,
    SUSPEND_WHEN_IDLE_ANNOTATION,
    CLUSTER_ANNOTATION,
    "hami.io/vgpu-node",
}


class Recorder(dict[str, Any]):
    """Annotations that note which of them are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, *default: Any) -> Any:
        self.read.add(key)
        return super().get(key, *default)

    def __bool__(self) -> bool:
        return True


def test_a_snapshot_has_all_annotations_that_decide_where_a_pod_goes() -> None:
    annotations = Recorder()
    parse_watched_pod({"metadata": {**POD["metadata"], "annotations": annotations}, "spec": {"nodeName": "a", "containers": GPU}})
    assert "nvidia.com/vgpu-mode" in annotations.read
    left_out = {key for key in annotations.read if not _is_kept(f"pods/metadata/annotations/{key}")}
    assert left_out <= NOT_KEPT
