"""A row and sums for each node with GPUs, for the page and the metrics. Nodes are computed again only after a change."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gpumgr.cluster.core.node import NodeState, Totals, Used, summarize
from gpumgr.cluster.scheduler.objects import WatchedNode
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.common.aio import in_slices, sliced
from gpumgr.common.units import Amounts

_CLOSED: Final = {(True, False): 0, (True, True): 1, (False, False): 2, (False, True): 2}


class NodeRow(msgspec.Struct, frozen=True):
    """`row`: the node as a row of the page's table, in JSON. `sums`: what is free on its offered GPUs together."""

    row: msgspec.Raw
    totals: Totals
    sums: Amounts
    inventory: str


class NodeRows:
    """`nodes`: name -> node, for each node that has GPUs or an inventory, as of the last `refresh`."""

    def __init__(self, watches: ClusterWatches) -> None:
        self._index, self._watched = watches.index, watches.nodes
        self.nodes: dict[str, NodeRow] = {}

    async def refresh(self) -> None:
        """Computes the rows of the nodes that have changed in the index."""
        await in_slices(self._index.settling())
        await in_slices(self._updates())

    def _updates(self) -> Iterator[None]:
        while self._index.changed:
            name = self._index.changed.pop()
            self.nodes.pop(name, None)
            state, watched = self._index.node(name), self._watched.get(name)
            if state is not None and watched is not None and (state.gpus or watched.inventory != "none"):
                used = self._index.used(name)
                row = msgspec.Raw(msgspec.json.encode(_row(state, used, watched)))
                self.nodes[name] = NodeRow(row, *summarize(state, used), watched.inventory)
            yield

    async def totals(self) -> Totals:
        totals = Totals()
        async for node in sliced(list(self.nodes.values())):
            totals.update(node.totals)
        return totals


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
