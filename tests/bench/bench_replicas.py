"""GetPreferredAllocation and Allocate of `nvidia.com/gpu` (profile both), 100 pods beside 60 vcuda pods on 16 GPUs.

`python -m tests.bench.bench_replicas [--rounds N]` prints one JSON object. The times are those of the agent's decision with its durable
commit, from the decoded request to the answer. `vcuda_prefer` and `vcuda_allocate` are the same of vcuda pods, for each resource.

`register` is one pass of the reporter for HAMi's scheduler after an allocation has changed, with all these pods; `inventory` that of the
reporter for gpumgr's.
"""

import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpumgr.agent.node_report import NodeReport
from gpumgr.kube.publisher.hami import register
from gpumgr.kube.publisher.node_reporter import InventoryReporter
from gpumgr.ledger.ledger import Ledger
from gpumgr.placement.pods import PodView
from tests.bench import figures
from tests.bench.figures import spread
from tests.component.stage.stage import MemoryPods, Stage, app, snapshot, stage
from tests.component.stage.test_replicas import hami

VCUDA_PODS, HAMI_PODS = 60, 100
PASSES = 50


class IndexedPods(MemoryPods):
    """As the cache of the agent, which finds a pod by its UID without a search."""

    def by_uid(self, uid: str) -> PodView | None:
        return self.uids.get(uid)

    def index(self, pods: MemoryPods) -> "IndexedPods":
        """All of them are bound by HAMi's scheduler, as far as they request its resources."""
        marked = [replace(view, bound_by_hami=any(each.replicas for each in view.containers)) for view in pods.all()]
        self.views = {view.key: view for view in marked}
        self.uids = {view.uid: view for view in marked}
        return self


def passes(node: Stage) -> Mapping[str, list[float]]:
    """Seconds of each pass of both reporters."""
    state, pods, taken = node.agent.agent_state, IndexedPods().index(node.pods), dict[str, list[float]]()
    view = node.agent.view()
    changed = [replace(view, ledger=Ledger(view.ledger.gpu_registry, dict(view.ledger.allocations))) for _ in range(PASSES)]
    written: list[str] = []

    def annotate(_key: str, value: str | None) -> None:
        written.append(value or "")

    inventory = InventoryReporter(annotate, pods=pods, enforcement=lambda: "mps", topology_manager="none")
    reporters: Mapping[str, Callable[[NodeReport], None]] = {
        "register": partial(register, annotate, pods),
        "inventory": inventory.report,
    }
    assert len(state.ledger.allocations) == VCUDA_PODS + HAMI_PODS
    for each in changed:
        report = NodeReport(view=each)
        for name, reporter in reporters.items():
            began = time.perf_counter()
            reporter(report)
            taken.setdefault(name, []).append(time.perf_counter() - began)
    return taken


async def measure(*, rounds: int) -> Mapping[str, Any]:
    taken: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            async with stage(Path(folder), node=snapshot(16, 560), kinds=("core", "memory", "replica")) as node:
                times: dict[str, list[float]] = defaultdict(list)

                def timed(name: str, agent: Any = node.agent, into: dict[str, list[float]] = times) -> None:
                    inner = getattr(agent, name)

                    async def call(*arguments: Any) -> Any:
                        began = time.perf_counter()
                        try:
                            return await inner(*arguments)
                        finally:
                            into[name].append(time.perf_counter() - began)

                    setattr(agent, name, call)

                gc.collect()
                gc.freeze()  # as the agent does at its start
                timed("prefer")
                timed("allocate")
                for number in range(VCUDA_PODS):
                    await node.run_all(node.pod(f"vcuda-{number}", app(5, 10)))
                for name in ("prefer", "allocate"):
                    taken[f"vcuda_{name}"].append(times.pop(name))
                for number in range(HAMI_PODS):
                    await node.run_all(node.pod(f"hami-{number}", hami(gpumem=1000 + number)))
                for name in ("prefer", "allocate"):
                    taken[name].append(times.pop(name))
                for name, seconds in passes(node).items():
                    taken[name].append(seconds)
    return {name: spread(found) for name, found in taken.items()}


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=3)
