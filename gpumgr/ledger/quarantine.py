"""Decides which GPUs are in quarantine: a GPU with processes of an ended allocation is not offered until these have ended.

A pod can end while a process stays in the driver (D state, a detached child) with its GPU memory. Processes that were first sampled while
the GPU had no allocation (a display server, the operator's tools) do not count.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import GpuName, Process

#: How long the driver may list processes of an ended container before gpumgr reports them. On an H200 a process with 35 GiB stays listed
#: for half a second after its end.
EXPECTED_SECONDS: Final = 10.0


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """GPU -> processes. `tenants`: first sampled while the GPU was allocated. `unattributed`: first sampled while it was not. `held`: they
    keep the GPU in quarantine."""

    tenants: Mapping[GpuName, frozenset[Process]] = msgspec.field(default_factory=dict)
    unattributed: Mapping[GpuName, frozenset[Process]] = msgspec.field(default_factory=dict)
    held: Mapping[GpuName, frozenset[Process]] = msgspec.field(default_factory=dict)

    def reason(self, gpu: GpuName) -> str | None:
        if gpu not in self.held:
            return None
        pids = ", ".join(str(pid) for pid, _ in sorted(self.held[gpu]))
        return f"in quarantine: processes of an ended pod still run there (pid {pids})"


def sampled(state: Quarantine, processes: Mapping[GpuName, Collection[Process]], occupied: Collection[GpuName]) -> Quarantine:
    """The state after a sample. `processes` has only GPUs with a readable process list."""
    tenants, unattributed, held = dict(state.tenants), dict(state.unattributed), dict(state.held)
    for gpu, running in processes.items():
        now = frozenset(running)
        known_unattributed = unattributed.get(gpu, frozenset()) & now
        if gpu in occupied:
            tenants[gpu] = now - known_unattributed
            unattributed[gpu] = known_unattributed
        elif gpu in held:
            held[gpu] = held[gpu] & now
            unattributed[gpu] = now - held[gpu]
        else:
            tenants[gpu], unattributed[gpu] = frozenset(), now
    return _tidy(Quarantine(tenants=tenants, unattributed=unattributed, held=held))


def ended(state: Quarantine, gpus: Collection[GpuName], runs: Callable[[Process], bool]) -> Quarantine:
    """The state after the end of the last allocation on `gpus`. A GPU goes into quarantine if one of its `tenants` still `runs`."""
    left = {gpu: frozenset(p for p in state.tenants.get(gpu, ()) if runs(p)) for gpu in gpus}
    tenants = {gpu: who for gpu, who in state.tenants.items() if gpu not in left}
    return _tidy(replace(state, tenants=tenants, held={**state.held, **left}))


def released(state: Quarantine, runs: Callable[[Process], bool]) -> Quarantine:
    return _tidy(replace(state, held={gpu: frozenset(p for p in who if runs(p)) for gpu, who in state.held.items()}))


def _tidy(state: Quarantine) -> Quarantine:
    def filled(who: Mapping[GpuName, frozenset[Process]]) -> Mapping[GpuName, frozenset[Process]]:
        return {gpu: processes for gpu, processes in who.items() if processes}

    return Quarantine(tenants=filled(state.tenants), unattributed=filled(state.unattributed), held=filled(state.held))
