"""Which unattributed processes are new: each is reported once, also if it can't be observed for a while."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpumgr.common.units import GpuName, Process
from gpumgr.ledger.usage.node_use import NodeUse, UnattributedProcess

#: Unattributed processes that were reported -> the GPUs on which each was seen last.
KnownProcesses = Mapping[Process, frozenset[GpuName]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnattributedChange:
    """`new`: each process with its use of each GPU, ordered by pid. `gone`: ended, or attributed now."""

    known: KnownProcesses = field(default_factory=dict)
    new: Mapping[Process, tuple[UnattributedProcess, ...]] = field(default_factory=dict)
    gone: frozenset[Process] = frozenset()


def update_unattributed(
    known: KnownProcesses, use: NodeUse, started: Mapping[int, int], expected: Collection[Process] = ()
) -> UnattributedChange:
    """The state after one sample. `started`: pid -> start time in clock ticks since boot; a process without one has just ended.
    `expected`: processes that are not reported yet.

    Known processes stay known while a GPU's list can't be read, and while their container is unknown.
    """
    here: dict[Process, list[UnattributedProcess]] = {}
    for (_, pid), found in sorted(use.unattributed.items(), key=lambda item: (item[0][1], item[0][0])):
        if pid in started and ((pid, started[pid]) in known or (pid, started[pid]) not in expected):
            here.setdefault((pid, started[pid]), []).append(found)
    seen = {process: frozenset(each.gpu for each in unattributed) for process, unattributed in here.items()}
    hidden = {
        process: gpus
        for process, gpus in known.items()
        if process not in seen
        and started.get(process[0], process[1]) == process[1]
        and (process[0] in use.unknown or not gpus <= use.gpus.keys())
    }
    return UnattributedChange(
        known={**hidden, **seen},
        new={process: tuple(unattributed) for process, unattributed in here.items() if process not in known},
        gone=frozenset(known.keys() - seen.keys() - hidden.keys()),
    )
