"""Resizes of running containers: decides on each requested resize, saves the decision, and reports it. See `gpumgr.ledger.resize`.

A decision is saved before any limit changes, because each evaluation (one per sample) computes the limits from the ledger. The allocation
keeps the request, so that a later agent does not decide on it again.
"""

from collections.abc import Callable
from typing import Final

import structlog

from gpumgr.agent.history import about
from gpumgr.agent.pods import undecided_resize
from gpumgr.agent.ports import Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import LogPace
from gpumgr.common.errors import CheckpointError
from gpumgr.common.units import Amounts, Resource
from gpumgr.ledger.history import RESIZED, HistoryEntry
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node_use import NodeUse
from gpumgr.ledger.resize import Surroundings, Waits, decide, refused
from gpumgr.runtime.bursts import NOT_LISTED, Bursts

log = structlog.get_logger(__name__)

#: Reasons of the event if a resize is refused, or waits for the container runtime's answer.
REFUSED: Final = "GpuResizeRefused"
WAITS: Final = "GpuResizeWaits"


async def decide_resizes(
    agent_state: AgentState,
    pods: Pods,
    bursts: Bursts,
    use: NodeUse,
    *,
    obstacle: Callable[[tuple[str, ...], Resource], str | None],
    unsaved: LogPace,
    listed: bool,
) -> bool:
    """Decides on the new requests before the evaluation's limits are computed. Returns whether the ledger has changed.

    `obstacle` returns why the given enforcement mechanisms can't change a container's limit of a resource; None: they can. `unsaved` limits
    how often the log says that a decision can't be saved. `listed`: the container runtime has listed the containers since the agent's
    start.
    """
    known = agent_state.ledger.allocations
    if not any(undecided_resize(a, pods) for a in known.values()):
        return False
    around = _surroundings(agent_state, bursts, use, obstacle, listed=listed)
    entries = list[HistoryEntry]()

    def decided(now: Ledger) -> tuple[Ledger, list[HistoryEntry]]:
        for a in [each for name, each in now.allocations.items() if name in known]:
            if (request := undecided_resize(a, pods)) is None:
                continue
            after = decide(now, a, request, around)
            if isinstance(after, Waits):
                obstacle = bursts.in_force.obstacles.get(after.holder.id)
                why = f"the lower memory limit of {after.holder.describe()} on GPU {after.gpu} is not in force: {obstacle}"
                # The resize waits while the limit is being lowered. It also waits while the holder is not listed: after a restart of the
                # agent the runtime may answer late, and a refusal would be final.
                if obstacle in (None, NOT_LISTED):
                    bursts.growing = {*bursts.growing, after.gpu}
                    if obstacle is not None:
                        why = f"the resize of container {a.container or '?'} waits: {why}"
                        agent_state.history.add_unless_repeated(about(a, HistoryEntry(what="event", code=WAITS, why=why)))
                    continue
                after = refused(a, request, why)
            entries.append(about(a, _entry(a, after)))
            now = now.occupy(after)
        return now, entries

    try:
        await agent_state.change(decided)
    except CheckpointError as error:
        if unsaved.due():
            why = "the limits stay; the resize is tried again with each sample"
            log.error("resize_not_saved", error=str(error), consequence=why)
        return False
    for entry in entries:
        write = log.info if entry.code == RESIZED else log.warning
        write("resize_decided", allocation=entry.id, pod="/".join(entry.pod or ()), code=entry.code, reason=entry.why)
    return bool(entries)


def _surroundings(
    agent_state: AgentState,
    bursts: Bursts,
    use: NodeUse,
    obstacle: Callable[[tuple[str, ...], Resource], str | None],
    *,
    listed: bool,
) -> Surroundings:
    gpus = agent_state.inventory.gpus(agent_state.ledger.gpu_registry)
    moved = {name for name, each in agent_state.suspensions.items() if not each.measured}
    return Surroundings(
        # For a suspended container the driver's figure is not the container's memory.
        used_bytes={place: None if place[0] in moved else each.memory_bytes for place, each in use.containers.items()},
        most_bytes=bursts.most_bytes,
        memory_mebibytes={name: gpu.memory_mebibytes for name, gpu in gpus.items()},
        most=Amounts(bursts.settings.max_growth_cores, bursts.settings.max_growth_memory_mebibytes),
        obstacle=obstacle,
        away={name for name, each in agent_state.suspensions.items() if each.away and each.asked_at is None},
        listed=listed,
    )


def _entry(before: Allocation, after: Allocation) -> HistoryEntry:
    assert after.resize is not None
    if why := after.resize.refused:
        return HistoryEntry(what="event", code=REFUSED, why=f"container {after.container or '?'} is not resized: {why}")
    lent = {gpu: mebibytes for gpu in after.gpus if (mebibytes := after.lent_on(gpu))}
    notes = {gpu: f" ({mebibytes} MiB only until suspended containers are resumed)" for gpu, mebibytes in lent.items()}
    changes = [f"{after.limits_on(gpu)} of GPU {gpu}{notes.get(gpu, '')}, before {before.limits_on(gpu)}" for gpu in after.gpus]
    late = "; programs that run keep the limits with which they started (MPS)" if "mps" in after.mechanisms else ""
    return HistoryEntry(what="event", code=RESIZED, why=f"container {after.container or '?'} may use {'; '.join(changes)}{late}")
