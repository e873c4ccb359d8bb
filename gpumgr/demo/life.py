"""After the script: a node on which things go on, so that there is something to see on its pages."""

import asyncio
import itertools
from typing import Final, NoReturn

from gpumgr.demo.node import Node
from gpumgr.demo.work import Work
from gpumgr.sim.kubelet import SimContainer, SimPod

_ROUND_SECONDS: Final = 1.5
#: Cores and memory blocks of those who come and go; as many as the list is long are there at once.
_GUESTS: Final = ((20, 40), (30, 100), (25, 25))
#: Cores and memory blocks that nobody is given: a kubelet asks for them, since the node's sum has the room even when all guests are there.
_IMPOSSIBLE: Final = ((10, 250), (20, 0), (0, 10))
#: In a cycle of so many rounds: when the first share goes over its memory, and when a process of nobody is on its GPU.
_CYCLE_ROUNDS: Final = 20
_OVER_ROUNDS: Final = range(2, 8)
_STRAY_ROUNDS: Final = range(11, 15)
_STRAY_BYTES: Final = 600 << 20
#: Every so many rounds, when all guests are there, somebody is refused.
_REFUSAL_ROUNDS: Final = 4


class Life:
    """Begins where the script ends: shares run on one GPU, and the pod `patient` makes room for what comes."""

    def __init__(self, node: Node, work: Work, *, round_seconds: float = _ROUND_SECONDS) -> None:
        self._node, self._work, self._round_seconds = node, work, round_seconds
        self._guests: list[SimPod] = []
        self._stray: int | None = None

    async def run(self) -> NoReturn:
        self._node.delete(self._named("patient"))
        await self._node.journal.until("allocation_freed", holder="demo/patient (main)")
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
            self._work.go_over(greedy)
        else:
            self._work.calm_down(greedy)
        if round_number in _STRAY_ROUNDS and self._stray is None:
            (gpu,) = self._node.gpus_of(greedy)
            self._stray = self._node.stray(self._node.indices[gpu], memory_bytes=_STRAY_BYTES, sm_percent=3)
        elif round_number not in _STRAY_ROUNDS and self._stray is not None:
            self._node.end_stray(self._stray)
            self._stray = None

    async def _receive(self, number: int) -> None:
        """A guest comes, and the oldest goes when it gets crowded."""
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
