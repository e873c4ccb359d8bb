"""Allocate of `nvidia.com/gpu` (profile both), 100 pods beside 60 vcuda pods on 16 GPUs.

`python -m tests.bench.bench_replicas [--rounds N]` prints one JSON object. `allocate` is the agent's decision, from the decoded request to
the answer; its checkpoint is in memory. `register` is one pass of the reporter for HAMi's scheduler after an allocation has changed, with
all these pods.
"""

import gc
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpumgr.agent.node_report import NodeReport
from gpumgr.kube.publisher.hami import register
from gpumgr.ledger.ledger import Ledger
from gpumgr.placement.pods import PodView
from tests.bench import figures
from tests.bench.figures import Stopwatch, spread
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


def registers(node: Stage) -> list[float]:
    """Seconds of each pass of the reporter."""
    view, pods = node.agent.view(), IndexedPods().index(node.pods)
    assert len(view.ledger.allocations) == VCUDA_PODS + HAMI_PODS
    taken: list[float] = []
    for _ in range(PASSES):
        changed = replace(view, ledger=Ledger(view.ledger.gpu_registry, dict(view.ledger.allocations)))
        with Stopwatch() as watch:
            register(lambda _key, _value: None, pods, NodeReport(view=changed))
        taken.append(watch.seconds)
    return taken


def time_allocations(agent: Any) -> list[float]:
    """The seconds of each call from now on are put there."""
    inner, taken = agent.allocate, list[float]()

    async def allocate(*arguments: Any) -> Any:
        with Stopwatch() as watch:
            answer = await inner(*arguments)
        taken.append(watch.seconds)
        return answer

    agent.allocate = allocate
    return taken


async def measure(*, rounds: int) -> Mapping[str, Any]:
    allocations, passes = list[list[float]](), list[list[float]]()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            async with stage(Path(folder), node=snapshot(16, 560), kinds=("core", "memory", "replica")) as node:
                for number in range(VCUDA_PODS):
                    await node.run_all(node.pod(f"vcuda-{number}", app(5, 10)))
                gc.collect()
                gc.freeze()  # as the agent does at its start
                allocations.append(time_allocations(node.agent))
                for number in range(HAMI_PODS):
                    await node.run_all(node.pod(f"hami-{number}", hami(gpumem=1000 + number)))
                passes.append(registers(node))
    return {"allocate": spread(allocations), "register": spread(passes)}


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=3)
