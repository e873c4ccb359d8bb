"""Activity on the demo's node after the script, so that its pages show changes."""

import asyncio
import itertools
from typing import Final, NoReturn

from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.demo.workload import Workload
from gpumgr.sim.kubelet import SimContainer, SimPod

_ROUND_SECONDS: Final = 1.5
#: Cores and memory blocks of the short-lived pods; as many run at once as this list is long.
_GUESTS: Final = ((20, 40), (30, 100), (25, 25))
#: Requests (cores, memory blocks) that no GPU can serve. The node's sum has free capacity, so the kubelet asks for them.
_IMPOSSIBLE: Final = ((10, 250), (20, 0), (0, 10))
#: Within a cycle of this many rounds: when the first share exceeds its memory, and when an unattributed process is on its GPU.
_CYCLE_ROUNDS: Final = 20
_OVER_ROUNDS: Final = range(2, 8)
_STRAY_ROUNDS: Final = range(11, 15)
_STRAY_BYTES: Final = 600 << 20
#: A pod is refused once in this many rounds, when all short-lived pods run.
_REFUSAL_ROUNDS: Final = 4


class Activity:
    """Starts from the state at the end of the script: shares run on one GPU, and the pod `patient` is deleted."""

    def __init__(self, node: SimulatedNode, work: Workload, *, round_seconds: float = _ROUND_SECONDS) -> None:
        self._node, self._work, self._round_seconds = node, work, round_seconds
        self._guests: list[SimPod] = []
        self._stray: int | None = None

    async def run(self) -> NoReturn:
        self._node.delete(self._named("patient"))
        await self._node.agent_log.until("allocation_freed", holder="demo/patient (main)")
        for number in itertools.count():
            await asyncio.sleep(self._round_seconds)
            self._misbehave(number % _CYCLE_ROUNDS)
            await self._receive(number)
            if number % _REFUSAL_ROUNDS == _REFUSAL_ROUNDS - 1:
                await self._refuse(number // _REFUSAL_ROUNDS)
        raise AssertionError("numbers don't end")

    def _misbehave(self, round_number: int) -> None:
        greedy = self._named("a")
        if round_number in _OVER_ROUNDS:
            self._work.exceed_limit(greedy)
        else:
            self._work.stay_within_limit(greedy)
        if round_number in _STRAY_ROUNDS and self._stray is None:
            (gpu,) = self._node.gpus_of(greedy)
            self._stray = self._node.start_unattributed(self._node.indices[gpu], memory_bytes=_STRAY_BYTES, sm_percent=3)
        elif round_number not in _STRAY_ROUNDS and self._stray is not None:
            self._node.end_unattributed(self._stray)
            self._stray = None

    async def _receive(self, number: int) -> None:
        """Starts a short-lived pod, and deletes the oldest one at the maximum number."""
        if len(self._guests) == len(_GUESTS):
            self._node.delete(self._guests.pop(0))
        self._guests.append(await self._run(f"guest-{number}", *_GUESTS[number % len(_GUESTS)]))

    async def _refuse(self, number: int) -> None:
        self._node.delete(await self._run(f"wish-{number}", *_IMPOSSIBLE[number % len(_IMPOSSIBLE)]))

    async def _run(self, name: str, cores: int, memory_blocks: int) -> SimPod:
        pod = self._node.pod(name, SimContainer(name="main", cores=cores, memory_blocks=memory_blocks))
        await self._node.run(pod)
        return pod

    def _named(self, name: str) -> SimPod:
        return next(pod for pod in self._node.pods.values() if pod.name == name)
