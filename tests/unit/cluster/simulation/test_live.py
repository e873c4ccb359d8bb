"""What-if questions on clusters that are checked by hand."""

from collections.abc import Mapping
from typing import Any

import pytest

from gpumgr.cluster.simulation.defrag import Defrag
from gpumgr.cluster.simulation.live import LiveCluster, LivePod
from gpumgr.cluster.simulation.node_filters import refusal, selects, short, shortage_text
from gpumgr.common.units import Amounts
from tests.cluster_states import node_state, request

from .live_states import cluster, contents, live_node, live_pod

LABELS = {"zone": "a", "size": "7", "name": "x"}


def required(*terms: Mapping[str, Any]) -> dict[str, Any]:
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"affinity": {"nodeAffinity": {key: {"nodeSelectorTerms": list(terms)}}}}


def expression(key: str, operator: str, *values: str, where: str = "matchExpressions") -> dict[str, Any]:
    return {where: [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({}, True),
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        ({"nodeSelector": {"other": ""}}, False),
        (required(expression("zone", "In", "b", "a")), True),
        (required(expression("zone", "NotIn", "a")), False),
        (required(expression("other", "NotIn", "a")), True),
        (required(expression("zone", "Exists")), True),
        (required(expression("zone", "DoesNotExist")), False),
        (required(expression("size", "Gt", "6")), True),
        (required(expression("size", "Lt", "7")), False),
        (required(expression("zone", "Gt", "1")), False),
        (required(expression("other", "Lt", "1")), False),
        (required(expression("zone", "In", "b"), expression("size", "Exists")), True),
        (required({**expression("zone", "In", "a"), **expression("metadata.name", "In", "m", where="matchFields")}), False),
        (required(expression("metadata.name", "In", "n", where="matchFields")), True),
        (required({}), False),
        (required(), False),
        ({"affinity": {"nodeAffinity": None}}, True),
    ],
)
def test_selectors_and_required_affinity(spec: Mapping[str, Any], fits: bool) -> None:
    assert (refusal(spec, "n", LABELS, ()) is None) == fits


TAINT = {"key": "team", "value": "x", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "toleration", "fits"),
    [
        (TAINT, None, False),
        ({**TAINT, "effect": "NoExecute"}, None, False),
        ({**TAINT, "effect": "PreferNoSchedule"}, None, True),
        (TAINT, {"operator": "Exists"}, True),
        (TAINT, {"key": "team", "operator": "Exists", "effect": "NoSchedule"}, True),
        (TAINT, {"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        (TAINT, {"key": "other", "operator": "Exists"}, False),
        (TAINT, {"key": "team", "value": "x"}, True),
        (TAINT, {"key": "team", "operator": "Equal", "value": "y"}, False),
        ({"key": "team", "effect": "NoSchedule"}, {"key": "team"}, True),
        ({**TAINT, "value": "950"}, {"key": "team", "operator": "Gt", "value": "900"}, True),
        ({**TAINT, "value": "950"}, {"key": "team", "operator": "Gt", "value": "950"}, False),
        ({**TAINT, "value": "950"}, {"key": "team", "operator": "Lt", "value": "960"}, True),
        ({**TAINT, "value": "9_5"}, {"key": "team", "operator": "Lt", "value": "960"}, False),
    ],
)
def test_taints(taint: Mapping[str, str], toleration: Mapping[str, str] | None, fits: bool) -> None:
    found = refusal({"tolerations": [toleration] if toleration else None}, "n", {}, [taint])
    assert (found is None) == fits
    assert found is None or found.startswith("has the taint team")


def test_selectors_of_labels_and_resources() -> None:
    assert [selects(each, LABELS) for each in (None, {}, {"matchLabels": {"zone": "a"}}, {"matchLabels": {"zone": "b"}})] == [
        *(False, True, True, False)
    ]
    with pytest.raises(ValueError, match="operator Near is not known"):
        selects(expression("zone", "Near"), LABELS)
    requests, free = {"cpu": 1500, "memory": 1 << 30, "pods": 1, "x.io/a": 0}, {"cpu": 1000, "memory": -5, "pods": 0}
    assert [shortage_text(requests, free, name) for name in short(requests, free)] == [
        "has 1 of cpu free; the pod requests 1.5",
        "has 0 MiB of memory free; the pod requests 1 GiB",
        "has its maximum number of pods",
    ]


def plan_of(found: LiveCluster, pod: LivePod, **bounds: int) -> list[tuple[str, str, list[int]]] | None:
    """(pod, node, GPUs) of each move and of the pod; the search leaves the cluster as it was."""
    before = contents(found)
    plan = Defrag(found, **{"most_moves": 3, **bounds}).plan(pod)
    assert contents(found) == before
    return None if plan is None else [(each.uid, spot.node, found.gpus(each, spot)) for each, spot in plan]


ONE, TWO = live_pod("one", 40, "a"), live_pod("two", 40, "a", 1)


@pytest.mark.parametrize(
    ("found", "pod", "plan"),
    [
        (cluster([ONE], a=2), live_pod("new", 100), [("new", "a", [1])]),
        # Within the node, and to another one.
        (cluster([ONE, TWO], a=2), live_pod("new", 100), [("one", "a", [1]), ("new", "a", [0])]),
        # The pod gets a whole node, the first one that one move empties.
        (cluster([ONE, live_pod("mid", 50, "b"), live_pod("c", 50, "c")], a=1, b=1, c=1),
         live_pod("new", 100), [("one", "b", [0]), ("new", "a", [0])]),
        # Only CPU is short, so a pod without a GPU moves.
        (cluster([live_pod("web", 0, "a", cpu=7000)], a=1, b=0), live_pod("new", 50, cpu=4000),
         [("web", "b", []), ("new", "a", [0])]),
        (cluster([live_pod("one", 40, "a", why_not_movable="has no controller"), TWO], a=2), live_pod("new", 100),
         [("two", "a", [0]), ("new", "a", [1])]),
        (cluster([live_pod("one", 40, "a", why_not_movable="x"), live_pod("two", 40, "a", 1, why_not_movable="x")], a=2),
         live_pod("new", 100), None),
    ],
)  # fmt: skip
def test_plans(found: LiveCluster, pod: LivePod, plan: list[tuple[str, str, list[int]]] | None) -> None:
    assert plan_of(found, pod) == plan


def test_a_chain_of_moves_is_in_a_possible_order() -> None:
    """Only a is possible for the pod; `one` fits on b alone, and there only if `mid` leaves for c."""
    nodes = [live_node(node_state(name, 1), labels={"on": name}) for name in "abc"]
    on_b: dict[str, Any] = {"spec": {"nodeSelector": {"on": "b"}}, "rules": "b"}
    pods = [live_pod("one", 60, "a", **on_b), live_pod("mid", 50, "b"), live_pod("low", 45, "c")]
    found = LiveCluster(nodes, pods, "binpack")
    new = live_pod("new", 100, spec={"nodeSelector": {"on": "a"}}, rules="a")
    assert plan_of(found, new) == [("mid", "c", [0]), ("one", "b", [0]), ("new", "a", [0])]
    assert plan_of(found, new, most_moves=1) is None
    assert plan_of(found, new, most_tries=1) is None


def test_what_the_agent_reports_of_a_pod_moves_with_it() -> None:
    """The pod was bound by another scheduler: only the node's inventory has its GPU."""
    state = node_state("a", 2, reported_shares={"one": ((1, Amounts(60, 256)),)})
    one = live_pod("one", 60, "a")
    found = LiveCluster([live_node(state), live_node(node_state("b", 1))], [one, live_pod("two", 50, "a")], "binpack")
    assert one.home is not None
    assert found.gpus(one, one.home) == [1]
    assert plan_of(found, live_pod("new", 100, spec={}, rules="")) == [("new", "b", [0])]
    assert plan_of(found, live_pod("new", 200, request=request(("app", 200, 0)))) is None
    found.remove(one, "a")
    assert [used.cores for used in found.index.used("a")] == [50, 0]


def test_an_agent_that_chooses_can_not_move_pods_within_its_node() -> None:
    found = LiveCluster([live_node(node_state("a", 2, naming="none"))], [ONE, TWO], "binpack")
    assert plan_of(found, live_pod("new", 100)) is None
