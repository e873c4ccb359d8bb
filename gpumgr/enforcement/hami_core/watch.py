"""The agent's eye on one container's region: what it tells of it, and what it sets right. Blocks: made for a thread.

What the agent granted is the truth. The region is asked which processes run under the library, and is never believed about limits.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import structlog

from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import Finding, FindingCode, Running
from gpumgr.enforcement.hami_core import repairs, seed, view
from gpumgr.enforcement.hami_core.region import RegionFile, Unreadable
from gpumgr.enforcement.hami_core.repairs import Repair
from gpumgr.enforcement.hami_core.view import RegionView

#: The library takes its slot a moment after a process's first context appears; so many looks in a row are no moment.
PASSES_UNREGISTERED: Final = 3
#: A container can spoil many words; a sentence names so many.
_NAMED: Final = 3

log = structlog.get_logger(__name__)
#: Number of a process of the host in its innermost pid namespace (the last column of NSpid in /proc/PID/status); None: it is gone.
NspidOf = Callable[[int], int | None]


class Watch:
    """One start of one container. Calls from several threads wait for one another; `close` ends it and may be called again."""

    def __init__(self, region: RegionFile | Unreadable, *, nspid_of: NspidOf, clock: Callable[[], float]) -> None:
        self._region, self._clock = region, clock
        self._numbers = _Numbers(nspid_of)
        self._lock = threading.Lock()
        self._closed = self._told_broken = False
        self._told_problems: frozenset[view.ProblemCode] = frozenset()
        self._told_drift: frozenset[tuple[str, int]] = frozenset()
        self._untold: list[Finding] = []
        self._unseen: dict[int, int] = {}
        self._stuck_since: dict[tuple[int, int | None], float] = {}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if isinstance(self._region, RegionFile):
                self._region.close()

    def read(self) -> RegionView | Unreadable:
        """The region as it is now."""
        with self._lock:
            return self._read()

    def look(self, running: Running) -> Sequence[Finding]:
        """What is to be told; each thing once, a repaired one each time. Changes nothing in the region."""
        with self._lock:
            if self._closed:
                return ()
            untold, self._untold = self._untold, []
            seen = self._read()
            if isinstance(seen, Unreadable):
                return (*untold, *self._broken(running.tenant, seen))
            return (
                *untold,
                *self._drift(running.tenant, seen),
                *self._problems(running.tenant, seen),
                *self._strangers(running, seen),
            )

    def mend(self, running: Running) -> None:
        """Brings the region back to what was granted, and helps the library with what it can't know or can't repair itself."""
        with self._lock:
            if self._closed or not isinstance(self._region, RegionFile):
                return
            seen = self._read()
            if isinstance(seen, Unreadable):
                return
            due = [*_drifted(running.tenant, seen), *self._processes(running, seen)]
            if not due or not self._region.write(repair.write for repair in due):
                return
            fresh = [each for each in due if each.code in repairs.TAMPERING and _key(each) not in self._told_drift]
            self._told_drift = frozenset()
            if fresh:
                self._untold.append(_tampered(running.tenant, [each.message for each in fresh]))
        log.debug("region_repaired", allocation=running.tenant.allocation, found=_listed([each.message for each in due]))

    def _read(self) -> RegionView | Unreadable:
        return self._region.read() if isinstance(self._region, RegionFile) else self._region

    def _broken(self, tenant: Tenant, why: Unreadable) -> Iterable[Finding]:
        if not self._told_broken:
            self._told_broken = True
            said = (
                f"HAMi-core's limits of {tenant.describe()} can't be watched: its region {why.reason}; "
                "restart the container: it gets a new region at every start"
            )
            yield _finding(tenant, "broken", said)

    def _drift(self, tenant: Tenant, seen: RegionView) -> Iterable[Finding]:
        drift = [each for each in _drifted(tenant, seen) if each.code in repairs.TAMPERING]
        self._told_drift = frozenset(map(_key, drift))
        if drift:
            yield _tampered(tenant, [each.message for each in drift])

    def _problems(self, tenant: Tenant, seen: RegionView) -> Iterable[Finding]:
        spoilt = [each for each in seen.problems if each.code in view.TAMPERING]
        fresh = [each.message for each in spoilt if each.code not in self._told_problems]
        self._told_problems = frozenset(each.code for each in spoilt)
        if fresh:
            said = (
                f"{tenant.describe()} spoilt HAMi-core's region ({_listed(fresh)}); its limits are still kept up, "
                "but its own processes may fail: restart the container"
            )
            yield _finding(tenant, "tampered", said)

    def _strangers(self, running: Running, seen: RegionView) -> Iterable[Finding]:
        """Processes that use the GPU and are not in the region."""
        hosts = {slot.hostpid for slot in seen.slots if slot.live}
        inside = {slot.pid for slot in seen.slots if slot.live}
        self._numbers.forget_all_but({*running.pids, *running.gpu_processes})
        strangers = [pid for pid in running.gpu_processes if pid not in hosts and self._numbers.inside(pid) not in inside]
        self._unseen = {pid: self._unseen.get(pid, 0) + 1 for pid in strangers}
        late = [f"process {pid}" for pid, passes in self._unseen.items() if passes == PASSES_UNREGISTERED]
        if late:
            said = (
                f"{running.tenant.describe()} uses the GPU past HAMi-core, without limits, in {_listed(late)}: a program that is linked "
                "statically or to musl, or loads the driver by itself; use a dynamically linked glibc image, or another backend"
            )
            yield _finding(running.tenant, "unregistered", said)

    def _processes(self, running: Running, seen: RegionView) -> Iterable[Repair]:
        """Repairs that need to know which processes run; none while that is unknown."""
        if not running.pids:
            return
        pids = frozenset(running.pids)
        self._numbers.forget_all_but({*pids, *running.gpu_processes})
        host_of = self._numbers.host_of(pids)
        now = self._clock()
        abandoned = {(slot.index, slot.seqlock): slot for slot in repairs.abandoned(seen, pids, host_of)}
        self._stuck_since = {key: self._stuck_since.get(key, now) for key in abandoned}
        yield from repairs.unknown_hosts(seen, pids, host_of)
        for key, slot in abandoned.items():
            if now - self._stuck_since[key] > repairs.STUCK_SECONDS:
                yield repairs.unstuck(seen, slot)


class _Numbers:
    """Processes' numbers in the container and on the host; asks the host once for each process, and only when needed."""

    def __init__(self, nspid_of: NspidOf) -> None:
        self._nspid_of = nspid_of
        self._inside: dict[int, int] = {}

    def forget_all_but(self, pids: Collection[int]) -> None:
        self._inside = {pid: number for pid, number in self._inside.items() if pid in pids}

    def inside(self, pid: int) -> int | None:
        """The process's number in its container; None if it is gone."""
        found = self._inside.get(pid)
        if found is None and (found := self._nspid_of(pid)) is not None:
            self._inside[pid] = found
        return found

    def host_of(self, pids: Collection[int]) -> Callable[[int], int | None]:
        """Finds the one of `pids` with a number in the container; None if none has it, or several have (namespaces in the container)."""
        table: dict[int, list[int]] = {}

        def find(number: int) -> int | None:
            if not table:
                for pid in pids:
                    inside = self.inside(pid)
                    if inside is not None:
                        table.setdefault(inside, []).append(pid)
            found = table.get(number, [])
            return found[0] if len(found) == 1 else None

        return find


def _drifted(tenant: Tenant, seen: RegionView) -> list[Repair]:
    """Nothing for a tenant whose share is not known in full: its limits must not become "unlimited"."""
    try:
        wanted = seed.limits(memory_bytes=tenant.memory_bytes, cores=tenant.cores)
    except ValueError:
        return []
    return list(repairs.drifted(seen, wanted))


def _key(repair: Repair) -> tuple[str, int]:
    return repair.code, repair.write.offset


def _tampered(tenant: Tenant, found: Sequence[str]) -> Finding:
    said = f"{tenant.describe()} changed its limits in HAMi-core's region: {_listed(found)}; set back. Look at what runs in it"
    return _finding(tenant, "tampered", said)


def _finding(tenant: Tenant, code: FindingCode, message: str) -> Finding:
    return Finding(allocation=tenant.allocation, code=code, message=message)


def _listed(found: Sequence[str]) -> str:
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
