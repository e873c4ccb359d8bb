"""The exact search behind the link rule: the set T of k GPUs for which score(T) plus the best partition of the rest is highest.

The rest is split into sets of k, and one short set for the remainder. Two ideas make this fast enough for plain Python:

* GPUs that score alike to all others are interchangeable, so only *how many* of each class a set takes matters. A two-socket
  NVSwitch box of 16 has 81 states instead of 65,536. A GPU like no other is a class of one, and the search is one over masks.
* Scores are turned into losses: what a set misses of the k-1 best scores that each member could have. Losses are never negative
  and sum up to the same optimum, so candidates sorted by loss can be cut as soon as one alone is worse than the best answer.

Counts are packed into one integer, a few bits and a guard bit for each class: one subtraction shows whether a set fits.

The search runs on the event loop, so its length is bounded by a number of steps. A number and not a time, so that the same
question has the same answer on every machine.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

from gpumgr.placement.topology.scores import Scores

#: Steps before the search gives up; a step takes about 0.1 microseconds (`make bench`: link_worst_case). Enough for every node of
#: up to 12 GPUs, and for 16 GPUs with the symmetry of real boards.
STEP_LIMIT: Final = 200_000
#: The cost in steps of listing one set (and a quarter for each GPU in it and each class), and of opening one state of the rest.
_STEPS_PER_SET: Final = 40
_STEPS_PER_STATE: Final = 20
_NO_LOSS_YET: Final = 1 << 60


class TooManySets(Exception):
    """The exact search would take more than STEP_LIMIT steps: many GPUs with hardly any symmetry."""


def interchangeable(scores: Scores, gpus: Sequence[int], kind: Mapping[int, Hashable]) -> list[list[int]]:
    """Classes of GPUs, ascending, that score alike to all other `gpus` and are of the same kind."""
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
    """One search over the free GPUs of a node for sets of `k`.

    `required` GPUs must be in T. GPUs with another `kind` must not be exchanged, even if they score alike.
    Only sets of the lowest indices of each class are made: any other set has an equal among them that wins the last tie.
    """

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
        """All sets T that reach the optimum, as (score, GPUs ascending); empty where no set is feasible. Raises TooManySets."""
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
        """The least loss with which the GPUs that `state` counts, `size` in all, are split into sets; above `limit`, limit + 1."""
        known = self._loss.get(state)
        if known is not None:
            return known
        if self._above.get(state, -1) >= limit:
            return limit + 1
        if self._short_size and size == self._k + self._short_size:  # two sets are left, and the smaller one decides
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
        """`best`, or the least loss of splitting `state` into one of `candidates` and `size` other GPUs, if that is less."""
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
        """All sets of `size` as (loss, counts), the least loss first; each is noted as the way to split itself."""
        made = [(loss, packed) for loss, packed, _ in self._sets(size, ())] if size else []
        self._loss.update((packed, loss) for loss, packed in made)
        return made

    def _by_first_class(self, sets: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """The sets by the first class that they take from: a partition is built from its first GPU on."""
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
        """How many sets of `size` GPUs there are, counted by class."""
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
        """Adds to `found` every way to take `size` more GPUs from the classes at `start` and after, as (loss, counts, score).

        `gains` are what one GPU of each class adds to the score of the set so far.
        """
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
