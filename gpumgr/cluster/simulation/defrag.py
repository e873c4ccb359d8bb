"""Searches for the fewest moves of pods after which another pod fits, and for an order in which each move is possible."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from gpumgr.cluster.simulation.live import LiveCluster, LivePod, Spot
from gpumgr.cluster.simulation.node_filters import short
from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE

MOST_TRIES: Final = 20_000
#: The number of best places that are tried for each pod.
_BRANCHES: Final = 3
#: Pods with their new places.
Moves = list[tuple[LivePod, Spot]]


class Defrag:
    """One search. It ends after `most_tries` attempts to place a pod. `plan` leaves the cluster as it was."""

    def __init__(self, cluster: LiveCluster, *, most_moves: int, most_tries: int = MOST_TRIES) -> None:
        self._cluster, self._most_moves, self._most_tries = cluster, most_moves, most_tries
        self._placed: set[str] = set()
        self.tries = 0

    @property
    def ended(self) -> bool:
        return self.tries >= self._most_tries

    def plan(self, pod: LivePod) -> Moves | None:
        """The moves in a possible order, then the pod itself with its place. None: no such moves were found."""
        ways = (way for most in range(self._most_moves + 1) for way in self._ways([pod], most))
        return next((plan for way in ways if (plan := in_order(self._cluster, way)) is not None), None)

    def _ways(self, pods: Sequence[LivePod], most: int) -> Iterator[Moves]:
        """Yields places for all `pods`, and for at most `most` other pods that make room for them."""
        if not pods:
            yield []
            return
        pod, rest = pods[0], pods[1:]
        for spot in self._spots(pod):
            yield from self._with(pod, spot, rest, most)
        for node in self._cluster.names(pod) if most else ():
            for group, spot in self._groups(pod, node, most):
                for each in group:
                    self._cluster.remove(each, node)
                try:
                    yield from self._with(pod, spot, [*group, *rest], most - len(group))
                finally:
                    self._restore(group)

    def _with(self, pod: LivePod, spot: Spot, rest: Sequence[LivePod], most: int) -> Iterator[Moves]:
        """Yields the ways of `_ways` in which `pod` is at `spot`."""
        self._cluster.put(pod, spot)
        self._placed.add(pod.uid)
        try:
            yield from ([(pod, spot), *way] for way in self._ways(rest, most))
        finally:
            self._placed.discard(pod.uid)
            self._cluster.remove(pod, spot.node)

    def _spots(self, pod: LivePod) -> list[Spot]:
        self.tries += 1
        return [] if self.ended else [each for each in self._cluster.spots(pod, _BRANCHES) if self._differs(pod, each)]

    def _groups(self, pod: LivePod, node: str, most: int) -> Iterator[tuple[Sequence[LivePod], Spot]]:
        """Groups of pods on `node`, each with the place that `pod` gets if the group leaves. No smaller part of a group is enough."""
        lacking = set(short(pod.requests, self._cluster.free(node))) - {CORE_RESOURCE, MEMORY_RESOURCE}
        pods = [
            each
            for each in sorted(self._cluster.there(node), key=lambda each: each.uid)
            if not (each.why_not_movable or each.uid in self._placed)
            and (each.request.containers or lacking & each.requests.keys())
        ]
        if self.ended or self._without(pods, pod, node) is None:
            return
        found: list[set[LivePod]] = []
        for group in (group for size in range(1, most + 1) for group in combinations(pods, size)):
            if self.ended:
                return
            if not any(each <= set(group) for each in found) and (spot := self._without(group, pod, node)) is not None:
                found.append(set(group))
                yield group, spot

    def _without(self, group: Sequence[LivePod], pod: LivePod, node: str) -> Spot | None:
        self.tries += 1
        for each in group:
            self._cluster.remove(each, node)
        spot = self._cluster.on(pod, node)
        self._restore(group)
        return spot if isinstance(spot, Spot) and self._differs(pod, spot) else None

    def _restore(self, group: Sequence[LivePod]) -> None:
        for each in group:
            assert each.home is not None, "only pods at home are removed"
            self._cluster.put(each, each.home)

    def _differs(self, pod: LivePod, spot: Spot) -> bool:
        """Whether this place would move the pod. A pod moves within a node only if the scheduler chooses the GPUs there, not the agent."""
        if pod.home is None or spot.node != pod.home.node:
            return True
        named = self._cluster.nodes[spot.node].state.naming != "none"
        return named and self._cluster.gpus(pod, spot) != self._cluster.gpus(pod, pod.home)


def in_order(cluster: LiveCluster, places: Moves) -> Moves | None:
    """Reverses the moves, because the search places a pod before the pods that make room for it. None: in the reversed order a place is not
    free at its turn."""
    homes = {pod.home.node for pod, _ in places if pod.home is not None}
    part = cluster.part({spot.node for _, spot in places} | homes)
    for pod, spot in reversed(places):
        if pod.home is not None:
            part.remove(pod, pod.home.node)
        if not part.holds(pod, spot):
            return None
        part.put(pod, spot)
    return places[::-1]
