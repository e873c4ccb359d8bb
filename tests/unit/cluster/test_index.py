"""The index: which node is offered, what is assumed, and what is computed again."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import get_args
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumgr.cluster import shape
from gpumgr.cluster.choose import NodeChoice, choose
from gpumgr.cluster.explain import explain
from gpumgr.cluster.index import ClusterIndex, PlacedPod, named_shares
from gpumgr.cluster.node import NodeState
from gpumgr.cluster.request import PodRequest, Policy
from gpumgr.cluster.shape import Rejection
from gpumgr.evaluators.constraints import Constraints
from gpumgr.units import Amounts
from tests.cluster_states import node_state, request, share

NODES = (node_state("a", 2), node_state("b", 4, near=((0, 1), (2, 3))))
NAMES = ("a", "b")
POLICIES: tuple[Policy, ...] = get_args(Policy)


@pytest.fixture
def index() -> ClusterIndex:
    made = ClusterIndex()
    for node in NODES:
        made.set_node(node)
    return made


@pytest.fixture
def computed() -> Iterator[list[int]]:
    """The number of GPUs of each kind of node for which a choice was computed and kept."""
    sizes: list[int] = []

    def counted(node: NodeState, *rest: object) -> object:
        sizes.append(len(node.gpus))
        return choose(node, *rest)  # type: ignore[arg-type]

    with patch.object(shape, "choose", counted):
        yield sizes


def best(index: ClusterIndex, wanted: PodRequest, policy: Policy = "binpack") -> tuple[str, NodeChoice]:
    ranked = index.rank(wanted, policy, NAMES)
    assert not isinstance(ranked, Rejection), ranked
    return ranked[0]


def place(index: ClusterIndex, uid: str, wanted: PodRequest, *, assumed: bool = False) -> PlacedPod:
    name, choice = best(index, wanted)
    state = index.node(name)
    assert state is not None
    pod = PlacedPod(uid=uid, node=name, request=wanted, shares=named_shares(state, choice))
    if assumed:
        index.assume(pod)
    else:
        index.bind(pod)
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


def test_what_is_assumed_counts_until_it_is_removed(index: ClusterIndex) -> None:
    place(index, "one", request(("app", 200, 0)), assumed=True)
    assert index.used("a")[0].cores == 100
    index.remove("one")
    assert index.used("a")[0].cores == 0
    assert index.assumed_pods == 0


def test_a_bound_pod_is_no_longer_assumed(index: ClusterIndex) -> None:
    pod = place(index, "one", share(50, 8), assumed=True)
    assert index.is_assumed("one")
    index.bind(pod)
    assert not index.is_assumed("one")
    assert index.used("a")[0] == Amounts(50, 2048)


def test_only_changed_nodes_are_computed_again(index: ClusterIndex, computed: list[int]) -> None:
    best(index, share(50, 8))
    assert sorted(computed) == [2, 4]
    best(index, share(50, 8))
    index.set_node(node_state("a", 2))
    best(index, share(50, 8))
    assert sorted(computed) == [2, 4], "an equal inventory is no change"
    place(index, "one", share(50, 8))
    best(index, share(50, 8))
    assert sorted(computed) == [2, 2, 4]
    index.bind(place(index, "two", share(50, 8), assumed=True))
    computed.clear()
    best(index, share(50, 8))
    assert computed == [2], "the watch shows what was assumed: no second change"


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
    pod = place(index, "one", request(("app", 200, 0)), assumed=True)
    assert index.fits(pod)
    index.bind(PlacedPod(uid="two", node="a", request=share(10, 4), shares=((("GPU-a-1", Amounts(10, 1024)),),)))
    assert not index.fits(pod)
    index.remove("two")
    index.set_node(node_state("a", 2, cordoned=(1,)))
    assert not index.fits(pod)


def test_kept_results_are_bounded(computed: list[int]) -> None:
    index = ClusterIndex(max_results=100)
    for node in NODES:
        index.set_node(node)
    for cores in range(1, 100):
        best(index, share(cores, 4))
    computed.clear()
    for cores in range(50, 100):
        best(index, share(cores, 4))
    assert computed == [], "50 shapes with two results each are kept"
    best(index, share(49, 4))
    assert sorted(computed) == [2, 4]


def test_nodes_that_differ_by_name_alone_are_computed_once(computed: list[int]) -> None:
    index = ClusterIndex()
    names = [f"node-{number}" for number in range(20)]
    for name in names:
        index.set_node(node_state(name, 2, unhealthy=(0,) if name == "node-0" else ()))
    ranked = index.rank(share(50, 8), "binpack", names, 20)
    assert not isinstance(ranked, Rejection)
    assert {name: choice.shares[0][0][0] for name, choice in ranked} == {name: int(name == "node-0") for name in names}
    assert len(computed) == 2


def test_a_gpu_that_two_nodes_report_is_found_on_the_one_that_stays(index: ClusterIndex) -> None:
    """A GPU was moved, and the old node is removed later."""
    moved = replace(node_state("old", 2), name="new")
    index.set_node(moved)
    index.set_node(node_state("old", 2))
    index.remove_node("old")
    wanted = replace(share(60, 30), constraints=Constraints(use_uuids=(moved.gpus[0].uuid,)))
    assert index.order(wanted, "binpack", ("a", "new")) == ["new"]


def test_requests_that_differ_by_cpu_and_fit_nowhere_are_computed_once(index: ClusterIndex, computed: list[int]) -> None:
    texts = {
        index.order(replace(request(("app", 800, 0)), cpu_milli=cpu), "least-fragmentation", NAMES)
        for cpu in range(1000, 3000, 100)
    }
    assert len(texts) == 1
    assert sorted(computed) == [2, 4]


def cpu_free(index: ClusterIndex, name: str, without_gpus: Mapping[str, int]) -> int | None:
    cpu_milli = state.cpu_milli if (state := index.node(name)) is not None else None
    used = sum(pod.request.cpu_milli for pod in index.pods_on(name).values()) + without_gpus.get(name, 0)
    return None if cpu_milli is None else max(0, cpu_milli - used)


def brute_force(
    index: ClusterIndex, wanted: PodRequest, policy: Policy, names: Iterable[str], without_gpus: Mapping[str, int]
) -> tuple[list[str], str]:
    """All nodes that fit in their order, or the reasons why none does, computed node by node. `without_gpus`: CPU of other pods."""
    fits, misfits = [], []
    for name in names:
        found = index.choose_on(name, "", wanted, policy)
        if isinstance(found, NodeChoice):
            fits.append((found.rank_with(cpu_free(index, name, without_gpus), wanted.cpu_milli, 80), name))
        else:
            misfits.append((name, found))
    return [name for _, name in sorted(fits)], "" if fits else explain(misfits)


@settings(max_examples=30)
@given(st.data())
def test_answers_are_those_of_a_computation_from_scratch(data: st.DataObject) -> None:
    """After any changes, and with any shapes in between."""
    index, names = ClusterIndex(), ("a", "b", "c", "d")
    shapes = (
        share(30, 8),
        share(60, 30),
        request(("app", 100, 0)),
        request(("app", 200, 0)),
        replace(share(30, 8), cpu_milli=5000),
        replace(request(("app", 100, 0)), cpu_milli=20_000),
        replace(share(60, 30), constraints=Constraints(use_uuids=("GPU-a-1", "GPU-c-0"))),
        replace(share(60, 30), constraints=Constraints(avoid_uuids=("GPU-b-0", "GPU-b-1"))),
    )
    without_gpus: dict[str, int] = {}
    for step in range(data.draw(st.integers(1, 16))):
        name = data.draw(st.sampled_from(names))
        match data.draw(st.sampled_from(["node", "no node", "bind", "remove", "cpu", "ask", "ask"])):
            case "node":
                cordoned = data.draw(st.sampled_from([(), (1,)]))
                cpu_milli = data.draw(st.sampled_from([None, 9000, 30_000]))
                index.set_node(
                    replace(node_state(name, data.draw(st.sampled_from([2, 3])), cordoned=cordoned), cpu_milli=cpu_milli)
                )
            case "cpu":
                without_gpus[name] = data.draw(st.sampled_from([0, 1000, 12_000]))
                index.use_cpu(f"cpu-{name}", name, without_gpus[name])
            case "no node" if index.node(name) is not None:
                index.remove_node(name)
            case "bind":
                wanted = data.draw(st.sampled_from(shapes))
                gpus = range(wanted.containers[0].gpus)
                amounts = Amounts(wanted.containers[0].cores_per_gpu, wanted.containers[0].memory_mebibytes)
                shares = (tuple((f"GPU-{name}-{gpu}", amounts) for gpu in gpus),)
                index.bind(PlacedPod(uid=f"pod-{step}", node=name, request=wanted, shares=shares))
            case "remove":
                index.remove(f"pod-{data.draw(st.integers(0, step))}")
            case "ask":
                wanted, policy = data.draw(st.sampled_from(shapes)), data.draw(st.sampled_from(POLICIES))
                offered = data.draw(st.lists(st.sampled_from((*names, "unknown")), min_size=1, unique=True))
                found = index.order(wanted, policy, offered)
                fits, text = brute_force(index, wanted, policy, offered, without_gpus)
                assert found == (fits or Rejection(text))
