"""Cases of NVIDIA's best-effort policy with one right answer under any rule that weighs pairs: our link rule agrees.

Source: go-gpuallocator's tests. Three machines: DGX-1 with V100 and with P100, and four RTX 8000 with two NVLink bridges.
"""

from collections.abc import Collection

import pytest

from gpumgr.common.errors import Refusal
from gpumgr.placement.devices import Level, Topology
from gpumgr.placement.select import place
from tests.unit.placement.nodes import capacities, node


def pairs(text: str) -> set[tuple[int, int]]:
    return {(int(pair[0]), int(pair[1])) for pair in text.split()}


def dgx1(two_links: str, one_link: str, switch: str) -> Topology:
    two, one, near = pairs(two_links), pairs(one_link), pairs(switch)

    def link(a: int, b: int) -> tuple[Level, int]:
        level = Level.PIX if (a, b) in near else Level.PHB if a // 4 == b // 4 else Level.SYS
        return level, 2 * ((a, b) in two) + ((a, b) in one)

    return node(8, link)


VOLTA = dgx1("03 04 12 15 23 47 56 67", "01 02 13 26 37 45 46 57", "01 23 45 67")
PASCAL = dgx1("", "01 02 03 04 12 13 15 23 26 37 45 46 47 56 57 67", "02 13 46 57")
RTX8000 = node(4, lambda a, b: (Level.NODE if a // 2 == b // 2 else Level.SYS, 2 * ((a, b) in {(0, 3), (1, 2)})))


def ask(topology: Topology, available: set[int], k: int, required: Collection[int] = ()) -> tuple[int, ...]:
    gpus = [gpu for gpu in capacities(len(topology)) if gpu.index in available]
    return place(topology, gpus, cores=100 * k, memory_blocks=0, required=required).gpus


ALL = set(range(8))


@pytest.mark.parametrize(
    ("available", "required", "k", "expected"),
    [
        ({0, 2, 4, 5}, set(), 2, {4, 5}),
        ({0, 4, 5, 6}, set(), 2, {5, 6}),
        ({0, 3, 1}, set(), 2, {0, 3}),
        ({0, 1, 4}, set(), 2, {0, 4}),
        (ALL, {4}, 1, {4}),
        (ALL, {4}, 2, {4, 7}),
        (ALL, {4}, 4, {4, 5, 6, 7}),
        (ALL, {0, 2, 4, 6}, 4, {0, 2, 4, 6}),
        (ALL, set(), 8, ALL),
    ],
)
def test_volta(available: set[int], required: set[int], k: int, expected: set[int]) -> None:
    assert set(ask(VOLTA, available, k, required)) == expected


@pytest.mark.parametrize(
    ("available", "required", "k"),
    [
        (set(range(1, 8)), {0, 1, 2, 3}, 4),
        (ALL, {0, 1, 2, 3, 4, 5}, 4),
        ({5}, {6}, 1),
    ],
)
def test_what_is_required_must_be_there_and_fit(available: set[int], required: set[int], k: int) -> None:
    with pytest.raises(Refusal) as caught:
        ask(VOLTA, available, k, required)
    assert caught.value.code == "no_fit"


@pytest.mark.parametrize(
    ("topology", "k", "expected"),
    [
        # The peer takes 03, 12, 47, 56: the same sum over all pairs. Between equal sums our rule prefers the best first pair.
        (VOLTA, 2, [{2, 3}, {6, 7}, {0, 4}, {1, 5}]),
        (VOLTA, 4, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (VOLTA, 1, [{gpu} for gpu in range(8)]),
        (PASCAL, 2, [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
        (RTX8000, 2, [{0, 3}, {1, 2}]),
        (RTX8000, 4, [{0, 1, 2, 3}]),
    ],
    ids=["volta-pairs", "volta-quads", "volta-single", "pascal-pairs", "rtx8000-pairs", "rtx8000-all"],
)
def test_one_after_another_until_nothing_is_left(topology: Topology, k: int, expected: list[set[int]]) -> None:
    available, taken = set(range(len(topology))), []
    while available:
        taken.append(set(ask(topology, available, k)))
        available -= taken[-1]
    assert taken == expected
    with pytest.raises(Refusal):
        ask(topology, available, k)
