"""Backend "nvml-memory": the driver's own limit on the GPU memory of a container's cgroup.

The NVIDIA driver (615 and newer) accounts all device memory to cgroups through the kernel's dmem controller: beyond the hard limit an
allocation fails with CUDA's out-of-memory error, whatever the container does, and cuMemGetInfo shows the limit as the total. Nothing
is put into the container. Cores are not limited, nor is managed memory while it lies in the host's (both are the driver's limits).

Only the hard limit is set. A soft one, a guarantee, would be added up through the ancestors, who give it back only when somebody sets
it to 0 before the cgroup goes; the runtime removes that in the instant in which a container ends. The guarantee is not missed: shares
add up to no more than the GPU has, and all who have one have a hard limit. A soft limit that is found is set to 0. The hard limit
vanishes with the cgroup.

The cgroup exists only once the container does, so the limit comes with the first look at the running container. Memory that it took
before stays its own: the kernel refuses, silently, a limit below what is in use, so what was set is read back. A container that the
runtime does not show never gets its limit: no container starts while the runtime can't be asked, and one that is not found is told.

Source: NVIDIA's MPS documentation r615, "Memory Partitioning"; kernel/cgroup/dmem.c.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import BackendName, Finding, Running
from gpumgr.enforcement.leftovers import mounted
from gpumgr.errors import NvmlError, Refusal
from gpumgr.topology.devices import MemoryLimit
from gpumgr.units import Kind

#: How often a limit that stands is read back: others may set it too, and a driver that was loaded anew has forgotten it.
_RECHECK_SECONDS: Final = 10.0
#: A started container is seen within a second or two; one that is not after so long is looked for.
_SEEN_WITHIN_SECONDS: Final = 30.0

log = structlog.get_logger(__name__)


class MemoryLimits(Protocol):
    """What the driver offers. All raise NvmlError; `cgroup` is the full path of the cgroup's folder."""

    async def memory_limits_supported(self) -> str | None:
        """Why the driver can limit no cgroup's memory, and what to do; None if it can."""
        ...

    async def set_memory_limit(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None: ...

    async def memory_limit(self, uuid: str, cgroup: str) -> MemoryLimit: ...


@dataclass(slots=True, kw_only=True)
class _Held:
    """The limit of one container. `obstacle`: in the driver's words, why it does not stand; `due`: when to look at it again."""

    allocation: AllocationId
    uuid: str
    cgroup: Path
    memory_bytes: int
    obstacle: str | None = None
    due: float = 0.0

    @property
    def wanted(self) -> MemoryLimit:
        return MemoryLimit(soft_bytes=0, hard_bytes=self.memory_bytes)


@dataclass(slots=True)
class _Unseen:
    """A start whose container was not seen yet. `due`: when to look whether it runs."""

    tenant: Tenant
    since: float
    due: float


class DriverMemory:
    """Implements Backend. `cgroup_root` is where cgroup v2 is mounted; `clock` counts seconds.

    `runtime_obstacle` says why the container runtime can't be asked for containers (None: it can). `in_use` tells which allocations
    have a process, by their mounts; it is called in a thread.
    """

    name: Final[BackendName] = "nvml-memory"
    limits: Final[frozenset[Kind]] = frozenset({"memory"})

    def __init__(
        self,
        driver: MemoryLimits,
        *,
        cgroup_root: Path = Path("/sys/fs/cgroup"),
        runtime_obstacle: Callable[[], str | None] = lambda: None,
        in_use: Callable[[Collection[str]], Collection[str]] = mounted,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver, self._cgroup_root, self._clock = driver, cgroup_root, clock
        self._runtime_obstacle, self._in_use = runtime_obstacle, in_use
        self._held: dict[str, _Held] = {}  # by container id
        self._seen: frozenset[str] = frozenset()  # containers at the last `adjust`, ...
        self._unplaced: frozenset[str] = frozenset()  # ... and those of them whose cgroup was not known
        self._unseen: dict[AllocationId, _Unseen] = {}

    async def unavailable(self) -> str | None:
        try:
            of_driver = await self._driver.memory_limits_supported()
        except NvmlError as error:
            of_driver = str(error)
        of_runtime = self._runtime_obstacle()
        if of_runtime is not None:
            of_runtime = f"the cgroups of containers can't be found: {of_runtime}"
        return "; ".join(obstacle for obstacle in (self._cgroup_obstacle(), of_driver, of_runtime) if obstacle) or None

    def _cgroup_obstacle(self) -> str | None:
        try:
            controllers = (self._cgroup_root / "cgroup.controllers").read_text(encoding="ascii").split()
        except OSError as error:
            return (
                f"cgroup v2 is not mounted at {self._cgroup_root} ({error.strerror}): boot the node with "
                "systemd.unified_cgroup_hierarchy=1, or set cri.cgroup_root"
            )
        if "dmem" not in controllers:
            return (
                f"the kernel offers no dmem controller in {self._cgroup_root}/cgroup.controllers: run Linux 6.14 or newer with "
                "CONFIG_CGROUP_DMEM, and without cgroup_disable=dmem"
            )
        return None

    def prepare(self, tenant: Tenant, kind: Kind) -> ContainerResponse:  # noqa: ARG002
        return ContainerResponse()

    async def start(self, tenant: Tenant) -> None:
        obstacle = await self.unavailable()
        if obstacle is not None:
            raise Refusal("internal", f"the GPU memory of {tenant.describe()} can't be limited any more: {obstacle}")
        self._expect(tenant)

    def _expect(self, tenant: Tenant) -> None:
        now = self._clock()
        self._unseen[tenant.allocation] = _Unseen(tenant, since=now, due=now + _SEEN_WITHIN_SECONDS)

    async def vacate(self, uuids: Collection[str]) -> None:
        pass

    async def observe(self, running: Sequence[Running]) -> Sequence[Finding]:
        found = [(each.tenant, _retried(why)) for each in running if (why := self._obstacle(each)) is not None]
        found += [(tenant, _NOT_SEEN) for tenant in await self._overdue({each.tenant.allocation for each in running})]
        return [Finding(allocation=tenant.allocation, code="broken", message=_broken(tenant, why)) for tenant, why in found]

    async def _overdue(self, here: Collection[AllocationId]) -> list[Tenant]:
        """Those that run and were never seen, each once. One that does not run may have ended, or be slow: it is looked for again
        when as much time has passed once more."""
        now = self._clock()
        due = [name for name, unseen in self._unseen.items() if now >= unseen.due and name not in here]
        if not due:
            return []
        try:
            alive = await asyncio.to_thread(self._in_use, due)
        except OSError:  # who can't be looked at is taken for running
            alive = due
        late = [self._unseen.pop(name).tenant for name in due if name in alive and name in self._unseen]
        for unseen in (self._unseen[name] for name in due if name in self._unseen):
            unseen.due = now + (now - unseen.since)
        return late

    def _obstacle(self, each: Running) -> str | None:
        if each.container.cgroup is None:
            return "its cgroup is not known" if each.container.id in self._unplaced else None
        held = self._held.get(each.container.id)
        return None if held is None else held.obstacle

    async def adjust(self, running: Sequence[Running]) -> None:
        present = frozenset(each.container.id for each in running)
        for gone in [container for container in self._held if container not in present]:
            del self._held[gone]
        for each in running:
            if each.container.id not in self._seen:
                self._unseen.pop(each.tenant.allocation, None)
        self._seen = present
        self._unplaced = frozenset(each.container.id for each in running if each.container.cgroup is None)
        for each in running:
            if each.container.cgroup is not None and each.tenant.memory_bytes:
                await self._keep(each.tenant, each.container.id, each.container.cgroup)

    async def _keep(self, tenant: Tenant, container: str, cgroup: str) -> None:
        held = self._held.get(container)
        if held is None:
            held = self._held[container] = _Held(
                allocation=tenant.allocation,
                uuid=tenant.uuid,
                cgroup=self._cgroup_root / cgroup.lstrip("/"),
                memory_bytes=tenant.memory_bytes,
            )
        if self._clock() < held.due:
            return
        try:
            held.obstacle = await self._bring(held)
        except NvmlError as error:
            held.obstacle = str(error)
        if held.obstacle is None:
            held.due = self._clock() + _RECHECK_SECONDS

    async def _bring(self, held: _Held) -> str | None:
        """Has the limit stand; None, or why it does not. One that stands already (of an earlier life, too) is left alone."""
        cgroup, wanted = str(held.cgroup), held.wanted
        before = await self._driver.memory_limit(held.uuid, cgroup)
        if before == wanted:
            return None
        await self._driver.set_memory_limit(held.uuid, cgroup, wanted.soft_bytes, wanted.hard_bytes)
        found = await self._driver.memory_limit(held.uuid, cgroup)
        if found != wanted:
            return f"the driver took it and has {_words(found)}; more than that may be in use already"
        log.info(
            "memory_limited",
            allocation=held.allocation,
            gpu=held.uuid,
            cgroup=cgroup,
            bytes=held.memory_bytes,
            before=_words(before),
        )
        return None

    def remains(self) -> Collection[AllocationId]:
        return {*tuple(self._unseen), *(held.allocation for held in tuple(self._held.values()))}

    async def cleanup(self, allocation: AllocationId) -> None:
        self._unseen.pop(allocation, None)
        self._held = {container: held for container, held in self._held.items() if held.allocation != allocation}

    async def recover(self, tenants: Sequence[Tenant]) -> None:
        """Limits live in the kernel, under cgroups that are known once their containers are: the first `adjust` reads them back."""
        for tenant in tenants:
            self._expect(tenant)

    def own_pids(self) -> Collection[int]:
        return ()

    async def close(self) -> None:
        """Limits go on without us."""


#: Why, and what to do.
_NOT_SEEN: Final = (
    f"it runs, but the container runtime did not tell within {_SEEN_WITHIN_SECONDS:g} s which of its containers it is; until it does "
    "the container may use what the GPU has: see to cri.socket, and delete the pod if this stays"
)


def _retried(why: str) -> str:
    return (
        f"{why}; it is tried again every second, and until then it may use what the GPU has: restart the container if this stays"
    )


def _broken(tenant: Tenant, why: str) -> str:
    return f"the GPU memory of {tenant.describe()} can't be limited to {tenant.memory_bytes >> 20} MiB: {why}"


def _words(limit: MemoryLimit) -> str:
    return "no limit" if limit.hard_bytes is None else f"{limit.soft_bytes >> 20}/{limit.hard_bytes >> 20} MiB (soft/hard)"
