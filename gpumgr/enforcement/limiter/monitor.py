"""Monitors the pages of one start of a container: restores what the container changed, frees what ended processes left, and writes for
the library what the driver uses beyond its count. Blocks: call it on a thread.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpumgr.agent.ports import Finding, FindingCode, RunningContainer
from gpumgr.common.units import GpuName
from gpumgr.enforcement.limiter import pages
from gpumgr.enforcement.limiter.arbiter import Arbiter
from gpumgr.enforcement.limiter.page_files import PageFiles
from gpumgr.enforcement.limiter.pages import CountedOnGpu, PageLimits, Slot
from gpumgr.enforcement.pids import NspidOf, PidMap
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.usage.node_use import TurnUse

#: The library takes a slot when a process first uses CUDA, so a process without one is reported only after this number of checks in a row.
CHECKS_UNREGISTERED: Final = 3
#: A process that is missing at so many checks in a row has ended.
_CHECKS_ENDED: Final = 2
#: A turn that is passed on at each of so many checks: the container's work does not end.
_CHECKS_OVERRUN: Final = 2
#: A container can change many values; a message names at most this number.
_NAMED: Final = 3
_NANOSECONDS: Final = 1_000_000_000
#: Ten seconds, and the check before them.
_RECENT_CHECKS: Final = 11
#: Monotonic, in seconds.
Clock = Callable[[], float]


class PageMonitor:
    """`files` may be the reason why the pages can't be used. Any thread may call it, and `close` may be called again."""

    def __init__(self, tenant: GpuShare, files: PageFiles | str, arbiter: Arbiter, nspid_of: NspidOf, clock: Clock) -> None:
        """Owns the files, and adds the container to the arbiter. Raises ArbiterError."""
        self._files, self._arbiter, self._pids, self._clock = files, arbiter, PidMap(nspid_of), clock
        self._names = [gpu.name for gpu in tenant.gpus]
        self._lock = threading.Lock()
        self._closed = False
        self._numbers: list[int] = []
        self._reported: set[object] = set()
        self._missing: dict[tuple[int, int], int] = {}
        self._unseen: dict[int, int] = {}
        self._written: Sequence[PageLimits] | None = None
        #: For each GPU: the count at the last check, and by how much the driver's figure was above it.
        self._counted: dict[int, tuple[CountedOnGpu, int]] = {}
        self._overruns: dict[int, tuple[int, int]] = {}
        self._spoiled: dict[int, int] = {}
        #: By slot, pid and GPU: launches and nanoseconds waited at the last check; and their sums, also of processes that have ended.
        self._seen: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._launches, self._waited_ns = [0] * len(self._names), [0] * len(self._names)
        self._uses: Mapping[GpuName, TurnUse] = {}
        #: For each GPU: the time of recent checks, and the seconds held and waited until then.
        self._recent = [deque[tuple[float, float, float]](maxlen=_RECENT_CHECKS) for _ in self._names]
        if isinstance(files, PageFiles):
            for page, gpu in enumerate(tenant.gpus):
                self._numbers.append(arbiter.add(gpu.uuid, page, files.limits.descriptor, files.turn.descriptor))

    def close(self) -> None:
        with self._lock:
            if not self._closed and isinstance(self._files, PageFiles):
                for number in self._numbers:
                    self._arbiter.remove(number)
                self._files.close()
            self._closed = True

    @property
    def uses(self) -> Mapping[GpuName, TurnUse]:
        """As of the last check."""
        return self._uses

    def check(self, running: RunningContainer, limits: Sequence[PageLimits]) -> Sequence[Finding]:
        """`limits`: what was granted, without the bytes that the library does not count. Returns the new findings."""
        with self._lock:
            if self._closed:
                return ()
            if isinstance(self._files, str):
                return [*self._broken(running.tenant, self._files)]
            try:
                return [*self._check(self._files, running, limits)]
            except OSError as error:
                return [*self._broken(running.tenant, error.strerror or str(error))]

    def _check(self, files: PageFiles, running: RunningContainer, limits: Sequence[PageLimits]) -> Iterator[Finding]:
        changed = [*files.mend(), *self._spoiled_turns()]
        if self._written is not None:
            changed += [f"the limit {name!r} was changed" for name in files.put_limits(self._written)]
        if changed:
            yield _tampered(running.tenant, changed)
        slots = files.slots()
        wanted = [
            replace(limit, uncounted_bytes=self._uncounted(page, count, running.memory_bytes.get(name)))
            for page, (limit, count, name) in enumerate(zip(limits, files.counts(), self._names, strict=True))
        ]
        files.put_limits(wanted)
        self._written = wanted
        self._pids.forget_all_but({*running.pids, *running.gpu_pids})
        yield from self._unregistered(running, slots)
        yield from self._disabled(running.tenant, slots)
        self._free_ended(files, running, slots)
        self._uses = {name: self._use(page, slots) for page, name in enumerate(self._names)}
        yield from self._overrunning(running.tenant)

    def _spoiled_turns(self) -> Iterator[str]:
        for page, name in enumerate(self._names):
            spoiled = self._arbiter.turns(self._numbers[page]).spoiled
            if spoiled > self._spoiled.get(page, 0):
                yield f"the page 'turn' was damaged (GPU {name})"
            self._spoiled[page] = spoiled

    def _uncounted(self, page: int, count: CountedOnGpu, driver_bytes: int | None) -> int:
        """What the driver uses for the container beyond its count. The driver's figure is older than the count: after a change of the
        count, the smaller difference of this check and the last one is taken, or freed memory would count as used."""
        before, last = self._counted.get(page, (None, 0))
        if driver_bytes is None:
            return self._written[page].uncounted_bytes if self._written else 0
        difference = max(0, driver_bytes - count.reserved_bytes)
        self._counted[page] = count, difference
        return difference if before is not None and count.changes == before.changes else min(difference, last)

    def _unregistered(self, running: RunningContainer, slots: Sequence[Slot]) -> Iterator[Finding]:
        """Processes that use the GPU and have no slot."""
        inside = {slot.pid for slot in slots}
        outside = [pid for pid in running.gpu_pids if self._pids.inside(pid) not in inside]
        self._unseen = {pid: self._unseen.get(pid, 0) + 1 for pid in outside}
        if late := [f"process {pid}" for pid, checks in self._unseen.items() if checks == CHECKS_UNREGISTERED]:
            yield _finding(
                running.tenant,
                "unregistered",
                f"{running.tenant.describe()} uses the GPU without gpumgr's library and its limits in {_listed(late)}: a program that is "
                "linked statically or to musl, runs setuid, or loads the driver by itself; use a dynamically linked glibc image, or "
                "another backend",
            )

    def _disabled(self, tenant: GpuShare, slots: Sequence[Slot]) -> Iterator[Finding]:
        """Processes in which the library does not work."""
        for slot in slots:
            if slot.fault is not None and self._first(("fault", slot.pid, slot.fault)):
                message = (
                    f"gpumgr's library does not limit process {slot.pid} (its pid in the container) of {tenant.describe()}: "
                    f"{slot.fault}; restart the container, or use another backend if this repeats"
                )
                yield _finding(tenant, "broken", message)

    def _broken(self, tenant: GpuShare, reason: str) -> Iterator[Finding]:
        if self._first(("broken", reason)):
            message = (
                f"the limits of {tenant.describe()} can't be monitored: its pages can't be used ({reason}); "
                "restart the container, which gets new pages at every start"
            )
            yield _finding(tenant, "broken", message)

    def _overrunning(self, tenant: GpuShare) -> Iterator[Finding]:
        """Work that does not end: turns are passed on without its end."""
        for page, name in enumerate(self._names):
            overruns = self._uses[name].overruns
            before, checks = self._overruns.get(page, (overruns, 0))
            self._overruns[page] = overruns, checks + 1 if overruns > before else 0
            if self._overruns[page][1] == _CHECKS_OVERRUN and self._first(("overrun", page)):
                message = (
                    f"{tenant.describe()} keeps GPU {name} beyond its turns: its kernels run for longer than two turns, or it claims work "
                    "that does not end; it is charged for that time, and the driver shares the GPU between it and the others meanwhile"
                )
                yield _finding(tenant, "broken", message)

    def _free_ended(self, files: PageFiles, running: RunningContainer, slots: Sequence[Slot]) -> None:
        """Frees the slots of processes that have ended; none while it is not known which processes run."""
        hosts_of = self._pids.hosts_of(running.pids)
        ended = [slot for slot in slots if running.pids and not hosts_of(slot.pid)]
        self._missing = {key: self._missing.get(key, 0) + 1 for slot in ended if (key := (slot.index, slot.pid))}
        for slot in ended:
            if self._missing[slot.index, slot.pid] >= _CHECKS_ENDED:
                files.free(slot)

    def _use(self, page: int, slots: Sequence[Slot]) -> TurnUse:
        kinds = [0] * len(pages.KINDS)
        for slot in slots:
            on_gpu = slot.gpus[page]
            key = slot.index, slot.pid, page
            launches, waited_ns = self._seen.get(key, (0, 0))
            self._launches[page] += max(0, on_gpu.launches - launches)
            self._waited_ns[page] += max(0, on_gpu.waited_ns - waited_ns)
            self._seen[key] = on_gpu.launches, on_gpu.waited_ns
            kinds = [sum(pair) for pair in zip(kinds, on_gpu.bytes_by_kind, strict=True)]
        there = {(slot.index, slot.pid) for slot in slots}
        self._seen = {key: value for key, value in self._seen.items() if key[:2] in there}
        turns = self._arbiter.turns(self._numbers[page])
        now, held, waited = self._clock(), turns.held_ns / _NANOSECONDS, self._waited_ns[page] / _NANOSECONDS
        self._recent[page].append((now, held, waited))
        since, held_then, waited_then = self._recent[page][0]
        passed = now - since
        return TurnUse(
            held_seconds=held,
            waited_seconds=waited,
            held_ratio=min(1.0, (held - held_then) / passed) if passed > 0 else None,
            waited_ratio=min(1.0, (waited - waited_then) / passed) if passed > 0 else None,
            launches=self._launches[page],
            overruns=turns.overruns,
            memory_bytes_by_kind={kind: size for kind, size in zip(pages.KINDS, kinds, strict=True) if size},
        )

    def _first(self, what: object) -> bool:
        new = what not in self._reported
        self._reported.add(what)
        return new


def _tampered(tenant: GpuShare, found: Sequence[str]) -> Finding:
    message = f"{tenant.describe()} changed the pages that limit it: {_listed(found)}; restored. Check what runs in it"
    return _finding(tenant, "tampered", message)


def _finding(tenant: GpuShare, code: FindingCode, message: str) -> Finding:
    return Finding(allocation=tenant.allocation, code=code, message=message)


def _listed(found: Sequence[str]) -> str:
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
