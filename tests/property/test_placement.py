"""Placement on random small nodes: feasible, and optimal against a brute force that follows the rule's text."""

from collections.abc import Iterator
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumgr.common.errors import Refusal
from gpumgr.placement.devices import Level, Topology
from gpumgr.placement.select import GpuCapacity, Policy, place

Caps = list[GpuCapacity]


@st.composite
def topologies(draw: st.DrawFn, most: int = 7) -> Topology:
    """Any symmetric matrix, and often a tidy one: few levels make many ties."""
    n = draw(st.integers(1, most))
    levels = draw(st.sampled_from([list(Level), [Level.PIX, Level.SYS], [Level.PIX, Level.PHB, Level.SYS]]))
    links = draw(st.sampled_from([[0], [0, 1], [0, 1, 2, 4]]))
    pair = {(a, b): (draw(st.sampled_from(levels)), draw(st.sampled_from(links))) for a in range(n) for b in range(a + 1, n)}

    def at(a: int, b: int) -> tuple[Level, int]:
        return (Level.PSB, 0) if a == b else pair[min(a, b), max(a, b)]

    return Topology(
        levels=tuple(tuple(at(a, b)[0] for b in range(n)) for a in range(n)),
        nvlinks=tuple(tuple(at(a, b)[1] for b in range(n)) for a in range(n)),
    )


@st.composite
def nodes(draw: st.DrawFn, most: int = 7) -> tuple[Topology, Caps]:
    """Some GPUs of the topology are no candidates."""
    topology = draw(topologies(most))
    sizes = draw(st.sampled_from([[64], [64, 96]]))
    there = [index for index in range(len(topology)) if draw(st.integers(0, 9))]
    return topology, [draw(capacities(index, draw(st.sampled_from(sizes)))) for index in there]


@st.composite
def capacities(draw: st.DrawFn, index: int, blocks: int) -> GpuCapacity:
    cores, memory = draw(st.sampled_from([(100, blocks), (100, blocks), (100, blocks), (40, blocks), (40, 20), (0, 0)]))
    return GpuCapacity(
        index=index,
        cores_free=cores,
        memory_blocks_free=memory,
        entirely_free=(cores, memory) == (100, blocks),
        healthy=draw(st.integers(0, 9)) > 0,
    )


def pair_score(topology: Topology, a: int, b: int) -> int:
    return int(topology.levels[a][b]) + 100 * topology.nvlinks[a][b]


def score(topology: Topology, gpus: tuple[int, ...]) -> int:
    return sum(pair_score(topology, a, b) for a, b in combinations(gpus, 2))


def partitions(gpus: tuple[int, ...], k: int, short_allowed: bool) -> Iterator[list[tuple[int, ...]]]:
    """Every way to split `gpus` into sets of k, with one short set where the number asks for it."""
    if not gpus:
        yield []
        return
    sizes = {k} | ({len(gpus) % k} if short_allowed and len(gpus) % k else set())
    for size in sizes:
        for others in combinations(gpus[1:], size - 1) if size <= len(gpus) else ():
            taken = (gpus[0], *others)
            rest = tuple(gpu for gpu in gpus if gpu not in taken)
            for more in partitions(rest, k, short_allowed and size == k):
                yield [taken, *more]


def component(topology: Topology, start: int, level: Level) -> frozenset[int]:
    found, edge = {start}, [start]
    while edge:
        here = edge.pop()
        near = [gpu for gpu in range(len(topology)) if gpu not in found and topology.levels[here][gpu] >= level]
        found.update(near)
        edge += near
    return frozenset(found)


def enclosing(topology: Topology, gpus: tuple[int, ...]) -> tuple[Level, frozenset[int]]:
    for level in sorted(Level, reverse=True):
        group = component(topology, gpus[0], level)
        if set(gpus) <= group:
            return level, group
    raise AssertionError("everything is joined at SYS")


def link_by_brute_force(topology: Topology, gpus: Caps, k: int, blocks: int, required: set[int]) -> tuple[int, ...] | None:
    room = {gpu.index: gpu.memory_blocks_free for gpu in gpus if gpu.healthy and gpu.entirely_free}
    free = tuple(sorted(room))

    def key(chosen: tuple[int, ...]) -> tuple[int, int, int, int, tuple[int, ...]]:
        rest = tuple(gpu for gpu in free if gpu not in chosen)
        best_rest = max(sum(score(topology, part) for part in split) for split in partitions(rest, k, True))
        level, group = enclosing(topology, chosen)
        own = score(topology, chosen)
        return -(own + best_rest), -own, -int(level), len(group & set(free)), chosen

    sets = [s for s in combinations(free, k) if required <= set(s) and sum(room[gpu] for gpu in s) >= blocks]
    return min(sets, key=key, default=None)


def fragment_by_levels(topology: Topology, gpus: Caps, blocks: int, required: set[int]) -> tuple[int, ...] | None:
    """The rule without a tree: at each level, the components of what is left take the place of child groups."""
    room = {gpu.index: gpu.memory_blocks_free for gpu in gpus if gpu.healthy and gpu.entirely_free}
    eligible = {gpu for gpu in room if room[gpu] >= blocks and required <= {gpu}}
    inside = frozenset(range(len(topology)))
    for level in sorted(Level):
        groups = {component(topology, gpu, level) for gpu in inside}
        choices = [group for group in groups if group & eligible]
        if not choices:
            return None
        inside = min(choices, key=lambda group: (len(group & set(room)), min(group & set(room))))
    return (min(inside & eligible),)  # what is left are single GPUs of one group: each has one free


def answer(
    topology: Topology, gpus: Caps, cores: int, blocks: int, policy: Policy = "binpack", required: set[int] | None = None
) -> tuple[int, ...] | None:
    try:
        return place(topology, gpus, cores=cores, memory_blocks=blocks, policy=policy, required=required or set()).gpus
    except Refusal:
        return None


@settings(deadline=None, max_examples=250)
@given(nodes(), st.integers(2, 7), st.sampled_from([0, 0, 130, 200, 260]), st.data())
def test_link_is_optimal(node: tuple[Topology, Caps], k: int, blocks: int, data: st.DataObject) -> None:
    topology, gpus = node
    required = data.draw(st.sets(st.sampled_from(range(len(topology))), max_size=2)) if data.draw(st.booleans()) else set()
    assert answer(topology, gpus, 100 * k, blocks, required=required) == link_by_brute_force(topology, gpus, k, blocks, required)


@settings(deadline=None, max_examples=150)
@given(nodes(), st.sampled_from([0, 70]), st.data())
def test_fragment_follows_the_rule(node: tuple[Topology, Caps], blocks: int, data: st.DataObject) -> None:
    topology, gpus = node
    required = data.draw(st.sets(st.sampled_from(range(len(topology))), max_size=1))
    assert answer(topology, gpus, 100, blocks, required=required) == fragment_by_levels(topology, gpus, blocks, required)


@settings(deadline=None, max_examples=100)
@given(nodes(), st.integers(1, 99), st.integers(0, 100), st.sampled_from(["binpack", "spread"]))
def test_share_is_the_best_fit(node: tuple[Topology, Caps], cores: int, blocks: int, policy: Policy) -> None:
    topology, gpus = node
    fits = [gpu for gpu in gpus if gpu.healthy and gpu.cores_free >= cores and gpu.memory_blocks_free >= blocks]
    sign = 1 if policy == "binpack" else -1
    best = min(fits, key=lambda gpu: (sign * gpu.cores_free, sign * gpu.memory_blocks_free, gpu.index), default=None)
    assert answer(topology, gpus, cores, blocks, policy) == (None if best is None else (best.index,))


@settings(deadline=None, max_examples=100)
@given(nodes(12), st.integers(1, 12), st.integers(0, 600))
def test_answers_are_feasible(node: tuple[Topology, Caps], count: int, blocks: int) -> None:
    topology, gpus = node
    chosen = answer(topology, gpus, 100 * count, blocks)
    if chosen is None:
        return
    granted = [gpu for gpu in gpus if gpu.index in chosen]
    assert len(granted) == len(set(chosen)) == count
    assert all(gpu.healthy and gpu.entirely_free for gpu in granted)
    assert sum(gpu.memory_blocks_free for gpu in granted) >= blocks
    assert list(chosen) == sorted(chosen)
