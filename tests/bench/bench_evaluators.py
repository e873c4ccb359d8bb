"""How long link decisions take, with the answer cache emptied before each. Prints one JSON object; times in milliseconds."""

from collections.abc import Callable, Collection
from itertools import combinations
from random import Random
from time import perf_counter
from typing import Any

from gpumgr.placement import link
from gpumgr.placement.devices import Level, Topology
from gpumgr.placement.select import GpuCapacity, place
from tests.bench import figures

_HALF = (0, 3, 4, 6, 9, 11, 13, 14)
_VOLTA_TWO = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}
_VOLTA_ONE = {(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)}


def measure(rounds: int) -> dict[str, Any]:
    return {
        "link_8_gpus": {"dgx1_v100": _all_sizes(_dgx1(), (), rounds), "hgx_nvswitch": _all_sizes(_two_sockets(8), (), rounds)},
        "link_16_gpus": {
            f"{name}_{filling}": _all_sizes(topology, occupied, max(1, rounds // 10))
            for name, topology in (("two_socket_nvswitch", _two_sockets(16)), ("four_switches_of_four", _four_switches()))
            for filling, occupied in (("empty", ()), ("half_full", _HALF))
        },
        # Without any symmetry most searches end at their limit of steps.
        "link_worst_case": {"32_unlike_gpus": _all_sizes(_unlike(32), (), max(3, rounds // 20))},
    }


def _all_sizes(topology: Topology, occupied: Collection[int], rounds: int) -> dict[str, float]:
    """p99 over all sizes and rounds together, and p50 and p99 of the slowest size."""
    gpus = [
        GpuCapacity(index=row, cores_free=100, memory_blocks_free=320, entirely_free=True)
        for row in range(len(topology))
        if row not in occupied
    ]
    by_size = [sorted(_once(topology, gpus, k) for _ in range(rounds)) for k in range(2, len(gpus) + 1)]
    times = sorted(time for size in by_size for time in size)
    return {
        "p99": times[len(times) * 99 // 100],
        "p50_of_slowest_size": max(size[len(size) // 2] for size in by_size),
        "p99_of_slowest_size": max(size[len(size) * 99 // 100] for size in by_size),
    }


def _once(topology: Topology, gpus: list[GpuCapacity], k: int) -> float:
    link.choose_set.cache_clear()
    start = perf_counter()
    place(topology, gpus, cores=100 * k, memory_blocks=0)
    return round((perf_counter() - start) * 1000, 3)


def _node(n: int, link_of: Callable[[int, int], tuple[Level, int]]) -> Topology:
    pairs = [[link_of(min(a, b), max(a, b)) if a != b else (Level.PSB, 0) for b in range(n)] for a in range(n)]
    return Topology(
        levels=tuple(tuple(level for level, _ in row) for row in pairs),
        nvlinks=tuple(tuple(links for _, links in row) for row in pairs),
    )


def _dgx1() -> Topology:
    def link_of(a: int, b: int) -> tuple[Level, int]:
        level = Level.PIX if a // 2 == b // 2 else Level.PHB if a // 4 == b // 4 else Level.SYS
        return level, 2 * ((a, b) in _VOLTA_TWO) + ((a, b) in _VOLTA_ONE)

    return _node(8, link_of)


def _two_sockets(n: int) -> Topology:
    return _node(n, lambda a, b: (Level.NODE if a // (n // 2) == b // (n // 2) else Level.SYS, 18))


def _four_switches() -> Topology:
    return _node(16, lambda a, b: (Level.PIX if a // 4 == b // 4 else Level.PHB if a // 8 == b // 8 else Level.SYS, 0))


def _unlike(n: int) -> Topology:
    """A node on which no two GPUs are joined to the others alike; the same one each time."""
    random = Random(n)
    links = {pair: (random.choice(list(Level)), random.randrange(5)) for pair in combinations(range(n), 2)}
    return _node(n, lambda a, b: links[a, b])


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=200)
