"""The best node for a request, computed again only for the nodes that changed since the last pod with this request."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from gpumgr.cluster.simulation.model import Cluster, Node, Shape

#: Of a node on which the request fits; the highest is the best.
Score = Callable[[Node, Shape], float]
#: The order of equal nodes, the lowest first: from the position of a node and the value of the node that was taken last.
Order = Callable[[int, float], float]


class Ranking:
    """One request under one score."""

    def __init__(self, cluster: Cluster, shape: Shape, score: Score, order: Order) -> None:
        self._cluster, self._shape, self._score, self._order = cluster, shape, score, order
        self._last = 0.0
        self._seen = 0
        #: (-score, order, position, version of the node)
        self._heap: list[tuple[float, float, int, int]] = []
        self._fill()

    def best(self) -> int | None:
        """The position of the best node; None: the request fits nowhere."""
        changes, nodes = self._cluster.changes, self._cluster.nodes
        if len(changes) - self._seen + len(self._heap) > 4 * len(nodes) + 64:
            self._fill()
        elif self._seen < len(changes):
            for position in dict.fromkeys(changes[self._seen :]):
                if (entry := self._entry(position)) is not None:
                    heappush(self._heap, entry)
            self._seen = len(changes)
        heap = self._heap
        while heap and nodes[heap[0][2]].version != heap[0][3]:
            heappop(heap)
        if not heap:
            return None
        self._last = heap[0][1]
        return heap[0][2]

    def _fill(self) -> None:
        entries = map(self._entry, range(len(self._cluster.nodes)))
        self._heap = [entry for entry in entries if entry is not None]
        heapify(self._heap)
        self._seen = len(self._cluster.changes)

    def _entry(self, position: int) -> tuple[float, float, int, int] | None:
        node = self._cluster.nodes[position]
        if not node.hosts(self._shape):
            return None
        return -self._score(node, self._shape), self._order(position, self._last), position, node.version
