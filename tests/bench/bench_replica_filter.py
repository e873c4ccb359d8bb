"""The scheduler's choice for pods with HAMi's resources beside vcuda pods, without HTTP: 5,000 nodes with 8 GPUs and 20,000 pods of both.

`python -m tests.bench.bench_replica_filter [--nodes N] [--pods N]` prints one JSON object: the choice among all nodes with the assumption
of the pod there, as in filter.
"""

import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.index import ClusterIndex, named_shares
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import PlacedPod, PodRequest
from tests.bench import figures
from tests.bench.figures import spread
from tests.cluster_states import hami, node_state, share, with_replicas

#: Request by its number, for requests that differ.
KINDS: Mapping[str, Callable[[int], PodRequest]] = {
    "vcuda": lambda number: share(10, 4 + number),
    "hami": lambda number: hami(cores=10, memory=1024 + number),
    "hami_percentage": lambda number: hami(cores=10, memory_percent=7, memory_scaling=1 + number / 1000),
    "hami_two_gpus": lambda number: hami(gpus=2, cores=10, memory=1024 + number),
}
ROUNDS, CALLS = 5, 100


class Bench:
    def __init__(self, nodes: int) -> None:
        self.index, self._uids = ClusterIndex(), count()
        self._states: dict[str, NodeState] = {}
        for number in range(nodes):
            state = with_replicas(node_state(f"node-{number}", 8), 10)
            self._states[state.name] = state
            self.index.set_node(state)
        self.names = tuple(self._states)

    def place(self, wanted: PodRequest) -> float:
        """Seconds of the choice and its assumption."""
        began = time.perf_counter()
        ranked = Question(self.index, wanted, "binpack").rank(self.names)
        assert not isinstance(ranked, Rejection), ranked
        ((name, choice),) = ranked
        shares = named_shares(self._states[name], choice)
        self.index.assume(PlacedPod(uid=str(next(self._uids)), node=name, request=wanted, shares=shares))
        return time.perf_counter() - began


def measure(*, nodes: int, pods: int) -> Mapping[str, Any]:
    bench, wanted = Bench(nodes), KINDS["hami_two_gpus"]
    for number in range(pods):
        bench.place([*KINDS.values()][number % len(KINDS)](0))
    taken: list[list[float]] = []
    for number in range(1, ROUNDS + 1):
        bench.place(wanted(number))
        taken.append([bench.place(wanted(number)) for _ in range(CALLS)])
    return {"hami_two_gpus": spread(taken)}


if __name__ == "__main__":
    figures.main(measure, __doc__, nodes=5000, pods=20_000)
