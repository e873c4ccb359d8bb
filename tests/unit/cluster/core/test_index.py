"""The index: which node is offered, what is assumed, and what is computed again."""

import sys
from collections.abc import Iterable, Mapping
from random import Random
from typing import get_args
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.cluster.core import index as index_module
from gpumgr.cluster.core import node_search
from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.core.explain import Rejection, explain
from gpumgr.cluster.core.index import ClusterIndex, named_shares
from gpumgr.cluster.core.node import NodeState, covers
from gpumgr.cluster.core.node_search import NodeSearch, Ranking
from gpumgr.cluster.core.profiles import FreeCores, Ranked
from gpumgr.cluster.core.question import Largest, Question
from gpumgr.cluster.core.request import PlacedPod, PodRequest, Policy, Shares
from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts
from gpumgr.placement.requests import UNCONSTRAINED, Constraints, ContainerKind
from tests.cluster_states import (
    REQUESTS,
    expect,
    fits,
    hami,
    index_of,
    node_state,
    outgrow,
    request,
    share,
    with_mig,
    with_replicas,
)

NODES = (node_state("a", 2), node_state("b", 4, near=((0, 1), (2, 3))))
NAMES = ("a", "b")
POLICIES: tuple[Policy, ...] = get_args(Policy)
TWO = request(("app", 40, 8), ("app", 30, 8))


@pytest.fixture
def index() -> ClusterIndex:
    return index_of(*NODES)


def best(index: ClusterIndex, wanted: PodRequest, policy: Policy = "binpack") -> tuple[str, NodeChoice]:
    ranked = fits(Question(index, wanted, policy).rank(NAMES))
    return ranked[0]


def place(index: ClusterIndex, uid: str, wanted: PodRequest, *, assumed: bool = False) -> PlacedPod:
    name, choice = best(index, wanted)
    state = expect(NodeState, index.node(name))
    pod = PlacedPod(uid=uid, node=name, request=wanted, shares=named_shares(state, choice))
    if assumed:
        index.assume(pod)
    else:
        index.bind(pod)
    return pod


def test_only_changed_nodes_are_computed_again(index: ClusterIndex, computed: list[int]) -> None:
    best(index, TWO)
    assert sorted(computed) == [2, 4]
    best(index, TWO)
    index.set_node(node_state("a", 2))
    best(index, TWO)
    assert sorted(computed) == [2, 4], "an equal inventory is no change"
    place(index, "one", share(50, 8))
    best(index, TWO)
    assert sorted(computed) == [2, 2, 4]
    index.bind(place(index, "two", share(50, 8), assumed=True))
    computed.clear()
    best(index, TWO)
    assert computed == [2], "the watch shows what was assumed: no second change"


def test_what_the_node_reports_counts_once_and_before_annotations(index: ClusterIndex) -> None:
    pod = place(index, "one", share(50, 8))
    index.set_node(node_state("a", 2, reported_shares={"one": ((1, Amounts(50, 2048)),), "foreign": ((1, Amounts(20, 256)),)}))
    assert [used.cores for used in index.used("a")] == [0, 70]
    index.remove(pod.uid)
    assert [used.cores for used in index.used("a")] == [0, 70], "the node's own report ends with its next inventory"


def test_a_pod_with_unknown_gpus_takes_likely_ones(index: ClusterIndex) -> None:
    index.bind(PlacedPod(uid="one", node="a", request=request(("app", 100, 0))))
    index.bind(PlacedPod(uid="two", node="a", request=share(50, 8), shares=((("GPU-gone", Amounts(50, 2048)),),)))
    assert [used.cores for used in index.used("a")] == [100, 50]


@pytest.mark.parametrize(
    ("wanted", "other"), [(share(1, 1), {}), (hami(memory=1000), {"u": ((0, Amounts(14, 9728, slices=1)),)})]
)
def test_a_pod_with_too_many_containers_and_unknown_gpus_has_all_of_them(wanted: PodRequest, other: Mapping[str, Shares]) -> None:
    """Also GPUs on which another pod has a MIG device. No choice is computed for it, which would take long."""
    node = node_state("a", 2, reported_shares=other)
    index = index_of(with_mig(node) if other else node)
    many = PodRequest(wanted.containers * 65)
    with patch.object(index_module, "choose", side_effect=AssertionError("computed")):
        index.bind(PlacedPod(uid="many", node="a", request=many))
        index.settle()
    assert isinstance(Question(index, wanted, "binpack").rank(["a"]), Rejection)
    index.remove("many")
    assert not isinstance(Question(index, wanted, "binpack").rank(["a"]), Rejection)


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


def test_kept_results_are_bounded(index: ClusterIndex, computed: list[int]) -> None:
    wanted = [request(("app", cores, 4), ("app", 10, 4)) for cores in range(1, 60)]
    for each in wanted:
        best(index, each)
    computed.clear()
    for each in wanted[-16:]:
        best(index, each)
    assert computed == [], "the last ones are kept"
    best(index, wanted[0])
    assert sorted(computed) == [2, 4]


def test_a_question_that_keeps_nothing_displaces_nothing(index: ClusterIndex, computed: list[int]) -> None:
    best(index, TWO)
    Question(index, nowhere := request(("app", 800, 0)), "binpack").rank(NAMES)
    computed.clear()
    for cores in range(1, 60):
        wanted = request(("app", cores, 4), ("app", 10, 4))
        assert not isinstance(Question(index, wanted, "binpack", keep=False).rank(NAMES), Rejection)
    computed.clear()
    best(index, TWO)
    Question(index, nowhere, "binpack").rank(NAMES)
    assert computed == []


def test_shares_and_named_gpus_need_no_choice_on_each_node(computed: list[int]) -> None:
    """So that many different requests cost little."""
    index = ClusterIndex()
    names = [f"node-{number}" for number in range(50)]
    for number, name in enumerate(names):
        index.set_node(node_state(name, 2))
        index.bind(PlacedPod(uid=name, node=name, request=share(1 + number, 1), shares=(((0, Amounts(1 + number, 256)),),)))
    for cores in range(1, 100):
        assert not isinstance(Question(index, share(cores, 1 + cores % 64), "least-fragmentation").rank(names), Rejection)
        assert isinstance(Question(index, share(cores, 65), "least-fragmentation").rank(names), Rejection)
    for wanted in (request(("app", 200, 0)), TWO):
        pinned = replace(wanted, constraints=Constraints(use_uuids=("GPU-gone",)))
        rejected = Question(index, pinned, "binpack").rank(names)
        assert rejected == Rejection("for the 50 nodes with enough in total: 50 have no GPU of UUID GPU-gone")
    assert computed == []


def test_a_set_of_nodes_is_one_object_whatever_the_order_and_small(index: ClusterIndex) -> None:
    """Each waiting pod has one, and kube-scheduler sends the names in another order each time."""
    for number in range(5000):
        index.set_node(node_state(f"node-{number}", 1))
    names = [f"node-{number}" for number in range(5000)]
    first = index.node_set(names)
    assert index.node_set(names[::-1]) is first
    assert index.node_set(names[1:]) != first
    assert sys.getsizeof(first) < 1000
    index.remove_node("node-7")
    assert index.node_set(names) is first
    index.set_node(node_state("node-7", 1))
    assert index.node_set(names) == index.node_set(names[::-1])
    assert sorted(index.names(index.node_set(names))) == sorted(names)


def test_a_set_of_nodes_has_those_that_come_or_come_back_and_no_others() -> None:
    """A pod waits while nodes are removed and made anew."""
    chance, index, names = Random(1), ClusterIndex(), [f"node-{number}" for number in range(8)]
    known, kept = set[str](), list[tuple[set[str], int]]()
    for _ in range(500):
        offered = chance.sample(names, 4)
        kept.append((set(offered), index.node_set(offered)))
        name = chance.choice(names)
        if name in known:
            index.remove_node(name)
        else:
            index.set_node(node_state(name, chance.choice((1, 2))))
        known ^= {name}
        if chance.random() < 0.5:
            index.settle()
        for asked, nodes in kept:
            assert asked & known <= set(index.names(nodes)) <= asked


def test_nodes_are_numbered_again_after_many_have_gone(index: ClusterIndex) -> None:
    before, numbering, version = index.node_set(["b"]), index.numbering, index.version
    outgrow(index)
    index.set_node(node_state("new", 1))
    list(index.compacting())
    assert index.numbering != numbering
    assert index.node_set(["b"]) != before or index.node_set(["a"]) != before << 1
    assert Question(index, share(50, 8), "binpack").order(["b"]) == ["b"]
    assert index.names(index.changed_since(version)) == ["new"], "removed nodes are forgotten"


def test_changes_while_nodes_are_numbered_again_are_kept(index: ClusterIndex) -> None:
    """The steps are pauses for other tasks, because 5,000 nodes take 0.2 s."""
    for number in range(1200):
        index.set_node(node_state(f"node-{number}", 1))
    index.settle()
    for number in range(20, 1200):
        index.remove_node(f"node-{number}")
    numbering, question = index.numbering, Question(index, TWO, "binpack")
    before = question.order([*NAMES, "node-1"])
    steps = index.compacting()
    for number in range(10):
        next(steps)
        assert index.numbering == numbering
        index.set_node(node_state(f"new-{number}", 1))
        index.remove_node(f"node-{number + 3}")
        index.settle()
        assert question.order([*NAMES, "node-1"]) == before
    assert [*steps]
    assert index.numbering != numbering
    assert question.order([*NAMES, "node-1"]) == before, "it does not answer from nodes with the former numbers"
    left = sorted([*NAMES, *(f"new-{number}" for number in range(10)), *(f"node-{each}" for each in (0, 1, 2, *range(13, 20)))])
    assert sorted(index.names(index.profiles.all)) == left
    index.remove_node("a")
    assert Question(index, TWO, "binpack").order(left) == [each for each in question.order(left) if each != "a"]


def test_a_rejection_is_not_given_for_other_nodes_that_have_its_numbers_now() -> None:
    index, wanted = index_of(node_state("z", 1)), request(("app", 200, 0))
    index.settle()
    index.set_node(node_state("a", 2))
    outgrow(index)
    before = index.node_set(["z"])
    assert isinstance(Question(index, wanted, "binpack").rank(before), Rejection)
    list(index.compacting())
    assert index.node_set(["a"]) == before
    assert not isinstance(Question(index, wanted, "binpack").rank(["a"]), Rejection)


def test_names_that_no_node_has_are_bounded(index: ClusterIndex) -> None:
    """A node with such a name may come later."""
    many = [f"unknown-{number}" for number in range(3000)]
    for each in many:
        index.node_set([each, "b"])
    assert 1000 < index.node_set([*many, "b"]).bit_count() < 1100
    assert Question(index, share(50, 8), "binpack").order([*many, "b"]) == ["b"]
    index.set_node(node_state(many[-1], 1))
    assert set(Question(index, share(50, 8), "binpack").order([many[-1], "b"])) == {"b", many[-1]}


def test_of_few_nodes_only_their_own_rooms_are_examined(index: ClusterIndex) -> None:
    """A cluster of 5,000 nodes may have thousands of rooms."""
    nodes = index.node_set(["b"])
    question = Question(index, share(50, 8), "binpack", keep=False)
    index.profiles.rooms = []
    assert question.order(nodes) == ["b"]
    assert Largest.on(index, nodes).may_fit(share(50, 8))


def test_nodes_that_differ_by_name_alone_are_computed_once(computed: list[int]) -> None:
    names = [f"node-{number}" for number in range(20)]
    index = index_of(*(node_state(name, 2, unhealthy=(0,) if name == "node-0" else ()) for name in names))
    ranked = fits(Question(index, TWO, "binpack").rank(names, 20))
    assert {name: choice.shares[0][0][0] for name, choice in ranked} == {name: int(name == "node-0") for name in names}
    assert len(computed) == 2


def test_a_gpu_that_two_nodes_report_is_found_on_the_one_that_stays(index: ClusterIndex) -> None:
    """A GPU was moved, and the old node is removed later."""
    moved = replace(node_state("old", 2), name="new")
    index.set_node(moved)
    index.set_node(node_state("old", 2))
    index.remove_node("old")
    wanted = replace(share(60, 30), constraints=Constraints(use_uuids=(moved.gpus[0].uuid,)))
    assert Question(index, wanted, "binpack").order(("a", "new")) == ["new"]


def test_requests_that_differ_by_cpu_and_fit_nowhere_are_computed_once(index: ClusterIndex, computed: list[int]) -> None:
    texts = {
        expect(
            Rejection, Question(index, replace(request(("app", 800, 0)), cpu_milli=cpu), "least-fragmentation").rank(NAMES)
        ).text
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
            alone = index_of(expect(NodeState, index.node(name)))
            for pod in index.pods_on(name).values():
                alone.bind(pod)
            alone.use_cpu("", name, without_gpus.get(name, 0))
            alone.settle()
            fits.append((NodeSearch(wanted, policy, alone.profiles, keep=False).rank_on(name, found), name))
        else:
            misfits.append((1, name, expect(Misfit, found)))
    return [name for _, name in sorted(fits)], "" if fits else explain(misfits)


A100, T4 = "NVIDIA A100-SXM4-80GB", "Tesla T4"
#: With each of the requests.
RESTRICTED: tuple[Constraints, ...] = (
    UNCONSTRAINED,
    Constraints(use_models=("a100",)),
    Constraints(avoid_models=("a100",)),
    Constraints(use_uuids=("GPU-a-1", "GPU-c-0")),
    Constraints(avoid_uuids=("GPU-b-0", "GPU-b-1")),
    Constraints(same_numa_node=True),
    Constraints(unused=True),
    Constraints(modes=("mig",)),
    Constraints(modes=("hami-core",), use_models=("a100", "t4")),
)
#: GPUs that are in use: (cores, MiB, replicas). Blocks are full, and not.
IN_USE = ((0, 0, 0), (30, 2048, 0), (30, 2047, 1), (30, 2303, 1), (60, 8192, 0), (60, 9000, 2), (99, 16000, 3), (100, 16384, 0))


@st.composite
def any_node(draw: st.DrawFn, name: str) -> NodeState:
    count = draw(st.sampled_from([2, 3, 4]))
    pick = st.tuples(*[st.sampled_from([A100, T4, A100, ""])] * count)
    state = node_state(
        name,
        count,
        near=((0, 1),),
        cordoned=draw(st.sampled_from([(), (), (1,)])),
        unhealthy=draw(st.sampled_from([(), (), (0,)])),
        models=draw(pick),
        numa=draw(st.sampled_from([(), tuple(gpu // 2 for gpu in range(count))])),
        naming=draw(st.sampled_from(["uuid", "uuid", "none"])),
    )
    state = with_replicas(state, draw(st.sampled_from([0, 3])))
    if draw(st.integers(0, 4)) == 0:
        state = with_mig(state, *draw(st.sampled_from([(0,), (0, 1)])))
    held = {
        f"held-{gpu}": ((gpu, Amounts(*draw(st.sampled_from(IN_USE)))),)
        for gpu in range(count)
        if not state.gpus[gpu].mig and draw(st.booleans())
    }
    scaling = draw(st.sampled_from([None, None, (2.0, 0.5)]))
    gpus = tuple(replace(gpu, scaling=scaling) for gpu in state.gpus)
    return replace(state, gpus=gpus, reported_shares=held, cpu_milli=draw(st.sampled_from([None, 4000, 9000, 30_000])))


def test_a_node_short_of_cpu_wins_with_a_gpu_that_is_less_full() -> None:
    """The search begins with the fullest GPUs, and must not end there: on node b the pod takes cores that no other pod could use."""
    index, wanted = ClusterIndex(), replace(share(30, 1), cpu_milli=100)
    for name, cores, cpu_milli in (("a", 70, 100_000), ("b", 50, 1000), ("c", 40, 100_000)):
        index.set_node(replace(node_state(name, 1, reported_shares={"held": ((0, Amounts(cores, 256)),)}), cpu_milli=cpu_milli))
    fits, _ = brute_force(index, wanted, "least-fragmentation", "abc", {})
    assert fits == ["b", "a", "c"]
    for most in (1, 2, None):
        assert Question(index, wanted, "least-fragmentation").order("abc", most) == fits[:most]


def test_of_nodes_with_equal_rooms_the_first_by_name_with_enough_cpu_is_taken() -> None:
    """Also if the nodes became known in another order."""
    index, wanted = ClusterIndex(), replace(share(30, 1), cpu_milli=5000)
    for name, cpu_milli in (("d", 90_000), ("a", 6000), ("c", 100_000), ("b", 100_000)):
        index.set_node(replace(node_state(name, 1, reported_shares={"held": ((0, Amounts(50, 256)),)}), cpu_milli=cpu_milli))
        index.settle()
    for most in (1, 2, None):
        assert Question(index, wanted, "least-fragmentation").order("abcd", most) == ["b", "c", "d", "a"][:most]
        assert Question(index, wanted, "binpack").order("abcd", most) == ["a", "b", "c", "d"][:most]


def test_of_gpus_with_equal_use_the_one_of_the_allowed_model_is_taken() -> None:
    held = {"held": ((0, Amounts(50, 256)), (1, Amounts(50, 256)))}
    index = index_of(node_state("a", 2, models=(T4, A100), reported_shares=held))
    ranked = Question(index, replace(share(30, 1), constraints=Constraints(use_models=("a100",))), "binpack").rank("a")
    assert ranked == [("a", NodeChoice(shares=(((1, Amounts(30, 256)),),), taken={1: Amounts(30, 256)}))]


@given(
    free=st.integers(0, 800),
    usable=st.integers(0, 800),
    taken=st.tuples(st.integers(0, 800), st.integers(0, 800), st.integers(-100, 800)),
    cpu_free=st.none() | st.integers(0, 80_000),
    cpu_milli=st.integers(0, 20_000),
)
def test_no_rank_is_below_the_one_with_which_nodes_are_left_out(
    free: int, usable: int, taken: tuple[int, int, int], cpu_free: int | None, cpu_milli: int
) -> None:
    before = FreeCores(max(free, usable), usable)
    pod = FreeCores(min(taken[0], before.free), min(taken[1], usable), taken[2])
    if before.free - pod.free >= usable - pod.usable:  # as on any node
        short = cpu_free is not None and cpu_free < usable * 80
        ranking, ranked = Ranking(PodRequest(cpu_milli=cpu_milli), "least-fragmentation", 80), Ranked((), pod)
        assert ranking.least(ranked, short_of_cpu=short) <= ranking.exact(ranked, before, cpu_free)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_answers_are_those_of_a_computation_from_scratch(data: st.DataObject) -> None:
    """After any changes, and with any requests in between."""
    names, without_gpus = ("a", "b", "c", "d", "e", "f"), dict[str, int]()
    index = index_of(*(data.draw(any_node(name)) for name in names))
    for step in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(names))
        match data.draw(st.sampled_from(["node", "no node", "bind", "remove", "cpu", "ask", "ask", "ask"])):
            case "node":
                index.set_node(data.draw(any_node(name)))
            case "cpu":
                without_gpus[name] = data.draw(st.sampled_from([0, 1000, 12_000]))
                index.use_cpu(f"cpu-{name}", name, without_gpus[name])
            case "no node" if index.node(name) is not None:
                index.remove_node(name)
            case "bind":
                index.bind(PlacedPod(uid=f"pod-{step}", node=name, request=data.draw(st.sampled_from(REQUESTS))))
            case "remove":
                index.remove(f"pod-{data.draw(st.integers(0, step))}")
            case "ask":
                wanted, policy = data.draw(st.sampled_from(REQUESTS)), data.draw(st.sampled_from(POLICIES))
                wanted = replace(
                    wanted,
                    constraints=data.draw(st.sampled_from(RESTRICTED)),
                    cpu_milli=data.draw(st.sampled_from([0, 500, 5000])),
                    node_policy=data.draw(st.sampled_from([None, None, "binpack", "spread"])),
                )
                offered = data.draw(st.lists(st.sampled_from((*names, "unknown")), min_size=1, unique=True))
                fits, text = brute_force(index, wanted, policy, offered, without_gpus)
                assert not fits or Largest.on(index, index.node_set(offered)).may_fit(wanted)
                if data.draw(st.booleans()):
                    list(Question(index, wanted, policy).examine(offered))
                most = data.draw(st.sampled_from([None, 1, 2]))
                assert Question(index, wanted, policy).order(offered, most) == fits[:most]
                assert Question(index, wanted, policy).fits(offered) == bool(fits)
                ranked = Question(index, wanted, policy).rank(offered, 2)
                choices = [(name, index.choose_on(name, "", wanted, policy)) for name in fits[:2]]
                assert ranked == (choices or Rejection(text)), "a room decides as the evaluators do"


def test_a_pod_with_several_containers_is_compared_on_the_first_profiles_that_fit(
    monkeypatch: pytest.MonkeyPatch, computed: list[int]
) -> None:
    monkeypatch.setattr(node_search, "_MOST_CHOICES", 6)
    monkeypatch.setattr(node_search, "_FEWEST_PROFILES", 1)
    made, names = ClusterIndex(), [f"n{number:02}" for number in range(12)]
    for number, name in enumerate(names):
        made.set_node(node_state(name, 1))
        taken = (((0, Amounts(5 + number, 2048)),),)
        made.bind(PlacedPod(uid=f"on-{name}", node=name, request=share(5 + number, 8), shares=taken))
    list(Question(made, TWO, "binpack").examine(names))
    ranked = fits(Question(made, TWO, "binpack").rank(names))
    assert ranked[0][0] == "n02", "the best of the three"
    assert len(computed) == 3
    assert Question(made, TWO, "binpack").order(names) == names[::-1], "all are ordered"
    assert len(computed) == 12
    for name in names[:-1]:
        made.set_node(replace(node_state(name, 1), gpus=tuple(replace(gpu, healthy=False) for gpu in node_state(name, 1).gpus)))
    assert Question(made, TWO, "binpack", keep=False).fits(names)
    ranked = fits(Question(made, TWO, "binpack").rank(names))
    assert ranked[0][0] == "n11", "the only one that fits"


@pytest.mark.parametrize(
    ("containers", "examined"),
    [
        ([("app", 31 + number, 1) for number in range(30)], 34),  # 1,365 cores
        ([("app", 1, 1 + number) for number in range(64)], 32),  # 520 GiB
        ([*(("init", 1 + number, 1) for number in range(63)), ("app", 900, 0)], 32),
        ([*(("init", 1 + number, 1) for number in range(31)), ("app", 200, 0)], 32),
    ],
)
def test_a_pod_with_many_containers_that_fits_nowhere_is_examined_on_few_nodes(
    containers: list[tuple[ContainerKind, int, int]], examined: int, computed: list[int]
) -> None:
    """What the pod takes in total rules most nodes out. A rejection has the reasons of the nodes that have the most free."""
    names = [f"n{number:03}" for number in range(200)]
    held = [{"held": ((0, Amounts(1 + number % 98, number + 1)), (1, Amounts(1, 1)))} for number in range(200)]
    made = index_of(*(node_state(name, 2, reported_shares=each) for name, each in zip(names, held, strict=True)))
    wanted = request(*containers)
    list(Question(made, wanted, "binpack").examine(names))
    ranked = Question(made, wanted, "binpack").rank(names)
    assert len(computed) == examined
    assert isinstance(ranked, Rejection)
    assert ranked.text.startswith("for the 200 nodes with enough in total: ")
    assert ranked.text.endswith(f", {200 - examined} have less free")
    assert Question(made, wanted, "binpack").rank(names) == ranked
    assert len(computed) == examined


@settings(max_examples=200)
@given(st.data())
def test_a_pod_that_fits_takes_no_less_than_is_required_in_total(data: st.DataObject) -> None:
    """Otherwise nodes on which it fits would be left out."""
    kinds = st.sampled_from(get_args(ContainerKind))
    shares = st.tuples(kinds, st.sampled_from([10, 30, 60, 100, 200]), st.sampled_from([0, 8, 30]))
    containers = data.draw(st.lists(shares.filter(lambda each: each[1] >= 100 or each[2] > 0), min_size=1, max_size=6))
    try:
        wanted = request(*containers)
    except Refusal:
        return
    node = node_state("a", 4)
    choice = choose(node, (Amounts(),) * 4, wanted, data.draw(st.sampled_from(POLICIES)))
    if isinstance(choice, NodeChoice):
        taken = sum(choice.taken.values(), Amounts())
        assert covers(taken, wanted.in_total)


def test_what_follows_from_changes_is_computed_in_steps(index: ClusterIndex) -> None:
    index.settle()
    for name in ("c", "d", "e"):
        index.set_node(node_state(name, 2))
    steps = index.settling()
    next(steps)
    index.remove_node("d")
    assert Question(index, TWO, "binpack").order(["c", "d", "e"]) == ["c", "e"], "a query computes the rest"
    assert list(steps) == []


def test_the_same_assumption_again_and_its_binding_are_no_changes() -> None:
    index = index_of(node_state("a", 2))
    pod = PlacedPod(uid="one", node="a", request=share(40, 4), shares=((("GPU-a-0", Amounts(40, 1024)),),))
    index.assume(pod)
    before = index.version
    index.assume(replace(pod))
    assert (index.version, "one" in index.assumed) == (before, True)
    index.bind(replace(pod))
    assert (index.version, "one" in index.assumed) == (before, False)
    index.assume(replace(pod, shares=((("GPU-a-1", Amounts(40, 1024)),),)))
    assert index.version != before
