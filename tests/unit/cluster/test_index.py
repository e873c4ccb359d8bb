"""The index: which node is offered, what is assumed, and what is computed again."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from gpumgr.cluster import index as module
from gpumgr.cluster.choose import NodeChoice, choose
from gpumgr.cluster.index import ClusterIndex, PlacedPod, Rejection, named_shares
from gpumgr.cluster.node import NodeState
from gpumgr.cluster.request import PodRequest, Policy
from gpumgr.units import Amounts
from tests.cluster_states import node_state, request, share

NODES = (node_state("a", 2), node_state("b", 4, near=((0, 1), (2, 3))))
NAMES = ("a", "b")


@pytest.fixture
def index() -> ClusterIndex:
    made = ClusterIndex()
    for node in NODES:
        made.set_node(node)
    return made


@pytest.fixture
def computed() -> Iterator[list[str]]:
    """The nodes for which a choice was computed."""
    names: list[str] = []

    def counted(node: NodeState, *rest: object) -> object:
        names.append(node.name)
        return choose(node, *rest)  # type: ignore[arg-type]

    with patch.object(module, "choose", counted):
        yield names


def best(index: ClusterIndex, wanted: PodRequest, policy: Policy = "binpack") -> tuple[str, NodeChoice]:
    ranked = index.rank(wanted, policy, NAMES)
    assert not isinstance(ranked, Rejection), ranked
    return ranked[0]


def place(index: ClusterIndex, uid: str, wanted: PodRequest, *, until: float | None = None) -> PlacedPod:
    name, choice = best(index, wanted)
    state = index.node(name)
    assert state is not None
    pod = PlacedPod(uid=uid, node=name, request=wanted, shares=named_shares(state, choice))
    if until is None:
        index.bind(pod)
    else:
        index.assume(pod, until=until)
    return pod


def test_binpack_fills_a_node_and_spread_takes_the_emptiest(index: ClusterIndex) -> None:
    place(index, "one", share(50, 8))
    assert best(index, share(50, 8))[0] == "a"
    assert best(index, share(50, 8))[1].shares[0][0][0] == 0
    assert best(index, share(50, 8), "spread")[0] == "b"
    assert best(index, request(("app", 100, 0)))[0] == "a"
    assert best(index, request(("app", 100, 0)), "spread")[0] == "b"
    assert best(index, request(("app", 200, 0)))[0] == "b"


def test_only_nodes_that_are_offered_are_answered(index: ClusterIndex) -> None:
    ranked = index.rank(share(50, 8), "binpack", ["b", "unknown"])
    assert not isinstance(ranked, Rejection)
    assert [name for name, _ in ranked] == ["b"]
    assert isinstance(index.rank(share(50, 8), "binpack", ["unknown"]), Rejection)


def test_what_is_assumed_counts_until_it_ends(index: ClusterIndex) -> None:
    place(index, "one", request(("app", 200, 0)), until=60.0)
    assert index.used("a")[0].cores == 100
    assert index.expire(59.9) == ()
    assert index.expire(60.0) == ("one",)
    assert index.used("a")[0].cores == 0


def test_a_bound_pod_does_not_expire(index: ClusterIndex) -> None:
    pod = place(index, "one", share(50, 8), until=60.0)
    index.bind(pod)
    assert index.expire(1e9) == ()
    assert not index.is_assumed("one")
    assert index.used("a")[0] == Amounts(50, 2048)


def test_only_changed_nodes_are_computed_again(index: ClusterIndex, computed: list[str]) -> None:
    best(index, share(50, 8))
    assert sorted(computed) == ["a", "b"]
    best(index, share(50, 8))
    index.set_node(node_state("a", 2))
    best(index, share(50, 8))
    assert sorted(computed) == ["a", "b"], "an equal inventory is no change"
    place(index, "one", share(50, 8))
    best(index, share(50, 8))
    assert sorted(computed) == ["a", "a", "b"]
    index.bind(place(index, "two", share(50, 8), until=60.0))
    computed.clear()
    best(index, share(50, 8))
    assert computed == ["a"], "the watch shows what was assumed: no second change"


def test_what_the_node_reports_counts_once_and_before_annotations(index: ClusterIndex) -> None:
    pod = place(index, "one", share(50, 8))
    index.set_node(node_state("a", 2, other={"one": ((1, Amounts(50, 2048)),), "foreign": ((1, Amounts(20, 256)),)}))
    assert [used.cores for used in index.used("a")] == [0, 70]
    index.remove(pod.uid)
    assert [used.cores for used in index.used("a")] == [0, 70], "the node's own report ends with its next inventory"


def test_a_pod_with_unknown_gpus_takes_likely_ones(index: ClusterIndex) -> None:
    index.bind(PlacedPod(uid="one", node="a", request=request(("app", 100, 0))))
    index.bind(PlacedPod(uid="two", node="a", request=share(50, 8), shares=((("GPU-gone", Amounts(50, 2048)),),)))
    assert [used.cores for used in index.used("a")] == [100, 50]


def test_pods_of_a_node_that_comes_later_count(index: ClusterIndex) -> None:
    index.bind(PlacedPod(uid="one", node="c", request=share(50, 8), shares=((("GPU-c-1", Amounts(50, 2048)),),)))
    index.set_node(node_state("c", 2))
    assert [used.cores for used in index.used("c")] == [0, 50]
    index.remove_node("c")
    index.set_node(node_state("c", 2))
    assert [used.cores for used in index.used("c")] == [0, 50]
    index.remove("one")
    index.remove_node("c")
    assert index.node("c") is None


def test_a_placement_is_validated_without_itself(index: ClusterIndex) -> None:
    pod = place(index, "one", request(("app", 200, 0)), until=60.0)
    assert index.fits(pod)
    index.bind(PlacedPod(uid="two", node="a", request=share(10, 4), shares=((("GPU-a-1", Amounts(10, 1024)),),)))
    assert not index.fits(pod)
    index.remove("two")
    index.set_node(node_state("a", 2, cordoned=(1,)))
    assert not index.fits(pod)


def test_kept_results_are_bounded(index: ClusterIndex) -> None:
    for cores in range(1, 100):
        best(index, share(cores, 4))
    assert len(index._results) == module.MAX_SHAPES


def test_nodes_that_differ_by_name_alone_are_computed_once(computed: list[str]) -> None:
    index = ClusterIndex()
    names = [f"node-{number}" for number in range(20)]
    for name in names:
        index.set_node(node_state(name, 2, unhealthy=(0,) if name == "node-0" else ()))
    ranked = index.rank(share(50, 8), "binpack", names, 20)
    assert not isinstance(ranked, Rejection)
    assert {name: choice.shares[0][0][0] for name, choice in ranked} == {name: int(name == "node-0") for name in names}
    assert len(computed) == 2
