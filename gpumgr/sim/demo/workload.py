"""What the demo's containers do: memory and utilisation that vary within each grant, the same in every run."""

import asyncio
import math
from collections.abc import Iterator
from random import Random
from typing import Final, NoReturn

from gpumgr.common.units import BLOCK_BYTES, CORES_PER_GPU, GpuName
from gpumgr.sim.demo.node import SimulatedNode, Use
from gpumgr.sim.kubelet import SimContainer, SimPod

TICK_SECONDS: Final = 0.25
#: Number of ticks in which a new container loads its model.
_LOADING_TICKS: Final = 4
#: Granularity of memory use.
_PIECE_BYTES: Final = 2 << 20
#: Memory beyond the grant while a container exceeds its limit: more than the agent tolerates.
_EXCESS_BYTES: Final = 1 << 30


def use_at(name: str, tick: int, *, memory_bytes: int, cores: int, noise: float) -> tuple[int, int]:
    """Bytes and percent of the GPU after `tick` ticks, for a grant of `memory_bytes` and `cores`; `noise` is within ±0.02.

    The same for the same name. Use stays within the grant, noise included.
    """
    random = Random(name)
    memory_ratio, memory_swing = random.uniform(0.5, 0.78), random.uniform(0.08, 0.2)
    busy_ratio, busy_swing = random.uniform(0.55, 0.75), random.uniform(0.1, 0.2)
    turn = tick / random.uniform(20, 60) + random.random()
    loaded = min(1.0, (tick + 1) / _LOADING_TICKS)
    memory = memory_ratio + memory_swing * _wave(turn) + noise
    busy = busy_ratio + busy_swing * _wave(1.7 * turn) + 2 * noise
    return int(memory_bytes * loaded * memory) // _PIECE_BYTES * _PIECE_BYTES, max(1, int(cores * loaded * busy))


def _wave(turn: float) -> float:
    return math.sin(2 * math.pi * turn)


class Workload:
    """Sets the use of every container of the node. Processes that others put on a GPU are not changed."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node
        self._noise = Random(0)
        self._ticks: dict[tuple[str, str], int] = {}
        self._over: set[str] = set()

    async def run(self) -> NoReturn:
        while True:
            self.tick()
            await asyncio.sleep(TICK_SECONDS)

    def exceed_limit(self, pod: SimPod) -> None:
        """The pod's containers use more memory than they were granted, from the next tick on."""
        self._over.add(pod.uid)

    def stay_within_limit(self, pod: SimPod) -> None:
        self._over.discard(pod.uid)

    def tick(self) -> None:
        """Advances all containers by one step."""
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
                noise=self._noise.uniform(-0.02, 0.02),
            )
            if pod.uid in self._over:
                memory_bytes = granted + _EXCESS_BYTES + memory_bytes // 16
            yield Use(pod=pod, container=container.name, memory_bytes=memory_bytes, sm_percent=sm_percent)

    def _granted_bytes(self, container: SimContainer, gpus: frozenset[GpuName]) -> int:
        """The granted bytes on each of its GPUs."""
        if container.cores < CORES_PER_GPU:
            return container.memory_blocks * BLOCK_BYTES
        cards = [self._node.description.card_of(self._node.indices[gpu]) for gpu in gpus]
        return int(min(card.memory_mib - card.reserved_mib for card in cards)) << 20
