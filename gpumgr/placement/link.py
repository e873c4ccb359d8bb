"""link: chooses several whole GPUs by the rule in docs/user-guide.md, "Placement".

The choice is a set T of k entirely free GPUs. The search compares sums of two scores: the score of T, and the score of the best partition
of the remaining free GPUs into sets of k (one set may be smaller). T is the set with the highest sum. So well connected GPUs stay free for
the next pod.

On large nodes with hardly any symmetry the exact search exceeds STEP_LIMIT. Then a set is grown from each GPU, by adding again and again
the GPU that raises the set's score most. The result is good, but not proven to be the best.

Two ideas make the search fast enough for plain Python:
* GPUs with the same scores to all others form a class, so it matters only *how many* GPUs of each class a set has. A two-socket NVSwitch
  box of 16 has 81 states instead of 65,536.
* Scores are turned into losses. The loss of a set's member is the sum of its k-1 best scores minus its scores within the set. Losses are
  never negative, and the answer with the least sum of losses has the highest sum of scores. Candidates are sorted by loss, so the search
  stops at the first candidate with a loss above that of the best answer so far.

The counts of all classes are packed into one integer, with a few bits and a guard bit for each class. One subtraction then shows whether a
set fits. The search blocks the event loop, so its length is limited. The limit is a number of steps and not a time, so a request has the
same answer on every machine.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import lru_cache
from operator import add
from typing import Final

from gpumgr.placement.devices import Scores, Topology, score_matrix, set_score
from gpumgr.placement.tree import Group, build_tree, enclosing_group, groups_smallest_first, mask_of

#: Steps before the exact search gives up; a step takes about 0.1 microseconds (`make bench`: link_worst_case).
STEP_LIMIT: Final = 200_000
#: The cost of listing one set, in steps. A quarter step is added for each pair of a GPU of the set and a class.
_STEPS_PER_SET: Final = 40
#: The cost of examining one state (the counts of the remaining GPUs), in steps.
_STEPS_PER_STATE: Final = 20
_NO_LOSS_YET: Final = 1 << 60


class TooManySets(Exception):
    """The exact search would take more than STEP_LIMIT steps."""


def interchangeable(scores: Scores, gpus: Sequence[int], kind: Mapping[int, Hashable]) -> list[list[int]]:
    """Classes of GPUs with the same kind and the same scores to all other `gpus`; classes and members are ascending."""
    classes: list[list[int]] = []
    for gpu in gpus:
        for members in classes:
            if kind[gpu] == kind[members[0]] and _alike(scores, gpu, members[0], gpus):
                members.append(gpu)
                break
        else:
            classes.append([gpu])
    return classes


def _alike(scores: Scores, a: int, b: int, gpus: Sequence[int]) -> bool:
    row, other = scores[a], scores[b]
    return all(row[x] == other[x] for x in gpus if x not in (a, b))


class PartitionSearch:
    """One search over the free GPUs of a node for sets of `k`; T contains `required`. GPUs of different `kind` are never exchanged, even if
    they have the same scores. From each class a set takes the GPUs with the lowest indices, because these win if all else is equal."""

    def __init__(
        self, scores: Scores, free: Sequence[int], k: int, required: Sequence[int], kind: Mapping[int, Hashable]
    ) -> None:
        self._scores, self._k, self._required = scores, k, required
        self._steps_left = STEP_LIMIT
        self._potential = {a: sum(sorted((scores[a][b] for b in free if b != a), reverse=True)[: k - 1]) for a in free}
        classes = interchangeable(scores, free, {gpu: (gpu in required, kind[gpu]) for gpu in free})
        self._classes = [members for members in classes if members[0] not in required]
        self._capacity = [sum(map(len, self._classes[position:])) for position in range(len(self._classes) + 1)]
        self._width = max(map(len, self._classes), default=1).bit_length() + 1
        self._guards = sum(1 << (self._width * position - 1) for position in range(1, len(self._classes) + 1))
        self._rest_size = len(free) - k
        self._short_size = self._rest_size % k
        self._loss: dict[int, int] = {0: 0}
        self._above: dict[int, int] = {}
        self._full_by_first = self._by_first_class(self._partition_sets(k if self._rest_size >= k else 0))
        self._short = self._partition_sets(self._short_size)
        self._short_by_first = self._by_first_class(self._short)

    def best_sets(self, feasible: Callable[[tuple[int, ...]], bool] | None = None) -> list[tuple[int, tuple[int, ...]]]:
        """All optimal sets T, as (score, GPUs ascending); empty if no set is feasible. Raises TooManySets."""
        everything = sum(len(members) << (self._width * position) for position, members in enumerate(self._classes))
        best = _NO_LOSS_YET
        found: list[tuple[int, tuple[int, ...]]] = []
        for loss, packed, score in self._sets(self._k - len(self._required), self._required):
            if loss > best:
                break
            self._spend(_STEPS_PER_SET)
            gpus = self._unpack(packed)
            if feasible is not None and not feasible(gpus):
                continue
            total = loss + self._loss_of_rest(everything - packed, self._rest_size, best - loss)
            if total < best:
                best, found = total, []
            if total == best:
                found.append((score, gpus))
        return found

    def _loss_of_rest(self, state: int, size: int, limit: int) -> int:
        """The least loss if the `size` GPUs in `state` are split into sets. If this loss is above `limit`, the result is a lower bound."""
        known = self._loss.get(state)
        if known is not None:
            return known
        if self._above.get(state, -1) >= limit:
            return limit + 1
        if self._short_size and size == self._k + self._short_size:  # two sets are left; the smaller one determines the other
            best = self._least(self._short, state, self._k, limit + 1)
        else:
            first = ((state & -state).bit_length() - 1) // self._width
            best = self._least(self._full_by_first[first], state, size - self._k, limit + 1)
            if size % self._k:
                best = self._least(self._short_by_first[first], state, size - self._short_size, best)
        if best > limit:
            self._above[state] = limit
        else:
            self._loss[state] = best
        return best

    def _least(self, candidates: Sequence[tuple[int, int]], state: int, size: int, best: int) -> int:
        """The least loss if `state` is split into one of `candidates` and `size` other GPUs; `best` if no such split has a lower loss."""
        guards, guarded, tried = self._guards, state | self._guards, 0
        for loss, packed in candidates:
            if loss >= best:
                break
            tried += 1
            left = guarded - packed
            if left & guards == guards:
                best = min(best, loss + self._loss_of_rest(left ^ guards, size, best - loss - 1))
        self._spend(tried + _STEPS_PER_STATE)
        return best

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TooManySets

    def _partition_sets(self, size: int) -> list[tuple[int, int]]:
        """All sets of `size` as (loss, counts), the least loss first. Records each as the best split of its own GPUs."""
        made = [(loss, packed) for loss, packed, _ in self._sets(size, ())] if size else []
        self._loss.update((packed, loss) for loss, packed in made)
        return made

    def _by_first_class(self, sets: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """The sets by their first class, because the search always takes next a set with the first class that is left."""
        filed: list[list[tuple[int, int]]] = [[] for _ in self._classes]
        for loss, packed in sets:
            filed[((packed & -packed).bit_length() - 1) // self._width].append((loss, packed))
        return filed

    def _sets(self, size: int, fixed: Sequence[int]) -> list[tuple[int, int, int]]:
        """Every set of `fixed` and `size` other GPUs as (loss, counts of the others, score), the least loss first."""
        score = sum(self._scores[a][b] for a in fixed for b in fixed if a < b)
        potential = sum(self._potential[gpu] for gpu in fixed)
        gains = [sum(self._scores[members[0]][gpu] for gpu in fixed) for members in self._classes]
        self._spend(self._number_of_sets(size) * (_STEPS_PER_SET + size * len(self._classes) // 4))
        found: list[tuple[int, int, int]] = []
        self._grow(found, 0, size, 0, score, potential, gains)
        return sorted(found)

    def _number_of_sets(self, size: int) -> int:
        """Sets with equal counts of the classes count once."""
        numbers = [1] + [0] * size
        for members in self._classes:
            numbers = [sum(numbers[max(0, total - len(members)) : total + 1]) for total in range(size + 1)]
        return numbers[size]

    def _grow(
        self,
        found: list[tuple[int, int, int]],
        start: int,
        size: int,
        packed: int,
        score: int,
        potential: int,
        gains: Sequence[int],
    ) -> None:
        """Adds to `found` every way to take `size` GPUs from the classes at `start` and after, as (loss, counts, score). `gains`: what one
        GPU of each class adds to the set's score."""
        if size == 0:
            found.append((potential - 2 * score, packed, score))
            return
        for position in range(start, len(self._classes)):
            members, others = self._classes[position], self._capacity[position + 1]
            if len(members) + others < size:
                return
            row = self._scores[members[0]]
            inside = row[members[1]] if len(members) > 1 else 0
            for count in range(max(1, size - others), min(len(members), size) + 1):
                left = size - count
                grown = [gain + count * row[other[0]] for gain, other in zip(gains, self._classes, strict=True)] if left else ()
                self._grow(
                    found,
                    position + 1,
                    left,
                    packed | count << (self._width * position),
                    score + count * gains[position] + count * (count - 1) // 2 * inside,
                    potential + count * self._potential[members[0]],
                    grown,
                )

    def _unpack(self, packed: int) -> tuple[int, ...]:
        chosen, field = list(self._required), (1 << self._width) - 1
        for position, members in enumerate(self._classes):
            chosen += members[: packed >> (self._width * position) & field]
        return tuple(sorted(chosen))


@lru_cache(maxsize=4096)
def choose_set(
    topology: Topology, free: tuple[int, ...], k: int, required: tuple[int, ...], blocks: tuple[int, ...], blocks_needed: int
) -> tuple[int, ...] | None:
    """The set that the link rule chooses, ascending; None if no set of k contains `required` and has `blocks_needed`. `free`: the entirely
    free GPUs, ascending; `blocks`: their free memory blocks; `required`: some of `free`, ascending."""
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
    """Whether some set of `k` GPUs contains `required` and has `blocks_needed`. `room`: entirely free GPU -> its free blocks."""
    if not len(required) <= k <= len(room) or not room.keys() >= set(required):
        return False
    others = sorted((room[gpu] for gpu in room if gpu not in required), reverse=True)
    return sum(room[gpu] for gpu in required) + sum(others[: k - len(required)]) >= blocks_needed


def _kinds(tree: Group, free: Sequence[int], room: Mapping[int, int] | None) -> dict[int, Hashable]:
    """GPU -> what distinguishes it besides its scores: its group and, with `room`, its free blocks."""
    home = {
        child: group.mask for group in (tree, *groups_smallest_first(tree)) for child in group.children if isinstance(child, int)
    }
    return {gpu: (home[gpu], room and room[gpu]) for gpu in free}


def _grown_sets(
    scores: Scores, free: Sequence[int], k: int, required: Sequence[int], room: Mapping[int, int], blocks_needed: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Grows a set from each GPU. The total of a set is its score plus the score of a partition of the remaining GPUs. Returns the sets with
    the highest total as (score of the set, GPUs)."""
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
    """Moves GPUs from `rest` to `chosen` until `chosen` has k: always the GPU that adds most to the score, on a tie the lowest index.
    Returns how much they add."""
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
    """The score of a good partition of `rest`: each set is grown from the lowest GPU left."""
    score = 0
    while rest:
        size = min(k, len(rest))
        score += _grow(scores, rest, size, [rest.pop(0)])
    return score


def _with_room(
    scores: Scores, free: Sequence[int], chosen: list[int], required: Sequence[int], room: Mapping[int, int], blocks_needed: int
) -> list[int]:
    """Exchanges members of `chosen` for free GPUs until `chosen` has `blocks_needed`: the member with the fewest free blocks leaves, and
    the GPU with the most free blocks replaces it. Call it only if some set has `blocks_needed`."""
    outside = sorted((gpu for gpu in free if gpu not in chosen), key=lambda gpu: (-room[gpu], -sum(scores[gpu]), gpu))
    for larger in outside:
        movable = [gpu for gpu in chosen if gpu not in required]
        if sum(room[gpu] for gpu in chosen) >= blocks_needed:
            break
        chosen.remove(min(movable, key=lambda gpu: (room[gpu], -gpu)))
        chosen.append(larger)
    return chosen
