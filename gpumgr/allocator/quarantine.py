"""GPUs whose last allocation ended while processes first seen during it still run there: not offered until they are gone.

A pod can end while a process of its container lingers in the driver (D state, a detached child); the next tenant would meet its
memory. Processes that were there before the first allocation (a display server, the operator's own tools) don't count.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from gpumgr.units import GpuName

#: (pid, start time in clock ticks since boot): together they name one process for ever.
Process = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """`tenants`: processes first seen while the GPU was allocated. `strangers`: those first seen while it was not.
    `held`: GPU -> the processes that keep it in quarantine."""

    tenants: Mapping[GpuName, frozenset[Process]] = field(default_factory=dict)
    strangers: Mapping[GpuName, frozenset[Process]] = field(default_factory=dict)
    held: Mapping[GpuName, frozenset[Process]] = field(default_factory=dict)

    def reason(self, gpu: GpuName) -> str | None:
        if gpu not in self.held:
            return None
        pids = ", ".join(str(pid) for pid, _ in sorted(self.held[gpu]))
        return f"in quarantine: processes of an ended pod still run there (pid {pids})"


def sampled(state: Quarantine, processes: Mapping[GpuName, Collection[Process]], occupied: Collection[GpuName]) -> Quarantine:
    """After a sample of who runs where. `processes` holds only GPUs whose list could be read."""
    tenants, strangers, held = dict(state.tenants), dict(state.strangers), dict(state.held)
    for gpu, running in processes.items():
        now = frozenset(running)
        known_strangers = strangers.get(gpu, frozenset()) & now
        if gpu in occupied:
            tenants[gpu] = now - known_strangers
            strangers[gpu] = known_strangers
        elif gpu in held:
            held[gpu] = held[gpu] & now
            strangers[gpu] = now - held[gpu]
        else:
            tenants[gpu], strangers[gpu] = frozenset(), now
    return _tidy(Quarantine(tenants=tenants, strangers=strangers, held=held))


def ended(state: Quarantine, gpus: Collection[GpuName], runs: Callable[[Process], bool]) -> Quarantine:
    """After the last allocation on `gpus` ended: those with a tenant that `runs` says still lives go into quarantine."""
    left = {gpu: frozenset(p for p in state.tenants.get(gpu, ()) if runs(p)) for gpu in gpus}
    tenants = {gpu: who for gpu, who in state.tenants.items() if gpu not in left}
    return _tidy(replace(state, tenants=tenants, held={**state.held, **left}))


def released(state: Quarantine, runs: Callable[[Process], bool]) -> Quarantine:
    """Without those that no longer run."""
    return _tidy(replace(state, held={gpu: frozenset(p for p in who if runs(p)) for gpu, who in state.held.items()}))


def _tidy(state: Quarantine) -> Quarantine:
    def filled(who: Mapping[GpuName, frozenset[Process]]) -> Mapping[GpuName, frozenset[Process]]:
        return {gpu: processes for gpu, processes in who.items() if processes}

    return Quarantine(tenants=filled(state.tenants), strangers=filled(state.strangers), held=filled(state.held))
