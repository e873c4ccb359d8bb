"""Which strangers are news: each process is told once, whatever happens to our sight of it meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpumgr.allocator.quarantine import Process
from gpumgr.units import GpuName
from gpumgr.usage.picture import NodeUse, Stranger

#: Strangers that were told -> the GPUs where each was seen last.
Known = Mapping[Process, frozenset[GpuName]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encounter:
    """`new`: with what each does on each GPU, in the order of its pids. `gone`: ended, or at home now."""

    known: Known = field(default_factory=dict)
    new: Mapping[Process, tuple[Stranger, ...]] = field(default_factory=dict)
    gone: frozenset[Process] = frozenset()


def encounter(known: Known, use: NodeUse, started: Mapping[int, int]) -> Encounter:
    """`started`: pid -> its start time in clock ticks since boot; a process without one has just ended and is not news.

    Known ones that a GPU without a list may hide, or whose container is not clear at the moment, stay known.
    """
    here: dict[Process, list[Stranger]] = {}
    for (_, pid), stranger in sorted(use.strangers.items(), key=lambda item: (item[0][1], item[0][0])):
        if pid in started:
            here.setdefault((pid, started[pid]), []).append(stranger)
    seen = {process: frozenset(stranger.gpu for stranger in strangers) for process, strangers in here.items()}
    hidden = {
        process: gpus
        for process, gpus in known.items()
        if process not in seen
        and started.get(process[0], process[1]) == process[1]
        and (process[0] in use.unclear or not gpus <= use.gpus.keys())
    }
    return Encounter(
        known={**hidden, **seen},
        new={process: tuple(strangers) for process, strangers in here.items() if process not in known},
        gone=frozenset(known.keys() - seen.keys() - hidden.keys()),
    )
