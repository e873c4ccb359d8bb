"""The utilization of a GPU by each process, computed from the driver's samples.

The driver returns samples newer than a given instant (microseconds of the wall clock), and none for a process that ran nothing. Its
sampling period is a sixth of a second to a second (NVML's reference) and differs between processes of one GPU. A process without a new
sample is either idle or was sampled just before, so its last value stays valid for one such period.

Drivers are known to pad answers with entries of no process, to report percentages of billions, and to repeat entries; the wall clock
may be set back. Only plausible and new entries count.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpumgr.driver.binding import Binding, CallError, Handle

#: The driver's longest sampling period; also how far back the first query of a GPU goes.
_PERIOD_MICROSECONDS: Final = 1_000_000
#: The second function (driver 550 and newer) is used if the first one is not supported.
_FUNCTIONS: Final = ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo")

#: The host's pid, the wall clock's microseconds, and percent of the time in which the process' kernels ran.
Sample = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationState:
    """One GPU: the instant of its newest sample, and by pid the mean ratio and when it was read; in microseconds."""

    newest: int
    values: Mapping[int, tuple[float, int]] = field(default_factory=dict)

    def since(self, now: int) -> int:
        """The instant after which samples are new. If the clock was set back, an instant in its future must not hide new samples."""
        return min(self.newest, now)


def advance(state: UtilizationState, samples: Iterable[Sample], now: int) -> UtilizationState:
    """The state after these samples: each process's mean over its new ones, or its last value if that is not older than a period."""
    since = state.since(now)
    new = {(pid, instant): percent for pid, instant, percent in samples if instant > since and 0 <= percent <= 100}
    percents: dict[int, list[int]] = {}
    for (pid, _), percent in new.items():
        percents.setdefault(pid, []).append(percent)
    recent = {pid: (ratio, at) for pid, (ratio, at) in state.values.items() if 0 <= now - at < _PERIOD_MICROSECONDS}
    fresh = {pid: (sum(each) / len(each) / 100, now) for pid, each in percents.items()}
    return UtilizationState(newest=max((instant for _, instant in new), default=since), values=recent | fresh)


class ProcessUtilization:
    """The state of all GPUs, for the worker's threads: at most one reads a GPU."""

    def __init__(self) -> None:
        self._states: dict[str, UtilizationState] = {}

    def read(self, nvml: Binding, uuid: str, handle: Handle) -> Mapping[int, float] | None:
        """The utilization (0..1) by pid, without idle processes; None if the driver can't report it."""
        now = int(time.time() * 1_000_000)
        before = self._states.get(uuid) or UtilizationState(newest=now - _PERIOD_MICROSECONDS)
        try:
            samples = nvml.list_first(_FUNCTIONS, handle, before.since(now))
        except CallError:  # the failure is counted but does not fail the GPU's whole sample; other calls show a lost GPU
            samples = None
        if samples is None:
            return None
        after = advance(before, ((each.pid, each.timeStamp, each.smUtil) for each in samples), now)
        self._states[uuid] = after
        return {pid: ratio for pid, (ratio, _) in after.values.items()}

    def forget(self) -> None:
        """Drops the state, which is outdated after a pause."""
        self._states.clear()
