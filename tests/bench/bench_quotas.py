"""Large sources of quotas: how long they take, and for how long the event loop serves nothing else.

`python -m tests.bench.bench_quotas` prints one JSON object.
"""

import asyncio
from typing import NoReturn

from gpumgr.cluster.core.quota import Quotas
from gpumgr.cluster.scheduler.quota_sources import QuotaSources, parse_quotas, parse_resource_quota
from gpumgr.settings.hami_resources import ReplicaResources
from tests.background import background
from tests.bench import figures
from tests.bench.figures import Stopwatch
from tests.bench.held import HeldTimes, run_held

RESOURCE_QUOTAS = 2000
NAMESPACES = 5000
_HAMI = ReplicaResources()
_ENTRY = "team-{:05d}:\n  - {{cores: 1600, memory: 640Gi}}\n  - {{cores: 400, model: A100}}\n  - {{gpus: 2, pool: research}}\n"


async def _others() -> NoReturn:
    """What the event loop serves beside the quotas."""
    while True:  # noqa: ASYNC110 (nothing is awaited: the turns are measured)
        await asyncio.sleep(0.001)


async def _sources(held: HeldTimes) -> dict[str, float]:
    quotas = Quotas()
    sources = QuotaSources(quotas, "kube-system/gpuquota")
    hard = {"limits.nvidia.com/gpumem": "1000", "limits.nvidia.com/gpucores": "100"}
    items = [
        {"metadata": {"uid": f"u{number}", "namespace": f"ns-{number}"}, "spec": {"hard": hard}}
        for number in range(RESOURCE_QUOTAS)
    ]
    async with background(_others()):
        await asyncio.sleep(0)
        held.take()
        parsed = []
        for number, item in enumerate(items):
            if number % 50 == 0:
                await asyncio.sleep(0)  # as a list does
            parsed.append(parse_resource_quota(item, _HAMI))
        for each in parsed:
            sources.resource_quota_changed(None, each)
        listed = max(held.take())
        text = "".join(map(_ENTRY.format, range(NAMESPACES)))
        with Stopwatch() as watch:
            item = {"metadata": {"uid": "u"}, "data": {"quota.yaml": text}}
            sources.configmap_changed(None, await asyncio.to_thread(parse_quotas, item))  # as the watch does
        held_ms = 1000 * max(held.take())
        assert len(quotas.limits) == NAMESPACES + RESOURCE_QUOTAS
    return {
        "resource_quotas_held_ms": round(1000 * listed, 1),
        "configmap_kibibytes": len(text) >> 10,
        "configmap_seconds": round(watch.seconds, 2),
        "configmap_held_ms": round(held_ms, 1),
    }


def measure() -> dict[str, float]:
    return run_held(_sources)


if __name__ == "__main__":
    figures.main(measure, __doc__)
