"""The load of processes on simulated GPUs. A GPU's utilisation, temperature and power follow from its processes."""

from collections.abc import Collection, Iterable
from typing import Final

from gpumgr.sim.control import SimControl, SimProcess, SimWork
from gpumgr.sim.nodes import NodeDescription

#: How much warmer a fully used GPU is than an idle one, and by which factor its power is higher.
_BUSY_CELSIUS: Final = 42
_BUSY_POWER: Final = 10


class SimLoad:
    """All processes that were put on a GPU through it; `gpu` is an NVML index. One call is one change of the control file."""

    def __init__(self, control: SimControl, node: NodeDescription) -> None:
        self._control, self._node = control, node
        self._processes: dict[int, dict[int, SimProcess]] = {}

    def put(self, processes: Iterable[tuple[int, SimProcess]]) -> None:
        """(GPU, process): sets the process's use there. Other processes do not change."""
        touched = set[int]()
        for gpu, process in processes:
            self._processes.setdefault(gpu, {})[process.pid] = process
            touched.add(gpu)
        self._tell(touched)

    def remove(self, pids: Collection[int]) -> None:
        """These processes use no GPU any more."""
        touched = {gpu for gpu, running in self._processes.items() if not running.keys().isdisjoint(pids)}
        for gpu in touched:
            self._processes[gpu] = {pid: process for pid, process in self._processes[gpu].items() if pid not in pids}
        self._tell(touched)

    def _tell(self, gpus: Collection[int]) -> None:
        if gpus:
            self._control.set_work({gpu: self._work(gpu) for gpu in gpus})

    def _work(self, gpu: int) -> SimWork:
        card, processes = self._node.card_of(gpu), tuple(self._processes[gpu].values())
        percent = min(100, sum(process.sm_percent for process in processes))
        return SimWork(
            processes=processes,
            gpu_percent=percent,
            memory_percent=percent // 2,
            celsius=card.idle_celsius + _BUSY_CELSIUS * percent // 100,
            watts=card.idle_watts * (1 + (_BUSY_POWER - 1) * percent / 100),
        )
