"""Monitors the pages of one start of a container (files that it shares with the agent). Blocks.

The monitor restores what the container changed, frees the slots (records) of ended processes, and writes for the library how many bytes the
driver uses beyond the library's count.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.units import GpuName
from gpumgr.enforcement.backend import finding, listed
from gpumgr.enforcement.container_processes import Identities, Identity
from gpumgr.enforcement.limiter import pages
from gpumgr.enforcement.limiter.arbiter import Arbiter, ArbiterError
from gpumgr.enforcement.limiter.page_files import CountedOnGpu, PageFiles
from gpumgr.enforcement.limiter.pages import PageLimits, Slot
from gpumgr.enforcement.preloaded import Monitor
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.node_use import TurnUse

#: A process without a slot may have ended after the driver listed it, so it is reported after this many checks in a row.
_CHECKS_UNREGISTERED: Final = 2
#: A process that is missing in this many checks in a row has ended.
_CHECKS_ENDED: Final = 2
#: If a container overruns its turns in this many checks in a row, its work is reported.
_CHECKS_OVERRUN: Final = 2
_NANOSECONDS: Final = 1_000_000_000
#: With the default sample period: ten seconds of checks, and the check before.
_RECENT_CHECKS: Final = 11
#: How many recent differences between the driver's figure and the library's count are compared while the count changes.
_DIFFERENCES: Final = 5
#: A container that was not checked for this long may have ended, so no ratios are reported for it.
_STALE_SECONDS: Final = 5.0
#: The most faults that are reported: a container can claim faults in any number of processes.
_MOST_FAULTS: Final = 8
#: Monotonic, in seconds.
Clock = Callable[[], float]


class PageMonitor(Monitor):
    """`files`: the pages, or why they can't be used.

    The pages keep the order that the GPUs had when the container started, so GPUs are found by their UUID.
    """

    def __init__(self, files: PageFiles | str, arbiter: Arbiter, identities: Identities, clock: Clock) -> None:
        """Takes over the files, and adds the container to the arbiter. Raises ArbiterError."""
        super().__init__("gpumgr's pages", "new pages")
        self._files, self._arbiter, self._identities, self._clock = files, arbiter, identities, clock
        #: Held while the files are closed, or used on the event loop, which can't wait for `_lock`: `check` holds `_lock` for milliseconds.
        self._files_lock = threading.Lock()
        self.obstacle = files if isinstance(files, str) else None
        self._numbers: list[int] = []
        self._faults = 0
        self._missing: dict[tuple[int, int], int] = {}
        #: Host pid -> the process; None: it is gone or hidden.
        self._known: Mapping[int, Identity | None] = {}
        count = len(files.written) if isinstance(files, PageFiles) else 0
        #: For each GPU the count at the last check, and recent differences between the driver's figure and counts.
        self._counted: list[CountedOnGpu | None] = [None] * count
        self._differences = [deque[int](maxlen=_DIFFERENCES) for _ in range(count)]
        self._overruns: dict[int, tuple[int, int]] = {}
        self._spoiled: dict[int, int] = {}
        #: (slot, pid, GPU) -> the launches at the last check; for each GPU their sum, with those of ended processes.
        self._seen: dict[tuple[int, int, int], int] = {}
        self._launches = [0] * count
        self._uses: dict[GpuName, TurnUse] = {}
        self._checked_at = 0.0
        #: For each GPU (time of a recent check, seconds held until then, seconds waited).
        self._recent = [deque[tuple[float, float, float]](maxlen=_RECENT_CHECKS) for _ in range(count)]
        if isinstance(files, PageFiles):
            try:
                for page, limit in enumerate(files.written):
                    self._numbers.append(arbiter.add(limit.uuid, page, files.limits.descriptor, files.turn.descriptor))
            except ArbiterError:
                self.close()
                raise

    def close(self) -> None:
        with self._lock, self._files_lock:
            if not self._closed and isinstance(self._files, PageFiles):
                for number in self._numbers:
                    self._arbiter.remove(number)
                self._files.close()
            self._closed = True

    @property
    def usable(self) -> bool:
        return isinstance(self._files, PageFiles)

    def uses(self) -> Mapping[GpuName, TurnUse]:
        """The use at the last check; without ratios if that check is so old that the container may have ended."""
        if self._clock() - self._checked_at < _STALE_SECONDS:
            return self._uses
        return {gpu: replace(use, held_ratio=None, waited_ratio=None) for gpu, use in self._uses.items()}

    def on_pages(self, work: Callable[[PageFiles], bool]) -> bool:
        """Any thread may call it, also the event loop's. False: the pages can't be used."""
        with self._files_lock, suppress(OSError):  # a damaged page is reported by `check`
            return not self._closed and isinstance(self._files, PageFiles) and work(self._files)
        return False

    def check(self, running: RunningContainer, limits: Sequence[PageLimits]) -> Sequence[Finding]:
        """Restores what the container changed; returns new findings. `limits`: as granted, without `uncounted_bytes`."""
        with self._lock:
            if self._closed:
                return ()
            if isinstance(self._files, str):
                return [*self._broken(running.tenant, self._files)]
            self.obstacle = None
            try:
                return [*self._check(self._files, running, limits)]
            except (OSError, ValueError) as error:
                self.obstacle = str(error)
                return [*self._broken(running.tenant, self.obstacle)]

    def _check(self, files: PageFiles, running: RunningContainer, limits: Sequence[PageLimits]) -> Iterator[Finding]:
        changed = [*files.mend(), *self._spoiled_turns(files)]
        if names := files.put_limits(files.written):
            changed += [f"the limit {name!r} was changed" for name in names]
        if changed:
            yield self._tampered(running.tenant, changed)
        slots = files.slots()
        files.put_limits([*self._wanted(files, running, limits)])
        self._known = {pid: self._known.get(pid) or self._identities.of(pid) for pid in {*running.pids, *running.gpu_pids}}
        yield from self._unregistered(running, slots)
        yield from self._disabled(running.tenant, slots)
        self._free_ended(files, running, slots)
        names_of = {pages.uuid_bytes(gpu.uuid): gpu.name for gpu in running.tenant.gpus}
        ordered = [names_of.get(pages.uuid_bytes(limit.uuid), limit.uuid) for limit in files.written]
        in_turns = files.in_turns()
        self._uses = {name: self._use(page, slots, new=files.new) for page, name in enumerate(ordered)}
        for name, counted in zip(ordered, in_turns, strict=True):
            if not counted:  # launches need no turn, so the arbiter measures no time
                self._uses[name] = replace(self._uses[name], held_ratio=None, waited_ratio=None)
        self._checked_at = self._clock()
        yield from self._overrunning(running.tenant)

    def _wanted(self, files: PageFiles, running: RunningContainer, limits: Sequence[PageLimits]) -> Iterator[PageLimits]:
        """The limits to write, in the pages' order. A GPU that is not granted, or a context's size that is not known, keeps the former
        value."""
        granted = {pages.uuid_bytes(limit.uuid): limit for limit in limits}
        # The count of a suspended container includes the memory that it gets back at its resume, unlike the driver's figure.
        gpus = () if files.suspended else running.tenant.gpus
        used = {pages.uuid_bytes(gpu.uuid): running.memory_bytes.get(gpu.name) for gpu in gpus}
        for page, (before, count) in enumerate(zip(files.written, files.counts(), strict=True)):
            key = pages.uuid_bytes(before.uuid)
            yield replace(
                granted.get(key, before),
                uuid=before.uuid,
                context_bytes=granted.get(key, before).context_bytes or before.context_bytes,
                uncounted_bytes=self._uncounted(page, count, used.get(key), before.uncounted_bytes),
            )

    def _spoiled_turns(self, files: PageFiles) -> Iterator[str]:
        for page, limit in enumerate(files.written):
            spoiled = self._arbiter.turns(self._numbers[page]).spoiled
            if spoiled > self._spoiled.get(page, 0):
                yield f"the page 'turn' was damaged ({limit.uuid})"
            self._spoiled[page] = spoiled

    def _uncounted(self, page: int, count: CountedOnGpu, driver_bytes: int | None, former_bytes: int) -> int:
        """The bytes that the driver uses for the container beyond the library's count.

        The driver's figure was taken between the last count and this one, so the differences to both counts are computed. The result falls
        at once to the larger difference. It rises only to the minimum of the recent smaller differences, since freed memory must not count
        as used.
        """
        before, self._counted[page] = self._counted[page], count
        if driver_bytes is None or before is None:
            return former_bytes
        differences = self._differences[page]
        if before.changes == count.changes:
            differences.clear()
        least, most = sorted(max(0, driver_bytes - each.reserved_bytes) for each in (before, count))
        differences.append(least)
        return max(min(former_bytes, most), min(differences))

    def _unregistered(self, running: RunningContainer, slots: Sequence[Slot]) -> Iterator[Finding]:
        hosts = {self._known[pid]: pid for pid in running.gpu_pids}
        outside = running.gpu_pids - {_host_pid(slot, hosts) for slot in slots}
        yield from self._outside(running.tenant, outside, _CHECKS_UNREGISTERED, "gpumgr's library")

    def _disabled(self, tenant: GpuShare, slots: Sequence[Slot]) -> Iterator[Finding]:
        faulty = [slot for slot in slots if slot.fault is not None]
        fresh = [slot for slot in faulty if self._is_first(f"fault of {slot.pid}")] if self._faults < _MOST_FAULTS else []
        if fresh:
            self._faults += len(fresh)
            found = [f"process {slot.pid} ({slot.fault})" for slot in fresh]
            message = (
                f"gpumgr's library does not limit {listed(found)} of {tenant.describe()}, by pids in the container; "
                "restart the container, or use another backend if this repeats"
            )
            yield finding(tenant, "broken", message)
        if len(slots) == pages.SLOTS and self._is_first("slots"):
            message = (
                f"{tenant.describe()} has more processes that use CUDA than gpumgr's library counts ({pages.SLOTS}): further ones get no "
                "memory and share one turn; end processes"
            )
            yield finding(tenant, "broken", message)
        if any(slot.gpus and slot.gpus[0].unknown for slot in slots) and self._is_first("unknown"):
            message = (
                f"{tenant.describe()} uses newer versions of CUDA functions than gpumgr's library knows, which it does not limit; "
                "update gpumgr, or use another backend"
            )
            yield finding(tenant, "broken", message)

    def _overrunning(self, tenant: GpuShare) -> Iterator[Finding]:
        """Reports work that does not end before the arbiter gives the turn to another container."""
        for page, (name, use) in enumerate(self._uses.items()):
            before, checks = self._overruns.get(page, (use.overruns, 0))
            more = use.overruns > before or self._arbiter.still_runs_past_its_turn(self._numbers[page])
            self._overruns[page] = use.overruns, checks + 1 if more else 0
            if self._overruns[page][1] == _CHECKS_OVERRUN and self._is_first(f"overrun {page}"):
                message = (
                    f"{tenant.describe()} keeps GPU {name} beyond its turns: its kernels run for longer than two turns, or it claims work "
                    "that does not end; it is charged for that time, in which the driver shares the GPU between it and other containers"
                )
                yield finding(tenant, "broken", message)

    def _free_ended(self, files: PageFiles, running: RunningContainer, slots: Sequence[Slot]) -> None:
        hosts = {self._known[pid]: pid for pid in running.pids}
        if None in hosts:  # a process has just ended, or is hidden from the agent
            return
        pids = {slot.index: _host_pid(slot, hosts) for slot in slots}
        # An exec ends the contexts of its process.
        executed = {slot.index for slot in slots if self._identities.executed(pids[slot.index], slot.stack)}
        away = [slot for slot in slots if pids[slot.index] is None or slot.index in executed]
        self._missing = {(slot.index, slot.pid): self._missing.get((slot.index, slot.pid), 0) + 1 for slot in away}
        ended = [slot for slot in away if self._missing[slot.index, slot.pid] >= _CHECKS_ENDED]
        if not ended:
            return
        anywhere = [*self._identities.all()]  # a claim may have another container, which is not listed yet
        for slot in ended:
            if slot.index in executed or not any(_is_of(slot, found) for found in anywhere):
                files.free(slot)

    def _use(self, page: int, slots: Sequence[Slot], *, new: bool) -> TurnUse:
        kinds = [0] * len(pages.KINDS)
        for slot in slots:
            on_gpu = slot.gpus[page]
            key = slot.index, slot.pid, page
            # An earlier agent has counted the launches before this agent's first check.
            launches = self._seen.get(key, 0 if new or self._recent[page] else on_gpu.launches)
            self._launches[page] += max(0, on_gpu.launches - launches)
            self._seen[key] = on_gpu.launches
            kinds = [sum(pair) for pair in zip(kinds, on_gpu.bytes_by_kind, strict=True)]
        there = {(slot.index, slot.pid) for slot in slots}
        self._seen = {key: value for key, value in self._seen.items() if key[:2] in there}
        turns = self._arbiter.turns(self._numbers[page])
        now, held, waited = self._clock(), turns.held_ns / _NANOSECONDS, turns.waited_ns / _NANOSECONDS
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


def _host_pid(slot: Slot, hosts: Mapping[Identity | None, int]) -> int | None:
    if slot.namespace:
        return hosts.get(Identity(slot.namespace, slot.pid))
    return next((pid for found, pid in hosts.items() if _is_of(slot, found)), None)


def _is_of(slot: Slot, found: Identity | None) -> bool:
    return found is not None and slot.pid == found.pid and slot.namespace in (0, found.namespace)
