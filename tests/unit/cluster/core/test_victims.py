"""Which pods are evicted from a node so that another pod fits on its GPUs."""

from collections.abc import Set
from functools import partial
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.index import used_on
from gpumgr.cluster.core.node import NodeState, Used
from gpumgr.cluster.core.request import PlacedPod, PodRequest
from gpumgr.cluster.core.victims import Evictable, Eviction, Preemptor, fewest, find_eviction
from gpumgr.common.units import Amounts
from tests import cluster_states
from tests.cluster_states import expect, hami, node_state, request, share

NODE = node_state("a", 4)
WHOLE = request(("app", 100, 0))
evict = partial(cluster_states.evict, node=NODE)


def held(uid: str, gpus: str, cores: int, priority: int = 0, node: NodeState = NODE) -> PlacedPod:
    """`gpus`: their positions, one digit each; one block of memory, or whole GPUs."""
    wanted = request(("app", 100 * len(gpus), 0)) if cores == 100 else share(cores, 1)
    shares = tuple((node.gpus[int(gpu)].uuid, Amounts(cores, 256)) for gpu in gpus)
    return PlacedPod(uid=uid, node=node.name, request=wanted, shares=(shares,), priority=priority)


def test_what_kube_scheduler_proposes_stays_unless_gpus_alone_are_short() -> None:
    pods = [held(f"half{gpu}", gpu, 50, int(gpu)) for gpu in "0123"]
    full = [held(f"{name}{gpu}", gpu, 50) for gpu in "0123" for name in "ab"]
    found = expect(Eviction, evict(full, WHOLE, proposed=frozenset({"a1", "a2"})))
    assert len(found.victims) == 2
    assert len({uid[1] for uid in found.victims}) == 1, "both of one GPU, though kube-scheduler proposed one of each of two"
    found = expect(Eviction, evict(full, WHOLE, proposed=frozenset({"cpu-only", "a1"})))
    assert found.victims == {"cpu-only", "a1", "b1"}
    found = expect(Eviction, evict(pods[:2], WHOLE, proposed=frozenset({"half0"})))
    assert found.victims == {"half0"}, "the node has enough in total, so it is short of something else"


def test_pods_that_end_anyway_cost_nothing() -> None:
    pods = [held("ends", "0", 100), held("h", "1", 100, 20), *[held(f"low{gpu}", gpu, 100) for gpu in "23"]]
    found = expect(Eviction, evict(pods, WHOLE, ending=frozenset({"ends", "elsewhere"})))
    assert (found.victims, found.choice.shares[0][0][0]) == (frozenset({"ends"}), 0)
    found = expect(Eviction, evict(pods, request(("app", 200, 0)), ending=frozenset({"ends"})))
    assert len(found.victims) == 1
    found = expect(Eviction, evict(pods, WHOLE, ending=frozenset({"h"})))
    assert (found.victims, found.choice.shares[0][0][0]) == (frozenset(), 1), "it ends by itself, and must not be named"
    found = expect(Eviction, evict(pods, WHOLE, ending=frozenset({"ends"}), unbound=frozenset({"ends"})))
    assert found.victims == frozenset(), "kube-scheduler refuses a victim that is not on the node"


def test_gpus_that_are_not_offered_are_not_freed() -> None:
    node = node_state("a", 2, unhealthy=(0,), cordoned=(1,))
    assert evict([held("low", "0", 100, node=node), held("too", "1", 100, node=node)], WHOLE, node=node) is None


def test_pods_that_are_not_bound_are_no_victims_and_give_way_to_a_higher_priority() -> None:
    pods = [held("kept", "0", 100, 5), held("equal", "1", 100, 10), *[held(f"low{gpu}", gpu, 100) for gpu in "23"]]
    found = expect(Eviction, evict(pods, WHOLE, unbound=frozenset({"kept", "equal"})))
    assert (found.victims, found.choice.shares[0][0][0]) == (frozenset(), 0)


def test_the_quota_counts_what_the_victims_held() -> None:
    pods = [held(f"p{gpu}", gpu, 60) for gpu in "01"]

    def within_quota(used: Used, uids: Set[str]) -> NodeChoice | Misfit | Rejection:
        return choose(NODE, used, WHOLE, "binpack") if "p1" in uids else Rejection("")

    preemptor = Preemptor(WHOLE, 1, within_quota)
    by_uid = {pod.uid: pod for pod in pods}
    found = expect(Eviction, find_eviction(NODE, by_uid, preemptor))
    assert found.victims == {"p1"}, "though two GPUs are free"
    assert find_eviction(NODE, by_uid, replace(preemptor, evicts=frozenset({"p0"}))) is None
    only = replace(preemptor, evicts=frozenset({"p1"}))
    assert find_eviction(NODE, by_uid, only, proposed=frozenset({"p1", "without-gpus"})) is None
    assert find_eviction(NODE, by_uid, only, proposed=frozenset({"p1"})) is not None


def test_gpus_that_the_node_reports_and_that_are_not_known_count() -> None:
    node = node_state("a", 2, reported_shares={"agent": ((1, Amounts(100, 16384)),), "foreign": ((0, Amounts(10, 256)),)})
    pods = [PlacedPod(uid=uid, node="a", request=share(80, 1)) for uid in ("agent", "unknown")]
    found = expect(Eviction, evict(pods, WHOLE, node=node))
    assert found.victims == {"agent"}, "the other GPU has an allocation of no pod"
    found = expect(Eviction, evict(pods[1:], share(50, 1), node=node_state("a", 1)))
    assert found.victims == {"unknown"}


@pytest.mark.parametrize(("priority", "victims"), [(0, {"h"}), (100, None)])
def test_replicas_of_pods_that_the_node_reports_count(priority: int, victims: set[str] | None) -> None:
    node = node_state("a", 1, reported_shares={"h": ((0, Amounts(10, 1000, replicas=1)),)})
    node = replace(node, gpus=(replace(node.gpus[0], replicas=1),))
    wanted = hami(cores=10, memory=1000)
    found = evict([PlacedPod(uid="h", node="a", request=wanted, priority=priority)], wanted, node=node)
    assert (found.victims if found else None) == victims


def test_the_work_on_a_node_with_many_gpus_is_bounded() -> None:
    """From each of 64 GPUs it would be four times as much."""
    pods = [Evictable(f"p{gpu}-{number}", 0, frozenset({gpu}), 10) for gpu in range(64) for number in range(10)]
    calls = 0

    def fits(uids: frozenset[str]) -> bool:
        nonlocal calls
        calls += 1
        return sum(sum(f"p{gpu}-{number}" in uids for number in range(10)) == 10 for gpu in range(64)) >= 4

    found = expect(frozenset, fewest(pods, fits))
    assert len(found) == 40
    assert calls < 16 * (4 + 40) + 40 + 10


@pytest.mark.parametrize(("kinds", "free", "gpus", "cost"), [
    # The number of pods counts before the sum of priorities.
    ([(2, 40, 0), (0, 10, 2), (0, 50, 2), (1, 20, 1), (1, 60, 2), (3, 50, 2), (2, 20, 1)], 50, 2, (2, 2, 4)),
    # The next GPU is chosen by priorities.
    ([(2, 60, 2), (0, 30, 0), (3, 40, 1), (3, 40, 1), (1, 20, 2), (2, 30, 2), (1, 40, 1)], 60, 2, (2, 3, 4)),
    # The search begins with several GPUs, and the best of the results is taken.
    ([(0, 10, 0), (0, 30, 2), (0, 20, 0), (2, 50, 0), (0, 30, 2), (1, 60, 2), (3, 20, 0)], 50, 2, (2, 2, 2)),
    # The smallest pods stay, among them the important ones.
    ([(1, 10, 1), (0, 60, 2), (0, 10, 0), (1, 10, 0), (0, 10, 1), (1, 40, 2), (1, 20, 2)], 60, 2, (2, 3, 6)),
    ([(0, 50, 0), (2, 10, 1), (2, 10, 0), (1, 100, 2), (0, 30, 2), (2, 50, 1), (2, 10, 2)], 60, 2, (2, 3, 3)),
    # The first GPUs are chosen by the number of their pods, then by priorities.
    ([(gpu // 2, 50, 0) for gpu in range(32)] + [(16, 100, 0)], 100, 1, (0, 1, 0)),
    ([(gpu // 2, 50, 1) for gpu in range(33)] + [(16, 50, 0)], 100, 1, (1, 2, 1)),
])  # fmt: skip
def test_of_many_pods_the_best_are_evicted(
    kinds: list[tuple[int, int, int]], free: int, gpus: int, cost: tuple[int, int, int]
) -> None:
    """From (GPU, cores, priority) of each pod. The preemptor needs `free` cores on each of `gpus` GPUs."""
    pods = [Evictable(f"p{number:02}", priority, frozenset({gpu}), cores) for number, (gpu, cores, priority) in enumerate(kinds)]

    def fits(uids: frozenset[str]) -> bool:
        freed = [sum(pod.cores for pod in pods if gpu in pod.gpus and pod.uid in uids) for gpu in range(17)]
        return sum(cores >= free for cores in freed) >= gpus

    found = [pod.priority for pod in expect(frozenset, fewest(pods, fits))]
    assert (max(found), len(found), sum(found)) == cost


PODS = st.lists(
    st.tuples(st.sampled_from(["0", "1", "2", "01", "12"]), st.sampled_from([20, 40, 60, 100]), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)
WANTED = st.sampled_from([share(50, 1), share(100, 1), WHOLE, request(("app", 200, 0)), request(("app", 60, 1), ("app", 60, 1))])


@settings(max_examples=300, deadline=None)
@example([("0", 20, 0), ("0", 20, 0), ("1", 20, 2), ("2", 20, 2)], request(("app", 200, 0)))
@example([("0", 20, 2), ("1", 20, 2), ("2", 20, 0), ("2", 20, 0), ("01", 100, 0)], request(("app", 200, 0)))
@example(
    [("0", 20, 0), ("0", 60, 2), ("1", 60, 0), ("1", 60, 0), ("2", 20, 0), ("2", 60, 2)], request(("app", 60, 1), ("app", 60, 1))
)
@given(PODS, WANTED)
def test_no_proper_subset_of_the_victims_is_enough_and_no_lower_priority(
    kinds: list[tuple[str, int, int]], wanted: PodRequest
) -> None:
    """Against all sets. Pods may hold more than there is: annotations of pods that others have bound."""
    node = node_state("a", 3)
    pods = [
        held(f"p{n}", gpus if cores == 100 else gpus[0], cores, priority, node) for n, (gpus, cores, priority) in enumerate(kinds)
    ]

    def fits(without: frozenset[str]) -> bool:
        return isinstance(
            choose(node, used_on(node, [pod for pod in pods if pod.uid not in without]), wanted, "binpack"), NodeChoice
        )

    low = [pod for pod in pods if pod.priority < 3]
    sets = [frozenset(pod.uid for pod in each) for size in range(len(low) + 1) for each in combinations(low, size)]
    enough = [each for each in sets if fits(each)]
    found = evict(pods, wanted, priority=3, node=node)
    assert (found is None) == (not enough)
    if found is None:
        return
    assert found.victims in enough
    assert not any(each < found.victims for each in enough)
    priority = {pod.uid: pod.priority for pod in pods}

    def cost(uids: frozenset[str]) -> tuple[int, int]:
        return max((priority[uid] for uid in uids), default=-1), len(uids)

    assert cost(found.victims) == min(map(cost, enough)), "as many as the best of all sets"
