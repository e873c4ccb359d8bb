"""Monitors the region of one container (the file that HAMi-core's library shares with the agent): reports findings and repairs limits.
Blocks.

The region only shows which processes run under the library; its limits are never trusted.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import structlog

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.enforcement.backend import finding, listed
from gpumgr.enforcement.container_processes import HostsOf, PidInContainerOf
from gpumgr.enforcement.hami_core import layout, repairs
from gpumgr.enforcement.hami_core.region import RegionFile, RegionLimits, RegionView, limits
from gpumgr.enforcement.hami_core.repairs import Repair
from gpumgr.enforcement.preloaded import Monitor
from gpumgr.ledger.gpu_share import GpuShare

#: The library takes a slot (a record in the region) shortly after a process's first context appears, so a process without a slot is
#: reported after this many checks in a row.
CHECKS_UNREGISTERED: Final = 3
#: The library looks up the host pid of each process once, one process at a time, each for up to a second. A host pid that is wrong at this
#: many checks was written by the process, which counts as tampering.
CHECKS_WRONG_HOST: Final = 120
_RELEASED: Final = (
    "a process of {} was killed while HAMi-core started in it, so the container's other processes waited in cuInit; gpumgr has ended "
    "the wait: if this repeats, find out what ends the processes"
)

log = structlog.get_logger(__name__)


class RegionMonitor(Monitor):
    """`region`: the file, or why it can't be used. `written`: its limits; None: an earlier process of the agent wrote them, so the first
    repair reports no difference."""

    def __init__(
        self,
        region: RegionFile | str,
        written: RegionLimits | None,
        *,
        pid_in_container_of: PidInContainerOf,
        clock: Callable[[], float],
    ) -> None:
        super().__init__("HAMi-core's region", "a new region")
        self._region, self._clock = region, clock
        self._pid_in_container_of = pid_in_container_of
        #: Host pid -> pid in the container; None: the process is gone.
        self._inside: Mapping[int, int | None] = {}
        #: The limits after the last repair.
        self._written = written
        self._pending: list[Finding] = []
        #: Host pid -> at how many checks the region had another host pid for the process.
        self._wrong_hosts: Counter[int] = Counter()
        self._stuck_since: dict[tuple[int, int], float] = {}
        #: While the semaphore `postinit` is held: its waiters and the slots, and since when they have not changed. None while it is free.
        self._held: tuple[object, ...] | None = None
        self._held_since = 0.0

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if isinstance(self._region, RegionFile):
                with suppress(OSError):
                    if self._region.read().recent_kernel < 0:  # launches wait, and no agent would release them
                        self._write_recent_kernel(self._region, 0)
                self._region.close()

    def set_recent_kernel(self, word: int) -> None:
        """Launches wait while the word is below 0."""
        with self._lock:
            if not self._closed and isinstance(self._region, RegionFile):
                self._write_recent_kernel(self._region, word)

    def _write_recent_kernel(self, region: RegionFile, word: int) -> None:
        with suppress(OSError):  # `check` reports it
            region.write(layout.RECENT_KERNEL, struct.pack("<i", word))

    def check(self, running: RunningContainer) -> Sequence[Finding]:
        """Returns new findings: a lasting problem once, a changed limit each time that `repair` restored it."""
        with self._lock:
            if self._closed:
                return ()
            try:
                _, seen = self._read(running)
            except OSError as error:
                new = [*self._broken(running.tenant, error.strerror or str(error))]
            else:
                new = [*self._damaged(running.tenant, seen), *self._unregistered(running, seen)]
            pending, self._pending = self._pending, []
            return (*pending, *new)

    def repair(self, running: RunningContainer) -> int | None:
        """Restores the granted limits, and writes what the library can't repair itself. Returns the word `recent_kernel`, which delays
        launches while it is below 0; None: the region can't be used."""
        with self._lock:
            if self._closed:
                return None
            self.obstacle = None
            try:
                region, seen = self._read(running)
                self._report_changed(running.tenant, seen)
                due = [*self._differing(running.tenant, seen), *self._processes(running, seen)]
                for each in due:
                    region.write(each.offset, each.data)
            except OSError as error:  # `check` reports it
                self.obstacle = error.strerror or str(error)
                return None
            if any(each.code == "postinit" for each in due):
                region.wake(layout.SEM_POSTINIT)
                self._pending.append(finding(running.tenant, "broken", _RELEASED.format(running.tenant.describe())))
            if due:
                log.debug("region_repaired", allocation=running.tenant.allocation, found=listed([each.message for each in due]))
            return seen.recent_kernel

    def _read(self, running: RunningContainer) -> tuple[RegionFile, RegionView]:
        """Cuts off what was appended, and reads the region. Raises OSError."""
        if isinstance(self._region, str):
            raise OSError(self._region)
        if more := self._region.cut():
            self._pending.append(self._tampered(running.tenant, [f"the file was {more} bytes longer"]))
        pids = {*running.pids, *running.gpu_pids}
        self._inside = {pid: self._inside.get(pid) or self._pid_in_container_of(pid) for pid in pids}
        return self._region, self._region.read()

    def _report_changed(self, tenant: GpuShare, seen: RegionView) -> None:
        drift = repairs.drifted(seen, self._written) if self._written is not None else ()
        if changed := [each.message for each in drift if each.code in repairs.TAMPERING]:
            self._pending.append(self._tampered(tenant, changed))

    def _differing(self, tenant: GpuShare, seen: RegionView) -> list[Repair]:
        """The repairs of all differences from the granted limits. If the granted limits can't be determined, nothing is repaired."""
        try:
            self._written = limits(tenant.gpus)
        except ValueError as error:
            self.obstacle = str(error)
            return []
        return list(repairs.drifted(seen, self._written))

    def _damaged(self, tenant: GpuShare, seen: RegionView) -> Iterable[Finding]:
        if seen.problem is not None and self._is_first("damaged"):
            message = (
                f"{tenant.describe()} damaged HAMi-core's region ({seen.problem}); its limits still apply, "
                "but its own processes may fail: restart the container"
            )
            yield finding(tenant, "tampered", message)

    def _unregistered(self, running: RunningContainer, seen: RegionView) -> Iterable[Finding]:
        hosts = {slot.hostpid for slot in seen.slots if slot.live}
        inside = {slot.pid for slot in seen.slots if slot.live}
        outside = [pid for pid in running.gpu_pids if pid not in hosts and self._inside[pid] not in inside]
        yield from self._outside(running.tenant, outside, CHECKS_UNREGISTERED, "HAMi-core")

    def _processes(self, running: RunningContainer, seen: RegionView) -> Iterable[Repair]:
        """Repairs that depend on the running processes; none while the processes are unknown."""
        if not running.pids:
            return
        hosts_of = self._hosts_of(running.pids)
        now = self._clock()
        abandoned = {(slot.index, slot.seqlock): slot for slot in repairs.abandoned(seen, hosts_of)}
        self._stuck_since = {key: self._stuck_since.get(key, now) for key in abandoned}
        yield from self._host_repairs(running, repairs.wrong_hosts(seen, hosts_of))
        for key, slot in abandoned.items():
            if now - self._stuck_since[key] > repairs.STUCK_SECONDS:
                yield repairs.unstuck(slot)
        held = (seen.postinit_waiters, *((slot.pid, slot.hostpid) for slot in seen.slots)) if seen.postinit == 0 else None
        if held != self._held:
            self._held, self._held_since = held, now
        limit = repairs.HELD_AT_MOST_SECONDS if repairs.holder_may_run(seen, hosts_of) else repairs.HELD_SECONDS
        if held is not None and now - self._held_since > limit:
            self._held = None
            yield repairs.released()

    def _hosts_of(self, pids: Iterable[int]) -> HostsOf:
        table: dict[int | None, list[int]] = {}
        for pid in pids:
            table.setdefault(self._inside[pid], []).append(pid)
        return lambda number: table.get(number, ())

    def _host_repairs(self, running: RunningContainer, found: Iterable[tuple[int, bool, Repair]]) -> Iterable[Repair]:
        """Repairs of host pids. A slot that must be left alone for now (see `wrong_hosts`) is repaired after CHECKS_WRONG_HOST checks."""
        self._wrong_hosts = Counter({pid: self._wrong_hosts[pid] for pid in running.pids if pid in self._wrong_hosts})
        for host, later, repair in found:
            self._wrong_hosts[host] += 1
            if (late := self._wrong_hosts[host] >= CHECKS_WRONG_HOST) and self._is_first("host"):
                self._pending.append(self._tampered(running.tenant, [f"{repair.message} at {CHECKS_WRONG_HOST} checks"]))
            if late or not later:
                yield repair
