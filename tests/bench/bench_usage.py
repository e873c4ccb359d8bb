"""What the second's truth pass costs the event loop: 8 GPUs, 400 processes, 200 shares (shared_node.py).

`python -m tests.bench.bench_usage [--rounds N]` prints one JSON object. From the driver's sample to the end of all that
follows from it: start times out of /proc, the ledger, cgroups, the runtime's list, the join, and each mechanism's look and repair.
`loop` is the time during which the loop is held in one sample, `loop_lag` is how late the loop's timers are while samples follow on one
another.
"""

import asyncio
import gc
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gpumgr.common.aio import report_event_loop_lag
from gpumgr.placement.devices import NodeSample
from tests.background import background
from tests.bench import figures
from tests.bench.bench_prestart import end_daemons
from tests.bench.figures import spread
from tests.bench.held import HeldTimes, run_held
from tests.bench.places import Places
from tests.bench.shared_node import MIXES, PROCESSES_OF_SHARE, SHARES, MechanismOf, SharedNode, sleepers

#: Before the first round that counts: the runtime is asked every second at first.
WARM_UP = 20
LAG_TICK_SECONDS = 0.001


async def hold(node: SharedNode, sample: NodeSample, held: HeldTimes, rounds: int) -> dict[str, float | int]:
    taken: list[float] = []
    for _ in range(rounds):
        held.take()
        await node.sampled(sample)
        taken.append(sum(held.take()))
        await asyncio.sleep(0)
    return spread([taken])


async def lag(node: SharedNode, sample: NodeSample, rounds: int) -> dict[str, float | int]:
    late: list[float] = []
    async with background(report_event_loop_lag(late.append, period_seconds=LAG_TICK_SECONDS)):
        for _ in range(rounds):
            await node.sampled(sample)
    return spread([late])


async def measure_mix(folder: Path, mechanism_of: MechanismOf, rounds: int, held: HeldTimes) -> Mapping[str, object]:
    places = Places.lay_out(folder / "places")
    node = SharedNode(folder, places, mechanism_of)
    try:
        tenants = await node.grant()
        sockets = await node.start(tenants)
        with places.runtime(), sleepers(sockets) as pids:
            sample = await node.run(tenants, pids)
            for _ in range(WARM_UP):
                await node.sampled(sample)
            use = node.memory_watcher.use
            assert use is not None
            assert sum(len(each.processes) for each in use.containers.values()) == len(pids)
            assert not use.unattributed
            gc.collect()
            gc.freeze()  # as the agent does when it is up
            found = {"loop": await hold(node, sample, held, rounds), "loop_lag": await lag(node, sample, rounds)}
    finally:
        await node.close()
        end_daemons(folder / "run" / "mps")
    return found


def measure(rounds: int) -> dict[str, object]:
    result: dict[str, object] = {"shares": SHARES, "processes": SHARES * PROCESSES_OF_SHARE}
    for name, mechanism_of in MIXES.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gb-") as folder:
            result[name] = run_held(partial(measure_mix, Path(folder), mechanism_of, rounds))
    return result


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=200)
