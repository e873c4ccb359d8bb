"""What a pod's grant costs the API server: 100 pods at once, until the last one's annotations are written.

`python -m tests.bench.bench_writer [--rounds N]` prints one JSON object. The agent, the publisher and the pod cache are the real ones
in one event loop; the kubelet is in memory, so that all pods are granted at one instant, and the API server is the stand-in, in the same
loop. Nothing enforces limits, which is in each pod's event; all pods start once they are granted. Seconds count from the first grant:
`grants` to the last one, `annotations` to the last patch, `events` to the last event; the reporter's delay and the publisher's rate (50
requests a second, 100 at once) are included. The floor is the same patches by a plain aiohttp client, one after another.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from gpumgr.driver import Hardware
from gpumgr.kube.cache import PodCache
from gpumgr.kube.client import ApiServer
from gpumgr.kube.publisher.decisions import DecisionReporter
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.history import NOT_ENFORCED
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.settings import Settings
from gpumgr.settings.schema import CheckpointSettings, ContainerSettings, CriSettings, EnforcementSettings
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.kubelet_pods import PodStatus, SimContainer, SimPod
from tests.background import background, until
from tests.bench import figures
from tests.bench.figures import median_and_worst
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World

PODS = 100
GPUS = 8
_NODE = "node-1"
_PATIENCE_SECONDS = 60.0


class Round:
    """A node and an API server with its pods."""

    def __init__(self, world: World, api: SimApiServer, cache: PodCache, publisher: Publisher) -> None:
        self._world, self._api = world, api
        self._cache, self._announcer = cache, publisher
        self._decisions = DecisionReporter(self._announcer, agent_state=world.agent_state, pods=self._cache, node=_NODE)
        container = SimContainer(name="main", cores=5, memory_blocks=1)
        self.pods: list[SimPod] = [world.pod(f"pod-{number:03d}", container) for number in range(PODS)]

    async def measure(self) -> tuple[float, float, float, float]:
        """Seconds to the last grant, the last annotation, the last event, and requests for each pod."""
        for pod in self.pods:
            self._api.put(pod, PodStatus(phase="Pending"))
        async with AsyncExitStack() as stack, asyncio.timeout(_PATIENCE_SECONDS):
            for each in (self._cache, self._announcer, self._decisions):
                await stack.enter_async_context(background(each.run()))
            await until(lambda: len(list(self._cache.all())) == PODS)
            began = time.perf_counter()
            for pod in self.pods:
                await self._world.admit(pod)
            granted = time.perf_counter() - began
            for pod in self.pods:
                await self._world.start(pod)
            await until(lambda: all(map(self.annotations, self.pods)))
            annotated = time.perf_counter() - began
            await until(lambda: len(self._api.written.events) == PODS and not self._announcer.state().waiting)
            reported = time.perf_counter() - began
        return granted, annotated, reported, sum(request not in ("list", "watch") for request in self._api.requests) / PODS

    def annotations(self, pod: SimPod) -> Mapping[str, str]:
        return self._api.annotations(pod.uid)


async def floor(api: SimApiServer, patches: Sequence[tuple[SimPod, Mapping[str, str]]]) -> float:
    """Seconds for plain patches, one after another."""
    headers = {"Content-Type": "application/merge-patch+json"}
    async with aiohttp.ClientSession(api.url, headers=headers) as client:
        began = time.perf_counter()
        for pod, values in patches:
            path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
            async with client.patch(path, data=json.dumps({"metadata": {"uid": pod.uid, "annotations": values}})) as response:
                response.raise_for_status()
        return time.perf_counter() - began


def enforcing_nothing(folder: Path, cache: PodCache, publisher: Publisher) -> NodeEnforcement:
    """The agent's enforcement on a node without a mechanism."""
    settings = Settings(
        checkpoint=CheckpointSettings(dir=folder),
        container=ContainerSettings(allocation_dir=folder / "vm"),
        cri=CriSettings(socket=folder / "none.sock"),
        enforcement=EnforcementSettings(backend="none", run_dir=folder / "run"),
    )
    return NodeEnforcement(settings, Hardware(sysfs_root=folder, simulated=True), cache, publisher)


async def measure_once(folder: Path) -> tuple[float, ...]:
    """The round's figures, and the floor's seconds on a fresh server."""
    async with SimApiServer(_NODE) as api:
        server = await ApiServer.connect(api.kubeconfig(folder / "kubeconfig"))
        try:
            cache, publisher = PodCache(server, _NODE), Publisher(server, _NODE)
            enforcing = enforcing_nothing(folder, cache, publisher)
            world = await World.made(snapshot(GPUS, 16), limits=enforcing.limits)
            await enforcing.open(world.agent_state, lost=False)
            taken = Round(world, api, cache, publisher)
            found = await taken.measure()
            await enforcing.close()
        finally:
            await server.close()
        started = sum(entry.code == NOT_ENFORCED for entry in world.agent_state.history.entries())
        if started != PODS:
            raise RuntimeError(f"{started} of {PODS} containers were found without limits")
        patches = [(pod, dict(taken.annotations(pod))) for pod in taken.pods]
    async with SimApiServer(_NODE) as fresh:
        for pod in taken.pods:
            fresh.put(pod, PodStatus(phase="Pending"))
        return *found, await floor(fresh, patches)


def measure(rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="gb-") as folder:
        taken = [asyncio.run(measure_once(Path(folder))) for _ in range(rounds)]
    granted, annotated, reported, calls, plain = zip(*taken, strict=True)
    return {
        "pods": PODS,
        "grants": median_and_worst(granted),
        "annotations": median_and_worst(annotated),
        "events": median_and_worst(reported),
        "calls_for_each_pod": max(calls),
        "floor": median_and_worst(plain),
    }


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=5)
