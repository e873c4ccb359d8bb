"""link: several whole GPUs. Source of the rule: docs/user-guide.md, "Placement".

Among the sets T of k entirely free GPUs, the one with the highest score(T) plus the best score of a partition of the remaining free
GPUs into sets of k (one short set allowed), so that what is left stays good for the next pod. Then, in order: the higher score(T),
the smaller enclosing topology group (closer level, then fewer free GPUs in it), the lowest indices.

Exact as long as the search is short enough (see `partition`), which it is on every node of up to 12 GPUs and on boards of 16. Beyond
that, with hardly any symmetry, the candidates are the sets grown from each GPU by the best gain, and the rest is split in the same
manner: good, not proven best.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import lru_cache
from operator import add

from gpumgr.placement.evaluators.partition import PartitionSearch, TooManySets
from gpumgr.placement.topology.devices import Topology
from gpumgr.placement.topology.scores import Scores, score_matrix, set_score
from gpumgr.placement.topology.tree import Group, build_tree, enclosing_group, groups_smallest_first, mask_of


@lru_cache(maxsize=4096)
def choose_set(
    topology: Topology, free: tuple[int, ...], k: int, required: tuple[int, ...], blocks: tuple[int, ...], blocks_needed: int
) -> tuple[int, ...] | None:
    """The set that the link rule chooses, ascending; None if no set of k holds `required` and `blocks_needed`.

    `free` are the entirely free GPUs, ascending; `blocks` their free memory blocks; `required` is ascending and lies within `free`.
    """
    room = dict(zip(free, blocks, strict=True))
    if not has_room(room, k, required, blocks_needed):
        return None
    scores, tree = score_matrix(topology), build_tree(topology)
    free_mask = mask_of(free)

    def preference(scored: tuple[int, tuple[int, ...]]) -> tuple[int, int, int, tuple[int, ...]]:
        score, gpus = scored
        group = enclosing_group(tree, mask_of(gpus))
        return -score, -(group.level or 0), (group.mask & free_mask).bit_count(), gpus

    def feasible(gpus: Sequence[int]) -> bool:
        return sum(room[gpu] for gpu in gpus) >= blocks_needed

    scarce = sum(sorted(blocks)[:k]) < blocks_needed
    try:
        search = PartitionSearch(scores, free, k, required, _kinds(tree, free, room if scarce else None))
        best = search.best_sets(feasible if scarce else None)
    except TooManySets:
        best = _grown_sets(scores, free, k, required, room if scarce else {}, blocks_needed if scarce else 0)
    return min(best, key=preference)[1]


def has_room(room: Mapping[int, int], k: int, required: Collection[int], blocks_needed: int) -> bool:
    """Whether some set of `k` GPUs holds `required` and `blocks_needed`. `room`: the free blocks of each entirely free GPU."""
    if not len(required) <= k <= len(room) or not room.keys() >= set(required):
        return False
    others = sorted((room[gpu] for gpu in room if gpu not in required), reverse=True)
    return sum(room[gpu] for gpu in required) + sum(others[: k - len(required)]) >= blocks_needed


def _kinds(tree: Group, free: Sequence[int], room: Mapping[int, int] | None) -> dict[int, Hashable]:
    """The key of each GPU that may be exchanged only for GPUs of the same key: its group, and its memory if that decides."""
    home = {
        child: group.mask for group in (tree, *groups_smallest_first(tree)) for child in group.children if isinstance(child, int)
    }
    return {gpu: (home[gpu], room and room[gpu]) for gpu in free}


def _grown_sets(
    scores: Scores, free: Sequence[int], k: int, required: Sequence[int], room: Mapping[int, int], blocks_needed: int
) -> list[tuple[int, tuple[int, ...]]]:
    """The best of the sets that are grown from each GPU, as (score, GPUs): those with the highest sum over themselves and the rest."""
    found: dict[tuple[int, ...], int] = {}
    for seed in free:
        chosen = list(required) if seed in required or len(required) == k else [*required, seed]
        _grow(scores, _without(free, chosen), k, chosen)
        if room:
            chosen = _with_room(scores, free, chosen, required, room, blocks_needed)
        gpus = tuple(sorted(chosen))
        if gpus not in found:
            found[gpus] = set_score(scores, gpus) + _grown_partition(scores, _without(free, gpus), k)
    best = max(found.values())
    return [(set_score(scores, gpus), gpus) for gpus, total in found.items() if total == best]


def _without(free: Sequence[int], taken: Collection[int]) -> list[int]:
    return [gpu for gpu in free if gpu not in taken]


def _grow(scores: Scores, rest: list[int], k: int, chosen: list[int]) -> int:
    """Moves GPUs from `rest` to `chosen` until that has k: the one that adds most each time; ties go to the lowest index. Returns what
    they add to the score."""
    gains: Sequence[int] = scores[chosen[0]]
    for gpu in chosen[1:]:
        gains = list(map(add, gains, scores[gpu]))
    score = 0
    while len(chosen) < k:
        best = max(rest, key=gains.__getitem__)
        rest.remove(best)
        chosen.append(best)
        score += gains[best]
        gains = list(map(add, gains, scores[best]))
    return score


def _grown_partition(scores: Scores, rest: list[int], k: int) -> int:
    """The score of one reasonable partition of `rest`: each set is grown from its lowest GPU."""
    score = 0
    while rest:
        size = min(k, len(rest))
        score += _grow(scores, rest, size, [rest.pop(0)])
    return score


def _with_room(
    scores: Scores, free: Sequence[int], chosen: list[int], required: Sequence[int], room: Mapping[int, int], blocks_needed: int
) -> list[int]:
    """`chosen` with its smallest GPUs exchanged for the largest outside until it has `blocks_needed`, which some set has."""
    outside = sorted((gpu for gpu in free if gpu not in chosen), key=lambda gpu: (-room[gpu], -sum(scores[gpu]), gpu))
    for larger in outside:
        movable = [gpu for gpu in chosen if gpu not in required]
        if sum(room[gpu] for gpu in chosen) >= blocks_needed:
            break
        chosen.remove(min(movable, key=lambda gpu: (room[gpu], -gpu)))
        chosen.append(larger)
    return chosen
