"""All mechanisms of the node as one: implements the agent's port, and what the app calls around it."""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import structlog

from gpumgr.allocator.answer import ALLOCATION_PATH, ENFORCEMENT_ANNOTATION
from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.pods import PodView
from gpumgr.allocator.response import ContainerResponse, merged
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement import cdi
from gpumgr.enforcement.backend import Backend, Finding, Running
from gpumgr.enforcement.choice import NOTHING, Choice, Mechanisms, choose, expand, override_for
from gpumgr.enforcement.leftovers import mounted
from gpumgr.errors import GpumgrError, Refusal
from gpumgr.units import KINDS, Kind

log = structlog.get_logger(__name__)


class Limits:
    """`cdi_dir` None: containers get everything in the answer itself.

    `setting` and `overrides` are the operator's words (settings, section enforcement). `on_start` hears that a container is about to
    start.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        setting: str,
        overrides: Sequence[str],
        cdi_dir: Path | None,
        orphan_grace_seconds: float,
        in_use: Callable[[Collection[str]], Collection[str]] = mounted,
        on_start: Callable[[], None] = lambda: None,
        clock: Callable[[], float],
    ) -> None:
        self.backends: Mapping[str, Backend] = {backend.name: backend for backend in backends}
        self.choice = Choice()
        self._setting, self._overrides, self._cdi_dir = setting, tuple(overrides), cdi_dir
        self._grace_seconds, self._in_use, self._clock = orphan_grace_seconds, in_use, clock
        self._on_start = on_start
        self._orphans: dict[AllocationId, float] = {}
        self._starting: dict[AllocationId, asyncio.Lock] = {}

    async def choose(self) -> Choice:
        """Looks what this node can carry; what was granted before keeps what it has."""
        before = self.choice
        obstacles = {name: await backend.unavailable() for name, backend in self.backends.items()}
        self.choice = choose(self._setting, obstacles)
        if self.choice.mechanisms != before.mechanisms or not before.obstacles:
            lost = {name: self.choice.obstacles[name] for name in self.choice.mechanisms if name in self.choice.obstacles}
            tell = log.warning if lost or self.choice.mechanisms == NOTHING else log.info
            tell(
                "enforcement",
                uses=self.describe(),
                because=f"enforcement.backend is {self._setting}",
                **({"broken": lost} if lost else {}),
            )
        return self.choice

    def describe(self) -> str:
        return self.choice.describe({name: backend.limits for name, backend in self.backends.items()})

    def told(self) -> tuple[tuple[str, str], ...]:
        return self.choice.told({name: backend.limits for name, backend in self.backends.items()})

    # -- the agent's port --------------------------------------------------------------------------------------------------

    def plan(self, pod: PodView | None) -> Mechanisms:
        word = override_for(self._overrides, pod)
        if word is None:
            return self.choice.mechanisms
        return expand(word, [name for name in self.backends if name not in self.choice.obstacles])

    def answer(
        self, base: ContainerResponse, kind: Kind, allocation: AllocationId, tenant: Tenant | None, mechanisms: Mechanisms
    ) -> ContainerResponse:
        full = self._full(base, tenant, mechanisms, [kind])
        if self._cdi_dir is None:
            return full
        # The folder is mounted here in any case: it tells a rebuild which allocation the answer belongs to.
        kept = tuple(mount for mount in base.mounts if mount.container_path == ALLOCATION_PATH)
        names = (cdi.device_name(allocation),) if kind == "core" else ()
        return ContainerResponse(mounts=kept, annotations=full.annotations, cdi_devices=names)

    async def start(
        self, base: ContainerResponse, allocation: AllocationId, tenant: Tenant | None, mechanisms: Mechanisms
    ) -> None:
        self._on_start()
        async with self._starting.setdefault(allocation, asyncio.Lock()):
            try:
                for backend in self._of(mechanisms) if tenant else ():
                    assert tenant is not None
                    await backend.start(tenant)
                if self._cdi_dir is not None:
                    text = cdi.spec(allocation, self._full(base, tenant, mechanisms, KINDS))
                    await asyncio.to_thread(_replace_file, self._cdi_dir / cdi.file_name(allocation), text)
            except OSError as error:
                where = f" {error.filename}" if error.filename else ""
                raise Refusal(
                    "internal", f"the container's limits can't be put in place:{where}: {error.strerror or error}"
                ) from error

    async def vacate(self, uuids: Collection[str]) -> None:
        for backend in self.backends.values():
            await backend.vacate(uuids)

    def _full(
        self, base: ContainerResponse, tenant: Tenant | None, mechanisms: Mechanisms, kinds: Iterable[Kind]
    ) -> ContainerResponse:
        if tenant is None:
            return base
        parts = [backend.prepare(tenant, kind) for backend in self._of(mechanisms) for kind in kinds]
        told = ContainerResponse(annotations={ENFORCEMENT_ANNOTATION: "+".join(mechanisms)})
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
            try:
                findings += [(backend.name, finding) for finding in await backend.observe(mine)]
            except (GpumgrError, OSError) as error:
                log.warning("enforcement_not_observed", backend=backend.name, error=str(error))
        return findings

    async def adjust(self, running: Sequence[tuple[Running, Mechanisms]]) -> None:
        for backend, mine in self._shares(running):
            try:
                await backend.adjust(mine)
            except (GpumgrError, OSError) as error:
                log.warning("enforcement_not_adjusted", backend=backend.name, error=str(error))

    def _shares(self, running: Sequence[tuple[Running, Mechanisms]]) -> list[tuple[Backend, list[Running]]]:
        """Every backend with its tenants; one without any is asked too, as it may have something to end."""
        return [(backend, [each for each, names in running if name in names]) for name, backend in self.backends.items()]

    def own_pids(self) -> frozenset[int]:
        return frozenset(pid for backend in self.backends.values() for pid in backend.own_pids())

    # -- life --------------------------------------------------------------------------------------------------------------

    async def recover(self, tenants: Sequence[tuple[Tenant, Mechanisms]]) -> None:
        """After a start of the agent: every mechanism takes over what an earlier life left for these."""
        for name, backend in self.backends.items():
            try:
                await backend.recover([tenant for tenant, names in tenants if name in names])
            except (GpumgrError, OSError) as error:
                log.error("enforcement_not_recovered", backend=name, error=str(error))

    async def tend(self, known: Collection[AllocationId]) -> float | None:
        """Removes what is kept for allocations that are gone, after a grace, and never while a process has it mounted.

        Returns after how many seconds something will be due; None: nothing is waiting.
        """
        now = self._clock()
        self._starting = {allocation: lock for allocation, lock in self._starting.items() if allocation in known or lock.locked()}
        left = await asyncio.to_thread(self._left)
        gone = [allocation for allocation in left if allocation not in known]
        self._orphans = {allocation: self._orphans.get(allocation, now) for allocation in gone}
        due = [allocation for allocation, since in self._orphans.items() if now - since >= self._grace_seconds]
        used = await asyncio.to_thread(self._in_use, due) if due else ()
        for allocation in due:
            if allocation not in used:
                await self._remove(allocation)
        waiting = [since + self._grace_seconds - now for allocation, since in self._orphans.items() if allocation not in due]
        return min(waiting, default=None)

    def _left(self) -> set[AllocationId]:
        left = {allocation for backend in self.backends.values() for allocation in backend.remains()}
        if self._cdi_dir is not None and self._cdi_dir.is_dir():
            left |= {found for name in os.listdir(self._cdi_dir) if (found := cdi.allocation_of(name)) is not None}
        return left

    async def _remove(self, allocation: AllocationId) -> None:
        try:
            for backend in self.backends.values():
                await backend.cleanup(allocation)
            if self._cdi_dir is not None:
                (self._cdi_dir / cdi.file_name(allocation)).unlink(missing_ok=True)
        except (GpumgrError, OSError) as error:
            log.warning("orphan_not_removed", allocation=allocation, error=str(error))
            return
        self._orphans.pop(allocation, None)
        log.info("orphan_removed", allocation=allocation)

    async def close(self) -> None:
        for backend in self.backends.values():
            await backend.close()


def _replace_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    os.replace(beside, path)
