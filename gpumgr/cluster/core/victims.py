"""The pods to evict from a node so that another pod fits on its GPUs.

Sets of pods are compared by the highest priority, then by the number of pods, then by the sum of priorities; the lowest is the best. This
is nearly the order of kube-scheduler. With few pods all sets are tried. Otherwise the search frees one GPU after another, and begins once
with each of several GPUs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cache
from itertools import combinations
from typing import Final

import msgspec

from gpumgr.cluster.core.choose import Misfit, NodeChoice
from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.index import used_on
from gpumgr.cluster.core.node import NodeState, Used
from gpumgr.cluster.core.request import PlacedPod, PodRequest
from gpumgr.common.units import CORES_PER_GPU, Amounts

#: If there are at most so many pods, all sets of them are tried.
_MAX_EXACT: Final = 6
#: The maximum number of searches. Each begins with another GPU; the GPUs with the cheapest pods are taken first.
_MAX_FIRST: Final = 16
#: The highest priority, the number, and the sum of priorities of the victims.
Cost = tuple[int, int, int]
_NO_PRIORITY: Final = -(1 << 31)


class Evictable(msgspec.Struct, frozen=True):
    """A pod that may be evicted. `gpus`: the positions of its GPUs. `cores`: on all of them together."""

    uid: str
    priority: int
    gpus: frozenset[int] = frozenset()
    cores: int = 0


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """`victims`: UIDs. `choice`: the GPUs that the preemptor gets once the victims have ended."""

    victims: frozenset[str]
    choice: NodeChoice
    cost: Cost


class Preemptor(msgspec.Struct, frozen=True):
    """The pod that needs room. `choose` gets the node's use and the pods that will have ended. `evicts`: the only pods that may be victims;
    None: all."""

    request: PodRequest
    priority: int
    choose: Callable[[Used, Set[str]], NodeChoice | Misfit | Rejection]
    evicts: Set[str] | None = None


def find_eviction(
    node: NodeState,
    pods: Mapping[str, PlacedPod],
    preemptor: Preemptor,
    *,
    unbound: Set[str] = frozenset(),
    ending: Set[str] = frozenset(),
    proposed: frozenset[str] = frozenset(),
) -> Eviction | None:
    """The best victims among `pods` of this node, or None if no set helps. If the preemptor fits without an eviction, the victims are those
    `ending` pods that are bound and have a lower priority; there may be none.

    `unbound` pods are not bound yet, so they can't be evicted. If their priority is lower, what they hold counts as free: the preemptor may
    take what an earlier preemption freed for them. `ending` pods end anyway. `proposed`: kube-scheduler's victims, also without GPUs. The
    result contains them all, unless all are evictable and the node has too few cores in total. Then kube-scheduler probably chose them only
    for the cores, and a cheaper set may replace them.
    """
    lower = {uid for uid, pod in pods.items() if pod.priority < preemptor.priority}
    gone = (ending & pods.keys()) | (lower & unbound)
    if preemptor.evicts is not None:
        lower &= preemptor.evicts
        if proposed - lower:
            return None
    if proposed & (pods.keys() - lower):
        return None
    taken, used = _taken(node, pods)
    evictable = [
        Evictable(uid, pods[uid].priority, frozenset(taken[uid]), sum(each.cores for each in taken[uid].values()))
        for uid in sorted(lower - gone)
    ]

    @cache
    def found(uids: frozenset[str]) -> NodeChoice | None:
        left = _without(used, [taken[uid] for uid in (uids | gone) & pods.keys()])
        choice = preemptor.choose(left, uids | gone)
        return choice if isinstance(choice, NodeChoice) else None

    sets: list[frozenset[str]] = []
    if proposed:
        more = fewest([each for each in evictable if each.uid not in proposed], lambda uids: found(uids | proposed) is not None)
        sets += [proposed | _uids(more)] if more is not None else []
    if not proposed or (
        proposed <= _uids(evictable) and _short(node, [preemptor.request, *(pod.request for pod in pods.values())])
    ):
        best = fewest(evictable, lambda uids: found(uids) is not None)
        # Pods that end anyway are the victims if the preemptor waits only for them; it is then nominated, and keeps their GPUs.
        sets += [_uids(best) or frozenset(lower & ending - unbound)] if best is not None else []
    by_uid = {each.uid: each for each in evictable}
    costs = {uids: _cost([by_uid[uid] for uid in uids & by_uid.keys()], len(uids - ending)) for uids in sets}
    victims = min(sets, key=lambda uids: costs[uids], default=None)
    choice = found(victims) if victims is not None else None
    return Eviction(victims=victims, choice=choice, cost=costs[victims]) if victims is not None and choice is not None else None


def fewest(pods: Sequence[Evictable], fits: Callable[[frozenset[str]], bool]) -> Collection[Evictable] | None:
    """The best victims found: () if the preemptor fits without evictions, None if it does not fit even after the eviction of all `pods`."""
    if fits(frozenset()):
        return ()
    pool = next(
        (
            pool
            for most in sorted({each.priority for each in pods})
            if fits(_uids(pool := [each for each in pods if each.priority <= most]))
        ),
        None,
    )
    if pool is None:
        return None
    if len(pool) <= _MAX_EXACT:
        every = [found for size in range(1, len(pool) + 1) for found in combinations(pool, size)]
        return next(found for found in sorted(every, key=_cost) if fits(_uids(found)))
    on = {gpu: frozenset(each for each in pool if gpu in each.gpus) for gpu in frozenset().union(*(each.gpus for each in pool))}

    def grown(first: int) -> frozenset[Evictable]:
        """The pods of this GPU, then of the GPU that adds the fewest pods, and so on until the preemptor fits."""
        chosen, left = on[first], on.keys() - {first}
        while left and not fits(_uids(chosen)):
            # Without the pods of the pool's highest priority the preemptor does not fit. So this priority is the same in all sets, and is
            # left out of the comparison ([1:]).
            nearest = min(left, key=lambda gpu: (_cost(on[gpu] - chosen)[1:], gpu))
            chosen, left = chosen | on[nearest], left - {nearest}
        return chosen if left or fits(_uids(chosen)) else frozenset(pool)

    firsts = sorted(on, key=lambda gpu: (_cost(on[gpu])[1:], gpu))[:_MAX_FIRST]
    sets = sorted({grown(first) for first in firsts} or {frozenset(pool)}, key=lambda each: sorted(_uids(each)))
    return min((_reduced(each, fits) for each in sets), key=_cost)


def _reduced(pods: frozenset[Evictable], fits: Callable[[frozenset[str]], bool]) -> frozenset[Evictable]:
    """Drops pods that can stay, first the pods with the fewest cores, which keeps the number of victims low."""
    for each in sorted(pods, key=lambda pod: (pod.cores, -pod.priority, pod.uid)):
        if fits(_uids(pods - {each})):
            pods -= {each}
    return pods


def _cost(pods: Collection[Evictable], count: int | None = None) -> Cost:
    priorities = [each.priority for each in pods]
    return max(priorities, default=_NO_PRIORITY), len(pods) if count is None else count, sum(priorities)


def _uids(pods: Iterable[Evictable]) -> frozenset[str]:
    return frozenset(each.uid for each in pods)


def _short(node: NodeState, requests: Iterable[PodRequest]) -> bool:
    """Whether the node certainly has too few cores in total, as kube-scheduler counts them."""
    asked = sum(container.cores for request in requests for container in request.containers if container.kind != "init")
    return asked > CORES_PER_GPU * sum(gpu.healthy for gpu in node.gpus)


def _taken(node: NodeState, pods: Mapping[str, PlacedPod]) -> tuple[dict[str, Mapping[int, Amounts]], Used]:
    """(what each pod holds on each GPU, what all use together)."""
    empty = used_on(node, ())
    known = [pod for uid, pod in sorted(pods.items()) if uid in node.reported_shares or pod.shares is not None]
    taken = {
        pod.uid: dict(node.reported_shares[pod.uid])
        if pod.uid in node.reported_shares
        else _difference(used_on(node, [pod]), empty)
        for pod in known
    }
    used = used_on(node, known)
    for uid, pod in sorted(pods.items()):
        if uid not in taken:
            known.append(pod)
            before, used = used, used_on(node, known)
            taken[uid] = _difference(used, before)
    return taken, used


def _difference(after: Used, before: Used) -> Mapping[int, Amounts]:
    return {gpu: a - b for gpu, (a, b) in enumerate(zip(after, before, strict=True)) if a != b}


def _without(used: Used, taken: Iterable[Mapping[int, Amounts]]) -> Used:
    left = list(used)
    for each in taken:
        for gpu, amounts in each.items():
            left[gpu] -= amounts
    return tuple(left)
