"""Resizes of running containers: decides requests, saves the decisions, and reports them. See `gpumgr.ledger.resize`.

A decision is saved before any limit changes: each time limits are set (an evaluation, once per sample), they are computed from the ledger.
A request is kept with its allocation, so that neither a crash nor a restart decides it again.
"""

from collections.abc import Callable
from typing import Final

import structlog

from gpumgr.agent.history import about
from gpumgr.agent.pods import undecided_resize
from gpumgr.agent.ports import Pods
from gpumgr.common.errors import CheckpointError
from gpumgr.common.units import Amounts, GpuName, Resource
from gpumgr.ledger.history import RESIZED, HistoryEntry
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.resize import Surroundings, decide
from gpumgr.ledger.usage.node_use import AllocationOnGpu, NodeUse
from gpumgr.runtime.bursts import Enforced
from gpumgr.runtime.container_events import AgentRecords

log = structlog.get_logger(__name__)

#: The reason in the pod's event if the resize of one of its containers is refused.
REFUSED: Final = "GpuResizeRefused"
#: How long the growth of a container waits for a lower limit of another one to take effect; then it is refused.
_LOWERED_SECONDS: Final = 15.0


class Resizes:
    """`obstacle`: see Surroundings. `bursts`: whether containers may burst. `clock` is monotonic."""

    def __init__(
        self,
        records: AgentRecords,
        pods: Pods,
        *,
        obstacle: Callable[[tuple[str, ...], Resource], str | None],
        bursts: bool,
        clock: Callable[[], float],
    ) -> None:
        self._records, self._pods, self._obstacle, self._clock = records, pods, obstacle, clock
        #: (container, GPU) -> the number of the evaluation that lowers its memory limit on that GPU, and when that was decided. Until it is
        #: in force, no limit grows on the GPU. At the start each resized container is here, and each one that may have burst: limits of an
        #: earlier process of the agent may be in force.
        self._lowered: dict[AllocationOnGpu, tuple[int, float]] = {
            (a.id, gpu): (1, clock())
            for a in records.ledger.allocations.values()
            for gpu in (a.gpus if bursts or a.resize is not None else ())
        }

    async def decide(self, ledger: Ledger, use: NodeUse, *, most: Amounts, number: int, enforced: Enforced) -> bool:
        """Decides the new requests; returns whether the ledger has changed. `use`: what the containers of `ledger` use. `most`: see
        Surroundings. `number`: the next evaluation of limits; `enforced`: what was in force when this sample was read."""
        self._lowered = {
            place: since
            for place, since in self._lowered.items()
            if place[0] in ledger.allocations and (since[0] > enforced.number or place[0] in enforced.obstacles)
        }
        lowered = self._waits(ledger, number, enforced)
        gpus = self._records.inventory.gpus(ledger.gpu_registry)
        moved = {name for name, each in self._records.suspensions.items() if not each.measured}
        around = Surroundings(
            # For a suspended container the driver's figure is not the container's memory.
            used_bytes={place: None if place[0] in moved else each.memory_bytes for place, each in use.containers.items()},
            memory_mebibytes={name: gpu.memory_mebibytes for name, gpu in gpus.items()},
            most=most,
            obstacle=self._obstacle,
            lowered=lowered,
            away={name for name, each in self._records.suspensions.items() if each.away and each.asked_at is None},
        )
        entries: list[HistoryEntry] = []

        def decided(now: Ledger) -> tuple[Ledger, list[HistoryEntry]]:
            for a in [each for name, each in now.allocations.items() if name in ledger.allocations]:
                asked = undecided_resize(a, self._pods)
                after = decide(now, a, asked, around) if asked is not None else None
                if after is not None:
                    for gpu in a.gpus:
                        if after.guaranteed_on(gpu).memory_mebibytes < a.guaranteed_on(gpu).memory_mebibytes:
                            self._lowered[a.id, gpu] = number, self._clock()
                            lowered.setdefault(gpu, "")
                    entries.append(about(a, _entry(a, after)))
                    now = now.occupy(after)
            return now, entries

        try:
            await self._records.change(decided)
        except CheckpointError as error:
            log.error("resize_not_saved", error=str(error), consequence="the limits stay; it is tried again with the next sample")
            return False
        for entry in entries:
            write = log.info if entry.code == RESIZED else log.warning
            write("resize_decided", allocation=entry.id, pod="/".join(entry.pod or ()), code=entry.code, reason=entry.why)
        return bool(entries)

    def _waits(self, ledger: Ledger, number: int, enforced: Enforced) -> dict[GpuName, str]:
        """GPUs on which a lower limit is not in force; see Surroundings. Growth is refused only after a whole evaluation and
        _LOWERED_SECONDS, so that a backend has time to act even if samples are rare."""
        waits: dict[GpuName, str] = {}
        for (name, gpu), (since, at) in self._lowered.items():
            waits.setdefault(gpu, "")
            if number > since + 1 and self._clock() - at >= _LOWERED_SECONDS:
                why = enforced.obstacles.get(name, "its backend has not changed it yet")
                waits[gpu] = (
                    f"the lower memory limit of {ledger.allocations[name].describe()} on GPU {gpu} is not in force: {why}"
                )
        return waits


def _entry(before: Allocation, after: Allocation) -> HistoryEntry:
    assert after.resize is not None
    if why := after.resize.refused:
        return HistoryEntry(what="event", code=REFUSED, why=f"container {after.container or '?'} is not resized: {why}")
    lent = {gpu: mebibytes for gpu in after.gpus if (mebibytes := after.lent_on(gpu))}
    notes = {gpu: f" ({mebibytes} MiB only until suspended containers are resumed)" for gpu, mebibytes in lent.items()}
    changes = [f"{after.limits_on(gpu)} of GPU {gpu}{notes.get(gpu, '')}, before {before.limits_on(gpu)}" for gpu in after.gpus]
    late = "; programs that run keep the limits with which they started (MPS)" if "mps" in after.mechanisms else ""
    return HistoryEntry(what="event", code=RESIZED, why=f"container {after.container or '?'} may use {'; '.join(changes)}{late}")
