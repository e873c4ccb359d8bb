"""What the demo's containers do: memory and utilization that vary within each grant, the same in every run."""

import asyncio
import itertools
import math
from collections.abc import Iterator
from random import Random
from typing import Final, NoReturn

from gpumgr.common.aio import wait_at_most
from gpumgr.common.units import BLOCK_BYTES, CORES_PER_GPU, GpuName
from gpumgr.sim.demo.node import SimulatedNode, Use
from gpumgr.sim.kubelet import SimContainer, SimPod

TICK_SECONDS: Final = 0.25
#: A new container loads its model for this time.
_LOADING_TICKS: Final = 4
_PERIOD_TICKS: Final = 40
#: More than the agent tolerates.
_EXCESS_BYTES: Final = 1 << 30


def use_at(name: str, tick: int, *, memory_bytes: int, cores: int) -> tuple[int, int]:
    """(bytes, percent of the GPU) after `tick` ticks, less than the grant. `name` decides where in its period the container begins."""
    wave = math.sin(2 * math.pi * (tick / _PERIOD_TICKS + Random(name).random()))
    loaded = min(1.0, (tick + 1) / _LOADING_TICKS)
    return int(memory_bytes * loaded * (0.7 + 0.15 * wave)), max(1, int(cores * loaded * (0.65 + 0.2 * wave)))


class Workload:
    def __init__(self, node: SimulatedNode) -> None:
        self._node = node
        self._ticks: dict[tuple[str, str], int] = {}
        self._over: set[str] = set()

    async def run(self) -> NoReturn:
        while True:
            self.tick()
            await asyncio.sleep(TICK_SECONDS)

    def exceed_limit(self, pod: SimPod) -> None:
        self._over.add(pod.uid)

    def stay_within_limit(self, pod: SimPod) -> None:
        self._over.discard(pod.uid)

    def tick(self) -> None:
        uses = list(self._uses())
        self._ticks = {(use.pod.uid, use.container): self._ticks.get((use.pod.uid, use.container), 0) + 1 for use in uses}
        self._node.use_all(uses)

    def _uses(self) -> Iterator[Use]:
        for pod, container, gpus in self._node.running():
            memory_bytes, sm_percent = use_at(
                f"{pod.name}/{container.name}",
                self._ticks.get((pod.uid, container.name), 0),
                memory_bytes=(granted := self._granted_bytes(container, gpus)),
                cores=min(container.cores, CORES_PER_GPU),
            )
            if pod.uid in self._over:
                memory_bytes = granted + _EXCESS_BYTES + memory_bytes // 16
            yield Use(pod=pod, container=container.name, memory_bytes=memory_bytes, sm_percent=sm_percent)

    def _granted_bytes(self, container: SimContainer, gpus: frozenset[GpuName]) -> int:
        if container.cores < CORES_PER_GPU:
            return container.memory_blocks * BLOCK_BYTES
        models = [self._node.description.model_of(self._node.indices[gpu]) for gpu in gpus]
        return int(min(model.memory_mib - model.reserved_mib for model in models)) << 20


_ROUND_SECONDS: Final = 1.5
#: Cores and memory blocks of the short-lived pods, which run at the same time.
_GUESTS: Final = ((20, 40), (30, 100), (25, 25))
#: Requests (cores, memory blocks) that no GPU can serve. The node has enough in total, so the kubelet calls the plugin.
_IMPOSSIBLE: Final = ((10, 250), (20, 0), (0, 10))
_CYCLE_ROUNDS: Final = 20
_OVER_ROUNDS: Final = range(2, 8)
_STRAY_ROUNDS: Final = range(11, 15)
_STRAY_BYTES: Final = 600 << 20
_REFUSAL_ROUNDS: Final = 4


class Activity:
    """Rounds of events after the demo's steps (see `script`). The steps leave the pods `patient` and `a` running. Each round replaces a
    short-lived pod. In some rounds a pod is refused, a share exceeds its memory, or a process runs outside of containers."""

    def __init__(self, node: SimulatedNode, work: Workload) -> None:
        self._node, self._work = node, work
        self._guests: list[SimPod] = []
        self._stray: int | None = None

    async def run(self, ended: asyncio.Event) -> None:
        """Runs until the event is set, and completes the current round."""
        self._node.delete(self._named("patient"))
        await self._node.agent_log.until("allocation_freed", holder="demo/patient (main)")
        for number in itertools.count():
            await wait_at_most(ended, _ROUND_SECONDS)
            if ended.is_set():
                return
            self._misbehave(number % _CYCLE_ROUNDS)
            await self._replace_guest(number)
            if number % _REFUSAL_ROUNDS == _REFUSAL_ROUNDS - 1:
                await self._refuse(number // _REFUSAL_ROUNDS)

    def _misbehave(self, round_number: int) -> None:
        greedy = self._named("a")
        if round_number in _OVER_ROUNDS:
            self._work.exceed_limit(greedy)
        else:
            self._work.stay_within_limit(greedy)
        if round_number in _STRAY_ROUNDS and self._stray is None:
            (gpu,) = self._node.gpus_of(greedy)
            self._stray = self._node.start_process_outside_containers(
                self._node.indices[gpu], memory_bytes=_STRAY_BYTES, sm_percent=3
            )
        elif round_number not in _STRAY_ROUNDS and self._stray is not None:
            self._node.end_process_outside_containers(self._stray)
            self._stray = None

    async def _replace_guest(self, number: int) -> None:
        if len(self._guests) == len(_GUESTS):
            self._node.delete(self._guests.pop(0))
        self._guests.append(await self._run(f"guest-{number}", *_GUESTS[number % len(_GUESTS)]))

    async def _refuse(self, number: int) -> None:
        self._node.delete(await self._run(f"impossible-{number}", *_IMPOSSIBLE[number % len(_IMPOSSIBLE)]))

    async def _run(self, name: str, cores: int, memory_blocks: int) -> SimPod:
        pod = self._node.pod(name, SimContainer(name="main", cores=cores, memory_blocks=memory_blocks))
        await self._node.run(pod)
        return pod

    def _named(self, name: str) -> SimPod:
        return next(pod for pod in self._node.pods.values() if pod.name == name)
