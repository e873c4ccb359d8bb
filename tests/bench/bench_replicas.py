"""GetPreferredAllocation and Allocate of `nvidia.com/gpu` (profile both), 100 pods beside 60 vcuda pods on 16 GPUs.

`python -m tests.bench.bench_replicas [--rounds N]` prints one JSON object. The times are those of the agent's decision with its durable
commit, from the decoded request to the answer. `vcuda_prefer` and `vcuda_allocate` are the same of vcuda pods, for each resource.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench import figures
from tests.bench.figures import spread
from tests.component.stage.stage import app, snapshot, stage
from tests.component.stage.test_replicas import hami

VCUDA_PODS, HAMI_PODS = 60, 100


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
    return {name: spread(found) for name, found in taken.items()}


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=3)
