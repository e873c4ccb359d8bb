"""How busy each process keeps a GPU, made from the driver's samples of single processes.

The driver answers with samples newer than a given instant (microseconds of the wall clock), and none for a process that ran nothing.
Its own sampling period is a sixth of a second to a second (NVML's reference), and differs between processes of one GPU. So a process
without a new sample is either idle or was sampled just before we asked: what was known of it stands for one such period.

Drivers are known to pad answers with entries of no process, to give percentages of billions, and to repeat themselves; the wall
clock may be set back. Only entries that can be true and are new count.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpumgr.nvml.binding import INSUFFICIENT_SIZE, NOT_FOUND, SUCCESS, Binding, CallError, Handle

#: The driver's longest sampling period; also how far back the first look at a GPU goes.
_PERIOD_MICROSECONDS: Final = 1_000_000
#: An answer that grows between the question for its size and its fetch is asked for again.
_TRIES: Final = 3

#: The host's pid, the wall clock's microseconds, and percent of the time in which the process' kernels ran.
Sample = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known of one GPU: the instant of its newest sample, and by pid (mean ratio, when it was learnt); in microseconds."""

    newest: int
    learnt: Mapping[int, tuple[float, int]] = field(default_factory=dict)

    def since(self, now: int) -> int:
        """From when on samples are news. If the clock was set back, what is in its future now must not hide what comes."""
        return min(self.newest, now)


def advance(look: Look, samples: Iterable[Sample], now: int) -> Look:
    """What is known after these samples: each process' mean over its new ones, or what is not older than a period."""
    since = look.since(now)
    new = {(pid, instant): percent for pid, instant, percent in samples if instant > since and 0 <= percent <= 100}
    percents: dict[int, list[int]] = {}
    for (pid, _), percent in new.items():
        percents.setdefault(pid, []).append(percent)
    standing = {pid: (ratio, at) for pid, (ratio, at) in look.learnt.items() if 0 <= now - at < _PERIOD_MICROSECONDS}
    fresh = {pid: (sum(each) / len(each) / 100, now) for pid, each in percents.items()}
    return Look(newest=max((instant for _, instant in new), default=since), learnt=standing | fresh)


class ProcessUtilization:
    """The looks at all GPUs, by UUID. For the worker's thread alone. `clock` is the wall clock, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._looks: dict[str, Look] = {}

    def read(self, nvml: Binding, uuid: str, handle: Handle) -> Mapping[int, float] | None:
        """By pid how busy it keeps the GPU (0..1), idle processes left out; None if the driver can't tell."""
        now = int(self._clock() * 1_000_000)
        before = self._looks.get(uuid) or Look(newest=now - _PERIOD_MICROSECONDS)
        samples = _fetch(nvml, handle, before.since(now))
        if samples is None:
            return None
        look = self._looks[uuid] = advance(before, samples, now)
        return {pid: ratio for pid, (ratio, _) in look.learnt.items()}

    def forget(self) -> None:
        """What was known is of no use: nobody asked for a while."""
        self._looks.clear()


def _fetch(nvml: Binding, handle: Handle, since: int) -> list[Sample] | None:
    for _ in range(_TRIES):
        try:
            samples = nvml.ask("nvmlDeviceGetProcessUtilization", handle, since)
        except CallError as exc:
            if exc.code in (SUCCESS, NOT_FOUND):
                return []
            if exc.code == INSUFFICIENT_SIZE:
                continue
            # One statistic is not worth a GPU's whole sample. It is counted, and whoever is lost shows it elsewhere.
            return None
        return None if samples is None else [(sample.pid, sample.timeStamp, sample.smUtil) for sample in samples]
    return None
