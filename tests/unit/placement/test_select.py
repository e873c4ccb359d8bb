"""What requests mean, what refusals say, what is required or scarce, and which of several sets is chosen."""

from functools import partial
from random import Random

import pytest

from gpumgr.common.errors import Refusal
from gpumgr.placement.devices import Level, Topology, score_matrix
from gpumgr.placement.link import PartitionSearch, TooManySets, choose_set
from gpumgr.placement.select import GpuCapacity, check_request, place
from tests.unit.placement.nodes import capacities, node

PAIRS = node(4, lambda a, b: (Level.PIX if a // 2 == b // 2 else Level.SYS, 0))


def gpu(index: int, cores: int = 100, blocks: int = 320, healthy: bool = True, note: str | None = None) -> GpuCapacity:
    whole = (cores, blocks) == (100, 320)
    return GpuCapacity(index=index, cores_free=cores, memory_blocks_free=blocks, entirely_free=whole, healthy=healthy, note=note)


@pytest.mark.parametrize(("cores", "blocks"), [(1, 1), (99, 1), (100, 0), (100, 5), (200, 0), (800, 1)])
def test_valid_requests_pass(cores: int, blocks: int) -> None:
    check_request(cores, blocks)


@pytest.mark.peer_bug("B18: its scheduler rounds 150 cores down to one GPU")
@pytest.mark.parametrize(
    ("cores", "blocks", "words"),
    [
        (0, 0, "nothing was requested"),
        (0, 4, "4 memory blocks requested without cores"),
        (50, 0, "50 cores requested without memory"),
        (101, 4, "must be a multiple of 100"),
        (150, 0, "150 cores requested"),
        (-1, 4, "less than 0"),
        (100, -4, "less than 0"),
    ],
)
def test_invalid_requests_are_refused(cores: int, blocks: int, words: str) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        check_request(cores, blocks)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("cores", [0, 150])
def test_place_refuses_cores_of_an_unknown_container_that_no_gpus_have(cores: int) -> None:
    with pytest.raises(Refusal) as caught:
        place(PAIRS, capacities(4), cores=cores, memory_blocks=0)
    assert caught.value.code == "invalid_request"


def refused(gpus: list[GpuCapacity], cores: int, blocks: int, required: tuple[int, ...] = ()) -> Refusal:
    with pytest.raises(Refusal) as caught:
        place(PAIRS, gpus, cores=cores, memory_blocks=blocks, required=required)
    return caught.value


@pytest.mark.peer_bug("B20: it counts the memory of all GPUs as one")
def test_the_refusal_of_a_share_lists_the_free_capacity_of_each_gpu() -> None:
    refusal = refused([gpu(0, 40, 100), gpu(1, 100, 10)], 50, 20)
    assert refusal.code == "no_fit"
    assert str(refusal) == (
        "no GPU has 50 cores and 20 memory blocks free; free: GPU0 40 cores and 100 memory blocks, GPU1 100 cores and 10 memory blocks"
    )


def test_whole_gpus_that_fit_nowhere() -> None:
    refusal = refused([gpu(0), gpu(1, 40, 100)], 200, 0)
    assert str(refusal) == (
        "2 entirely free GPUs requested, 1 of 2 are free; free: GPU0 entirely (320 memory blocks), GPU1 40 cores and 100 memory blocks"
    )


def test_unhealthy_gpus_are_no_candidates_and_have_a_reason() -> None:
    gpus = [gpu(0, healthy=False, note="XID 79"), gpu(1, 0, 0)]
    refusal = refused(gpus, 100, 0)
    assert refusal.code == "gpu_unhealthy"
    assert "GPU0 not offered (XID 79)" in str(refusal)
    assert refused(gpus, 200, 0).code == "no_fit"


def test_refusals_have_the_labels() -> None:
    whole = GpuCapacity(index=0, cores_free=5, memory_blocks_free=1, entirely_free=False, label="GPU0 (1f2e3d4c)")
    assert "GPU0 (1f2e3d4c) 5 cores and 1 memory block" in str(refused([whole], 50, 20))


def test_no_gpus_at_all() -> None:
    assert "there is no GPU" in str(refused([], 50, 20))


def test_a_long_list_of_gpus_is_cut() -> None:
    topology = node(20, lambda _a, _b: (Level.SYS, 0))
    with pytest.raises(Refusal, match="and 4 more GPUs"):
        place(topology, capacities(20, range(20)), cores=10, memory_blocks=1)


def test_a_share_without_memory_is_placed_by_cores() -> None:
    assert place(PAIRS, [gpu(0), gpu(1, 50, 0)], cores=30, memory_blocks=0).gpus == (1,)


def test_a_required_gpu_wins_over_the_rule() -> None:
    gpus = [gpu(0), gpu(1, 50, 100), gpu(2), gpu(3)]
    assert place(PAIRS, gpus, cores=30, memory_blocks=10, required={2}).gpus == (2,)
    assert place(PAIRS, gpus, cores=100, memory_blocks=0, required={3}).gpus == (3,)
    assert place(PAIRS, gpus, cores=200, memory_blocks=0, required={0}).gpus == (0, 2)
    assert "GPU1 must be among them" in str(refused(gpus, 60, 10, required=(1,)))
    assert refused(gpus, 60, 10, required=(0, 2)).code == "no_fit"
    assert refused(gpus, 200, 0, required=(1,)).code == "no_fit"


def test_why_names_the_group_and_the_score() -> None:
    placement = place(PAIRS, capacities(4), cores=200, memory_blocks=0)
    assert (placement.score, placement.why.endswith("within PIX, score 50")) == (50, True)


def unlike(n: int) -> Topology:
    """GPUs that all differ."""
    return node(n, lambda a, b: (list(Level)[(3 * a + 5 * b + a * b) % 6], (7 * a + 11 * b) % 5))


def test_a_search_that_is_too_long_ends_in_grown_sets() -> None:
    topology = unlike(40)
    free = tuple(range(40))
    with pytest.raises(TooManySets):
        PartitionSearch(((0,) * 40,) * 40, free, 8, (), {gpu: gpu for gpu in free})
    chosen = choose_set(topology, free, 8, (5, 11), (320,) * 40, 0)
    assert chosen is not None
    assert (len(chosen), {5, 11} <= set(chosen), chosen == tuple(sorted(chosen))) == (8, True, True)


@pytest.mark.parametrize(("n", "k"), [(18, 6), (20, 5), (24, 4)])
def test_the_search_over_unlike_gpus_is_bounded(n: int, k: int) -> None:
    search = partial(PartitionSearch, score_matrix(unlike(n)), range(n), k, (), {gpu: gpu for gpu in range(n)})
    with pytest.raises(TooManySets):
        search().best_sets()


def test_a_request_that_only_unhealthy_gpus_could_hold_is_searched_once() -> None:
    gpus = [gpu(index, healthy=index != 3) for index in range(4)]
    choose_set.cache_clear()
    assert refused(gpus, 400, 0).code == "gpu_unhealthy"
    assert choose_set.cache_info().misses <= 1
    assert refused(gpus, 400, 4 * 320 + 1).code == "no_fit"
    assert refused([gpu(0, 50, 20, healthy=False), gpu(1, 10, 20)], 40, 20).code == "gpu_unhealthy"


def test_grown_sets_find_the_memory() -> None:
    blocks = tuple(320 if index % 5 == 0 else 10 for index in range(40))
    chosen = choose_set(unlike(40), tuple(range(40)), 8, (1,), blocks, 7 * 320 + 10)
    assert chosen is not None
    assert sum(blocks[index] for index in chosen) == 7 * 320 + 10
    assert choose_set(unlike(40), tuple(range(40)), 8, (1,), blocks, 8 * 320) is None


@pytest.mark.peer_bug("B47: its choice among equal GPUs depends on their order")
@pytest.mark.parametrize("cores", [20, 100, 200, 300])
def test_the_order_of_the_gpus_does_not_change_the_choice(cores: int) -> None:
    topology = node(8, lambda a, b: (Level.PIX if a // 2 == b // 2 else Level.PHB if a // 4 == b // 4 else Level.SYS, 0))
    gpus = capacities(8, occupied={5})
    random, answers = Random(7), set()
    for _ in range(50):
        random.shuffle(gpus)
        answers.add(place(topology, gpus, cores=cores, memory_blocks=4))
    assert len(answers) == 1


@pytest.mark.peer_bug("B47: it takes one of a pair")
def test_a_gpu_without_a_partner_is_taken_before_one_of_a_pair() -> None:
    topology = node(4, lambda a, b: (Level.PIX if a // 2 == b // 2 else Level.PHB, 0))
    assert place(topology, capacities(4, occupied={2}), cores=100, memory_blocks=0).gpus == (3,)


@pytest.mark.peer_bug("B47: it compares PCIe levels alone")
def test_nvlinks_count() -> None:
    plain = node(4, lambda _a, _b: (Level.SYS, 0))
    linked = node(4, lambda a, b: (Level.SYS, 4 if (a, b) == (1, 3) else 0))
    assert place(plain, capacities(4), cores=200, memory_blocks=0).gpus == (0, 1)
    assert place(linked, capacities(4), cores=200, memory_blocks=0).gpus == (1, 3)


@pytest.mark.peer_bug("B47: its masks end at 32 GPUs")
def test_forty_gpus_can_all_be_used() -> None:
    topology = node(40, lambda a, b: (Level.PIX if a // 8 == b // 8 else Level.SYS, 0))
    taken: set[int] = set()
    while len(taken) < 40:
        chosen = place(topology, capacities(40, occupied=taken), cores=400, memory_blocks=0).gpus
        assert len({gpu // 8 for gpu in chosen}) == 1
        assert taken.isdisjoint(chosen)
        taken |= set(chosen)
    only_last = [GpuCapacity(index=39, cores_free=50, memory_blocks_free=5, entirely_free=False)]
    assert place(topology, only_last, cores=50, memory_blocks=5).gpus == (39,)
