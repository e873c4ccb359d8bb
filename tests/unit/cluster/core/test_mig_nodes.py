"""GPUs with dynamic MIG: which device a container gets, on which GPU, and the reason if none fits."""

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core import choose as choose_module
from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.core.explain import Rejection, explain
from gpumgr.cluster.core.index import ClusterIndex, named_shares, used_on
from gpumgr.cluster.core.node import NodeState, Used, summarize
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import NOTHING, PlacedPod, PodRequest
from gpumgr.cluster.core.victims import Eviction
from gpumgr.common.units import Amounts
from tests.cluster_states import constrained, evict, expect, hami, node_state, request, share, together, with_mig, with_replicas

ONE = with_mig(node_state("m", 1))
TWO = with_mig(node_state("m", 2))
#: GPU 0 is shared, GPU 1 has dynamic MIG.
MIXED = with_mig(with_replicas(node_state("m", 2), 10), 1)
SMALL, LARGE = hami(memory=5000), hami(memory=40000, cores=40)


def chosen(node: NodeState, wanted: PodRequest, used: Used | None = None) -> list[list[tuple[int, int, int, int]]] | str:
    """(GPU, cores, MiB, memory slices) of the containers, or the reason."""
    found = choose(node, used or (NOTHING,) * len(node.gpus), wanted, "binpack")
    if isinstance(found, Misfit):
        return explain([(1, "m", found)])
    assert all(amounts.replicas == 1 for shares in found.shares for _, amounts in shares)
    return [[(gpu, each.cores, each.memory_mebibytes, each.slices) for gpu, each in shares] for shares in found.shares]


def held(slices: int, cores: int = 14) -> Amounts:
    return Amounts(cores, 9984, 1, slices)


FULL, BEFORE_MIG = Amounts(98, 69888, 7, 0x7F), Amounts(10, 1000)
SICK = replace(TWO, gpus=(replace(TWO.gpus[0], healthy=False), TWO.gpus[1]))
REPORTED = replace(ONE, reported_shares={"foreign": ((0, Amounts(14, 9984, slices=1 << 6)),)})
ALONE = constrained(SMALL, unused=True)
NO_PLACE = "has no place for 1 MIG device with 5000 MiB"


@pytest.mark.parametrize(("node", "used", "wanted", "expected"), [
    # A container gets the smallest device that is large enough.
    (ONE, None, SMALL, [[(0, 14, 9984, 1 << 6)]]),
    (ONE, None, LARGE, [[(0, 42, 40448, 0xF0)]]),
    (ONE, None, hami(cores=100), [[(0, 100, 81152, 0xFF)]]),
    (ONE, None, hami(memory_percent=50), [[(0, 42, 40448, 0xF0)]]),
    (ONE, None, hami(memory=81153), "has no place for 1 MIG device with 81153 MiB"),
    (ONE, None, hami(gpus=2, memory=5000), "has no place for 2 MIG devices with 5000 MiB (1 free)"),
    (ONE, None, share(1, 1), "has no GPU with 1 free cores and 256 MiB (closest: GPU 0, 0 cores and 0 MiB)"),
    (ONE, None, request(("app", 100, 0)), "has no entirely free GPU (0 free)"),
    # A full GPU is passed over; otherwise the fuller one is taken.
    (TWO, (FULL, NOTHING), SMALL, [[(1, 14, 9984, 1 << 6)]]),
    (TWO, (held(1), NOTHING), SMALL, [[(0, 14, 9984, 1 << 6)]]),
    (TWO, (FULL, FULL), SMALL, NO_PLACE),
    (SICK, (NOTHING, FULL), SMALL, NO_PLACE),
    # Free memory that is not in one piece.
    (ONE, (held(0b0010_0010, 28),), LARGE, "has no place for 1 MIG device with 40000 MiB and 40 cores"),
    # What the node reports counts at its exact place.
    (REPORTED, used_on(REPORTED, ()), LARGE, [[(0, 42, 40448, 0x0F)]]),
    # A GPU with containers from before its MIG mode has no place.
    (ONE, (BEFORE_MIG,), SMALL, NO_PLACE),
    (TWO, (BEFORE_MIG, NOTHING), SMALL, [[(1, 14, 9984, 1 << 6)]]),
    # A pod can name the mode of its GPUs. All GPUs of a container have one mode.
    (MIXED, None, constrained(SMALL, modes=("mig",)), [[(1, 14, 9984, 1 << 6)]]),
    (MIXED, None, constrained(SMALL, modes=("hami-core",)), [[(0, 1, 5000, 0)]]),
    (MIXED, None, constrained(share(10, 4), modes=("mig",)),
     "has no GPU in mode mig with 10 free cores and 1 GiB (closest: GPU 1, 0 cores and 0 MiB)"),
    (MIXED, None, constrained(hami(gpus=2, memory=5000), modes=("mig",)),
     "has no place for 2 MIG devices with 5000 MiB in mode mig (1 free)"),
    (MIXED, None, hami(gpus=2, memory=5000), "has no room for 2 GPUs with 5000 MiB (1 free)"),
    (MIXED, None, hami(gpus=2, memory=20000), "has no room for 2 GPUs with 20000 MiB (1 free)"),
    # A pod of the policy mutex.
    (TWO, (held(1), NOTHING), ALONE, [[(1, 14, 9984, 1 << 6)]]),
    (TWO, (held(1), held(1)), ALONE, f"{NO_PLACE} without containers"),
])  # fmt: skip
def test_which_device_a_container_gets(node: NodeState, used: Used | None, wanted: PodRequest, expected: object) -> None:
    assert chosen(node, wanted, used) == expected


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        # The app container takes over the replica, and the device fits both.
        ((hami("init", memory=15000), hami(memory=5000)), [(0, 14, 20096, 0xC0)] * 2),
        ((hami("init", memory=5000), hami(memory=5000, cores=40)), [(0, 42, 40448, 0xF0)] * 2),
        ((hami("init", cores=100), SMALL), [(0, 100, 81152, 0xFF)] * 2),
        ((hami("init", memory=5000), hami("init", memory=15000), SMALL), [(0, 14, 20096, 0xC0)] * 3),
        # Only the first of them does.
        ((hami("init", memory=5000), SMALL, SMALL), [(0, 14, 9984, 1 << 6)] * 2 + [(0, 14, 9984, 1 << 5)]),
        ((hami("sidecar", memory=5000), SMALL), [(0, 14, 9984, 1 << 6), (0, 14, 9984, 1 << 5)]),
    ],
)
def test_one_device_for_an_init_container_and_the_container_that_takes_over(
    containers: tuple[PodRequest, ...], expected: list[tuple[int, int, int, int]]
) -> None:
    wanted = together(*containers)
    assert chosen(ONE, wanted) == [[each] for each in expected]
    found = expect(NodeChoice, choose(ONE, (NOTHING,), wanted, "binpack"))
    pod = PlacedPod(uid="p", node="m", request=wanted, shares=named_shares(ONE, found))
    different = {each[3]: each for each in expected}.values()
    total = sum((Amounts(cores, memory, 0, slices) for _, cores, memory, slices in different), NOTHING)
    assert replace(used_on(ONE, [pod])[0], replicas=0) == total


def test_a_device_that_is_too_small_for_its_second_container_stays_beside_the_new_one() -> None:
    """The second app container gets GPU 0 from the first init container, and the device of that one was chosen for the others."""
    containers = (hami("init", memory=5000), hami("init", gpus=2, memory=5000), hami(memory=5000), hami(memory=15000))
    found = expect(list, chosen(TWO, together(*containers)))
    (other,), (last,) = found[2:]
    assert other[0] != last[0]
    assert last[2] == 20096


def test_a_place_is_free_again_when_its_pod_ends() -> None:
    index = ClusterIndex()
    index.set_node(ONE)

    def place(uid: str, wanted: PodRequest) -> int:
        ranked = Question(index, wanted, "binpack").rank(["m"])
        if isinstance(ranked, Rejection):
            return 0
        shares = named_shares(ONE, ranked[0][1])
        index.bind(PlacedPod(uid=uid, node="m", request=wanted, shares=shares))
        return shares[0][0][1].slices

    assert [place(f"p{number}", SMALL) for number in range(8)] == [64, 32, 16, 8, 4, 2, 1, 0]
    for ended in ("p1", "p2"):
        index.remove(ended)
    assert place("pair", hami(memory=15000)) == 0b0011_0000
    index.remove("p3")
    assert index.used("m")[0].slices == 0b0111_0111
    assert [place("next", SMALL), place("more", SMALL)] == [0b1000, 0]


def test_a_placement_fits_only_as_long_as_its_place_and_mode_are_there() -> None:
    index = ClusterIndex()
    index.set_node(ONE)
    pod = PlacedPod(uid="p", node="m", request=SMALL, shares=((("GPU-m-0", held(64)),),))
    assert index.fits(pod)
    assert not index.fits(replace(pod, shares=((("GPU-m-0", Amounts(1, 5000, 1)),),)))
    index.bind(replace(pod, uid="other", request=LARGE, shares=((("GPU-m-0", Amounts(42, 40448, 1, 0xF0)),),)))
    assert not index.fits(pod)
    index.remove("other")
    index.set_node(with_replicas(node_state("m", 1), 10))
    assert not index.fits(pod)


@pytest.mark.parametrize(("used", "part"), [(FULL, "full"), (held(1), "partial")])
def test_a_full_gpu_of_mig_devices_counts_as_full(used: Amounts, part: str) -> None:
    totals, _ = summarize(ONE, (used,))
    assert {counted for (what, _, counted), count in totals.items() if what == "gpus" and count} == {part}


def test_the_pod_on_the_place_is_evicted_and_no_other() -> None:
    def pod(uid: str, start: int, priority: int = 0) -> PlacedPod:
        return PlacedPod(uid=uid, node="m", request=SMALL, shares=((("GPU-m-0", held(1 << start)),),), priority=priority)

    found = expect(Eviction, evict((pod("low", 6), pod("high", 1, 20), pod("low2", 5)), LARGE, ONE))
    assert found.victims == {"low", "low2"}
    assert found.choice.shares == (((0, Amounts(42, 40448, 1, 0xF0)),),)


def test_replicas_of_pods_that_the_node_reports_end_with_them() -> None:
    other = {f"p{start}": ((0, Amounts(14, 9984, 1, 1 << start)),) for start in range(7)}
    node = replace(ONE, reported_shares=other)
    found = expect(Eviction, evict((PlacedPod(uid=uid, node="m", request=SMALL) for uid in other), SMALL, node))
    assert len(found.victims) == 1


def test_the_place_on_gpus_with_equal_use_is_computed_once() -> None:
    """Many nodes have them; without this a new request takes three times as long."""
    before = choose_module._free_place.cache_info().misses
    for name in "abc":
        assert chosen(with_mig(node_state(name, 8)), hami(memory=5123)) == [[(0, 14, 9984, 1 << 6)]]
    assert choose_module._free_place.cache_info().misses == before + 1
