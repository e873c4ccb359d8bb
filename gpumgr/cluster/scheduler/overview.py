"""A row and sums for each node, for the page and for metrics. They are computed again only for nodes that have changed.

A refresh runs in slices, so that a verb never waits for all nodes.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from gpumgr.cluster.core.node import NodeState, Totals, Used, covers, summarize
from gpumgr.cluster.core.request import NOTHING
from gpumgr.cluster.scheduler.objects import WatchedNode
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.common.units import Amounts

#: The number of nodes that are computed before the event loop serves other tasks.
_SLICE: Final = 100
_CLOSED: Final = {(True, False): 0, (True, True): 1, (False, False): 2, (False, True): 2}


class _Node(msgspec.Struct, frozen=True):
    """`row` is the node's row of the page, as JSON."""

    row: msgspec.Raw
    totals: Totals
    sums: Amounts
    inventory: str


class ClusterOverview:
    """`totals` are the sums over all nodes; `inventories` counts nodes by WatchedNode.inventory. Nodes without GPUs and without an
    inventory are left out."""

    def __init__(self, watches: ClusterWatches) -> None:
        self._index, self._watched = watches.index, watches.nodes
        self._nodes: dict[str, _Node] = {}
        self._lock = asyncio.Lock()
        self.totals = Totals()
        self.inventories: Counter[str] = Counter()

    async def refresh(self) -> None:
        """Computes the nodes that have changed in the index."""
        async with self._lock:
            while self._index.changed:
                for _ in range(min(_SLICE, len(self._index.changed))):
                    self._update(self._index.changed.pop())
                await asyncio.sleep(0)

    def _update(self, name: str) -> None:
        if (before := self._nodes.pop(name, None)) is not None:
            self._count(before, -1)
        state, watched = self._index.node(name), self._watched.get(name)
        if state is None or watched is None or not (state.gpus or watched.inventory != "none"):
            return
        used = self._index.used(name)
        row = msgspec.Raw(msgspec.json.encode(_row(state, used, watched)))
        self._nodes[name] = after = _Node(row, *summarize(state, used), watched.inventory)
        self._count(after, 1)

    def _count(self, node: _Node, sign: int) -> None:
        for key, amount in node.totals.items():
            self.totals[key] += sign * amount
            if not self.totals[key]:
                del self.totals[key]
        self.inventories[node.inventory] += sign

    # -- queries, as of the last refresh -----------------------------------------------------------------------------------

    @property
    def names(self) -> Iterable[str]:
        """Nodes with GPUs or an inventory."""
        return self._nodes.keys()

    def sums(self, name: str) -> Amounts:
        """What is free on the node's offered GPUs together."""
        node = self._nodes.get(name)
        return node.sums if node is not None else NOTHING

    def covering(self, wanted: Amounts) -> list[str]:
        """Nodes that have `wanted` in total."""
        return [name for name, node in self._nodes.items() if covers(node.sums, wanted)]

    @property
    def rows(self) -> list[msgspec.Raw]:
        return [node.row for node in self._nodes.values()]


def _row(state: NodeState, used: Used, watched: WatchedNode) -> dict[str, Any]:
    """`gpus` has for each GPU [model's position in `models`, used cores, used MiB, all MiB, 0 = offered, 1 = cordoned, 2 = unhealthy]."""
    models = sorted({gpu.model for gpu in state.gpus})
    return {
        "name": state.name,
        "models": models,
        "gpus": [
            (models.index(gpu.model), held.cores, held.memory_mebibytes, gpu.memory_mebibytes, _CLOSED[gpu.healthy, gpu.cordoned])
            for gpu, held in zip(state.gpus, used, strict=True)
        ],
        "ready": watched.ready,
        "inventory": watched.inventory,
        **({"pool": state.pool} if state.pool else {}),
        **({"problem": watched.problem} if watched.problem else {}),
    }
