"""All mechanisms of the node as one: implements the agent's port, and what the app calls around it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from gpumgr.allocator.answer import ALLOCATION_PATH, ENFORCEMENT_ANNOTATION
from gpumgr.allocator.ledger import Allocation, AllocationId
from gpumgr.allocator.pods import PodView
from gpumgr.allocator.response import ContainerResponse, merged
from gpumgr.allocator.tenant import Tenant, Terms
from gpumgr.enforcement import cdi
from gpumgr.enforcement.backend import Backend, Finding, Running
from gpumgr.enforcement.choice import NOTHING, Choice, Mechanisms, choose, excepted, exception_for
from gpumgr.enforcement.leftovers import mounted
from gpumgr.errors import GpumgrError, Refusal
from gpumgr.units import KINDS, Kind

log = structlog.get_logger(__name__)

#: Where the mounts of containers can't be read.
_LET_IT_LOOK: Final = (
    "files of containers that are gone stay until the agent may look at all processes: give it CAP_SYS_PTRACE, and the host's process "
    "ids where it is a pod"
)
#: Others on a tenant's GPU: how people call them, and their mechanisms.
Neighbours = Callable[[Tenant], Iterable[tuple[str, Mechanisms]]]


class Limits:
    """`cdi_dir`: where CDI specs are; written for those who are answered so, which new containers are if `inject_by_cdi`.

    `setting` and `overrides` are the operator's words (settings, section enforcement). `on_start` hears that a container is about to
    start. `neighbours` tells who else shares a tenant's GPU: names for people, with their mechanisms.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        setting: str,
        overrides: Sequence[str],
        cdi_dir: Path,
        inject_by_cdi: bool,
        orphan_grace_seconds: float,
        in_use: Callable[[Collection[str]], Collection[str]] = mounted,
        on_start: Callable[[], None] = lambda: None,
        neighbours: Neighbours = lambda _: (),
        clock: Callable[[], float],
    ) -> None:
        self.backends: Mapping[str, Backend] = {backend.name: backend for backend in backends}
        self.choice = Choice()
        self._setting, self._overrides = setting, tuple(overrides)
        self._cdi_dir, self._inject_by_cdi = cdi_dir, inject_by_cdi
        self._grace_seconds, self._in_use, self._clock = orphan_grace_seconds, in_use, clock
        self._on_start, self._neighbours = on_start, neighbours
        self._orphans: dict[AllocationId, float] = {}
        self._starting: dict[AllocationId, asyncio.Lock] = {}
        self._said: dict[tuple[str, str], str] = {}

    async def choose(self) -> Choice:
        """Looks what this node can carry; what was granted before keeps what it has."""
        before = self.choice
        obstacles = dict(zip(self.backends, await asyncio.gather(*map(_obstacle, self.backends.values())), strict=True))
        self.choice = choose(self._setting, obstacles)
        if self.choice.mechanisms != before.mechanisms or not before.obstacles:
            lost = {name: self.choice.obstacles[name] for name in self.choice.mechanisms if name in self.choice.obstacles}
            tell = log.warning if lost or self.choice.mechanisms == NOTHING else log.info
            broken = {"broken": lost} if lost else {}
            tell("enforcement", uses=self.describe(), because=f"enforcement.backend is {self._setting}", **broken)
        return self.choice

    def describe(self) -> str:
        return self.choice.describe({name: backend.limits for name, backend in self.backends.items()})

    def told(self) -> tuple[tuple[str, str], ...]:
        return self.choice.told({name: backend.limits for name, backend in self.backends.items()})

    # -- the agent's port --------------------------------------------------------------------------------------------------

    def terms(self, pod: PodView | None, *, share: bool) -> Terms:
        if not share:
            return Terms(cdi=self._inject_by_cdi)
        exception = exception_for(self._overrides, pod)
        if exception is None:
            return Terms(mechanisms=self.choice.mechanisms, cdi=self._inject_by_cdi)
        subject, word = exception
        able = [name for name in self.backends if name not in self.choice.obstacles]
        mechanisms = excepted(word, able, self.choice.mechanisms)
        return Terms(mechanisms=mechanisms, exemption=subject, cdi=self._inject_by_cdi)

    def answer(self, base: ContainerResponse, kind: Kind, allocation: Allocation, tenant: Tenant | None) -> ContainerResponse:
        full = self._full(base, allocation, tenant, [kind])
        if not allocation.cdi:
            return full
        # The folder is mounted here in any case: it tells a rebuild which allocation the answer belongs to.
        kept = tuple(mount for mount in base.mounts if mount.container_path == ALLOCATION_PATH)
        names = (cdi.device_name(allocation.id),) if kind == "core" else ()
        return ContainerResponse(mounts=kept, annotations=full.annotations, cdi_devices=names)

    async def start(self, base: ContainerResponse, allocation: Allocation, tenant: Tenant | None) -> None:
        self._on_start()
        async with self._starting.setdefault(allocation.id, asyncio.Lock()):
            self._orphans.pop(allocation.id, None)
            try:
                if tenant is not None:
                    self._refuse_mixture(tenant, allocation.mechanisms)
                    for backend in self._of(allocation.mechanisms):
                        await backend.start(tenant)
                if allocation.cdi:
                    text = cdi.spec(allocation.id, self._full(base, allocation, tenant, KINDS))
                    await asyncio.to_thread(_replace_file, self._cdi_dir / cdi.file_name(allocation.id), text)
            except OSError as error:
                where = f" {error.filename}" if error.filename else ""
                raise Refusal(
                    "internal", f"the container's limits can't be put in place:{where}: {error.strerror or error}"
                ) from error

    async def vacate(self, uuids: Collection[str]) -> None:
        for backend in self.backends.values():
            await backend.vacate(uuids)

    def _refuse_mixture(self, tenant: Tenant, mechanisms: Mechanisms) -> None:
        """MPS has its GPU for itself: containers that are there past it would lose it, or keep its daemon from starting."""
        for holder, others in self._neighbours(tenant):
            if _by_mps(mechanisms) != _by_mps(others):
                mine, theirs = ("MPS", "others") if _by_mps(mechanisms) else ("+".join(mechanisms), "MPS")
                raise Refusal(
                    "conflict",
                    f"the container is to be limited by {mine}, and {holder} uses the same GPU by way of {theirs}: MPS shares a GPU with "
                    f"nobody; it starts when that one has ended",
                )

    def _full(
        self, base: ContainerResponse, allocation: Allocation, tenant: Tenant | None, kinds: Iterable[Kind]
    ) -> ContainerResponse:
        if tenant is None:
            return base
        parts = [backend.prepare(tenant, kind) for backend in self._of(allocation.mechanisms) for kind in kinds]
        told = ContainerResponse(annotations={ENFORCEMENT_ANNOTATION: "+".join(allocation.mechanisms)})
        return merged(base, *parts, told)

    def _of(self, mechanisms: Mechanisms) -> list[Backend]:
        """Raises Refusal for one that this version does not have (the ledger was written by another)."""
        unknown = [name for name in mechanisms if name not in self.backends]
        if unknown:
            raise Refusal(
                "internal", f"this gpumgr has no enforcement backend {unknown[0]!r}; delete the pod and create it again"
            )
        return [self.backends[name] for name in mechanisms]

    # -- once a second -----------------------------------------------------------------------------------------------------

    async def observe(self, running: Sequence[tuple[Running, Mechanisms]]) -> Sequence[tuple[str, Finding]]:
        """What the mechanisms found, each with the name of the one that found it."""
        findings: list[tuple[str, Finding]] = []
        for backend, mine in self._shares(running):
            async with self._weather("observed", backend.name):
                findings += [(backend.name, finding) for finding in await backend.observe(mine)]
        return findings

    async def adjust(self, running: Sequence[tuple[Running, Mechanisms]]) -> None:
        for backend, mine in self._shares(running):
            async with self._weather("adjusted", backend.name):
                await backend.adjust(mine)

    @contextlib.asynccontextmanager
    async def _weather(self, what: str, name: str) -> AsyncIterator[None]:
        """What fails is tried again next time, and told once for each text."""
        try:
            yield
        except (GpumgrError, OSError) as error:
            if self._said.get((what, name)) != str(error):
                log.warning(f"enforcement_not_{what}", backend=name, error=str(error))
            self._said[what, name] = str(error)
        else:
            self._said.pop((what, name), None)

    def _shares(self, running: Sequence[tuple[Running, Mechanisms]]) -> list[tuple[Backend, list[Running]]]:
        """Every backend with its tenants; one without any is asked too, as it may have something to end."""
        return [(backend, [each for each, names in running if name in names]) for name, backend in self.backends.items()]

    def own_pids(self) -> frozenset[int]:
        return frozenset(pid for backend in self.backends.values() for pid in backend.own_pids())

    # -- life --------------------------------------------------------------------------------------------------------------

    async def recover(self, tenants: Sequence[tuple[Tenant, Mechanisms]]) -> None:
        """After a start of the agent: every mechanism takes over what an earlier life left for these."""
        for name, backend in self.backends.items():
            async with self._weather("recovered", name):
                await backend.recover([tenant for tenant, names in tenants if name in names])

    async def tend(self, known: Callable[[], Collection[AllocationId]]) -> float | None:
        """Removes what is kept for allocations that are not `known` (now), after a grace, and never while a process has it mounted.

        Returns after how many seconds something will be due; None: nothing is waiting.
        """
        now = self._clock()
        self._starting = {key: lock for key, lock in self._starting.items() if key in known() or lock.locked()}
        left = await asyncio.to_thread(self._left)
        gone = left - set(known())
        self._orphans = {allocation: self._orphans.get(allocation, now) for allocation in gone}
        due = [allocation for allocation, since in self._orphans.items() if now - since >= self._grace_seconds]
        used = await self._used(due) if due else ()
        for allocation in due:
            if allocation not in used:
                await self._remove(allocation, known)
        waiting = [since + self._grace_seconds - now for allocation, since in self._orphans.items() if allocation not in due]
        return min(waiting, default=None)

    async def _used(self, due: Collection[AllocationId]) -> Collection[AllocationId]:
        """Who may have a process: all of them where the host's processes can't be looked at. That is told once for each reason."""
        try:
            used = await asyncio.to_thread(self._in_use, due)
        except OSError as error:
            if self._said.get(("kept", "")) != str(error):
                log.warning("orphans_kept", error=str(error), remedy=_LET_IT_LOOK)
            self._said["kept", ""] = str(error)
            return due
        self._said.pop(("kept", ""), None)
        return used

    def _left(self) -> set[AllocationId]:
        left: set[AllocationId] = set()
        for name, backend in self.backends.items():
            try:
                left |= set(backend.remains())
            except OSError as error:
                log.warning("orphans_not_looked_for", backend=name, error=str(error))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            left |= {found for name in os.listdir(self._cdi_dir) if (found := cdi.allocation_of(name)) is not None}
        return left

    async def _remove(self, allocation: AllocationId, known: Callable[[], Collection[AllocationId]]) -> None:
        async with self._starting.setdefault(allocation, asyncio.Lock()):
            if allocation in known():
                return
            failed = False
            for name, backend in self.backends.items():
                try:
                    await backend.cleanup(allocation)
                except (GpumgrError, OSError) as error:
                    failed = True
                    log.warning("orphan_not_removed", allocation=allocation, backend=name, error=str(error))
            try:
                (self._cdi_dir / cdi.file_name(allocation)).unlink(missing_ok=True)
            except OSError as error:
                failed = True
                log.warning("orphan_not_removed", allocation=allocation, error=str(error))
        if not failed:
            self._orphans.pop(allocation, None)
            log.info("orphan_removed", allocation=allocation)

    async def close(self) -> None:
        for backend in self.backends.values():
            await backend.close()


async def _obstacle(backend: Backend) -> str | None:
    try:
        return await backend.unavailable()
    except (GpumgrError, OSError) as error:
        return str(error)


def _by_mps(mechanisms: Mechanisms) -> bool:
    return bool({"mps", "mps-open"} & set(mechanisms))


def _replace_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
