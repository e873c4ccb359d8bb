"""All backends (mechanisms) behind one object, which implements gpumgr.agent.ports.Enforcement."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import structlog

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.errors import GpumgrError, Refusal
from gpumgr.common.files import FileIdentity, names_in, replace_file
from gpumgr.common.units import RESOURCES, Resource
from gpumgr.enforcement import cdi
from gpumgr.enforcement.backend import (
    NO_MECHANISM,
    Backend,
    MechanismChoice,
    Mechanisms,
    choose_mechanisms,
    mechanisms_for,
    override_for,
)
from gpumgr.enforcement.container_processes import mounted_names
from gpumgr.ledger.answer import ALLOCATION_PATH, ENFORCEMENT_ANNOTATION, ContainerResponse, merged
from gpumgr.ledger.gpu_share import EnforcementTerms, GpuLimits, GpuShare
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.node_use import AllocationOnGpu, TurnUse
from gpumgr.placement.devices import Gpu
from gpumgr.placement.pods import PodView
from gpumgr.settings.schema import EnforcementSettings

log = structlog.get_logger(__name__)

_ALLOW_TRACING: Final = (
    "files of containers that are gone stay until the agent may read the mounts of all processes: give it CAP_SYS_PTRACE, and in a pod "
    "`hostPID: true`"
)
_MAKE_READABLE: Final = "files of containers that are gone stay until the agent can list the folder: make it readable"
#: Container -> (description, mechanisms) of each other container on its GPU.
OthersOnGpus = Callable[[GpuShare], Iterable[tuple[str, Mechanisms]]]


class Enforcer:
    """`in_use`: returns which of the given allocations have a folder that a process has mounted; called on a thread.

    `on_start` is called before each start of a container. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        settings: EnforcementSettings,
        *,
        in_use: Callable[[Collection[str]], Collection[str]] = mounted_names,
        on_start: Callable[[GpuShare | None, Mechanisms], None] = lambda _tenant, _mechanisms: None,
        others_on_gpus: OthersOnGpus = lambda _: (),
        clock: Callable[[], float],
    ) -> None:
        self.backends: Mapping[str, Backend] = {backend.name: backend for backend in backends}
        self.choice = MechanismChoice()
        #: UUID -> the limits of new shares on this GPU, without overrides.
        self.gpu_limits: Mapping[str, GpuLimits] = {}
        #: `gpu_limits` as one text.
        self.described = self.choice.describe(())
        self._settings = settings
        self._cdi_dir, self._inject_by_cdi = settings.cdi_dir, settings.injection == "cdi"
        self._in_use, self._clock = in_use, clock
        self._on_start, self._others_on_gpus = on_start, others_on_gpus
        #: Allocation that no longer exists but has files -> when that was first seen.
        self._orphans: dict[AllocationId, float] = {}
        self._starting: dict[AllocationId, asyncio.Lock] = {}
        #: The CDI specs that this process wrote.
        self._written: dict[AllocationId, FileIdentity | None] = {}
        self._logged: dict[tuple[str, ...], str] = {}
        self._reported: tuple[Mechanisms, str] | None = None

    async def choose(self, gpus: Sequence[Gpu] = ()) -> MechanismChoice:
        """Determines and logs the mechanisms of new containers on these GPUs; existing allocations keep theirs."""
        answers = await asyncio.gather(*(backend.unavailable() for backend in self.backends.values()))
        obstacles = dict(zip(self.backends, answers, strict=True))
        strengths = {name: backend.limits for name, backend in self.backends.items()}
        self.choice = choice = choose_mechanisms(self._settings.backend, obstacles, strengths)
        self.gpu_limits = {gpu.uuid: choice.limits(gpu) for gpu in gpus}
        self.described = limits = choice.describe(gpus)
        if (choice.mechanisms, limits) != self._reported:
            self._reported = choice.mechanisms, limits
            lost = {name: choice.obstacles[name] for name in choice.mechanisms if name in choice.obstacles}
            level = log.warning if lost or choice.mechanisms == NO_MECHANISM else log.info
            broken = {"broken": lost} if lost else {}
            because = f"enforcement.backend is {self._settings.backend}"
            level("enforcement", uses="+".join(choice.mechanisms), limits=limits, because=because, **broken)
        return choice

    # -- the agent's port --------------------------------------------------------------------------------------------------

    def terms(self, pod: PodView | None, *, share: bool, setting: str | None = None) -> EnforcementTerms:
        if not share:
            return EnforcementTerms(cdi=self._inject_by_cdi)
        subject = None
        if setting is None and (override := override_for(self._settings.overrides, pod)) is not None:
            subject, setting = override
        node = self.choice.mechanisms
        mechanisms = node if setting is None else mechanisms_for(setting, self.choice.able, node)
        return EnforcementTerms(mechanisms=mechanisms, exemption=subject, cdi=self._inject_by_cdi)

    def answer(
        self, base: ContainerResponse, kind: Resource, allocation: Allocation, tenant: GpuShare | None
    ) -> ContainerResponse:
        full = self._full(base, allocation, tenant, RESOURCES if kind == "replica" else [kind])
        if not allocation.cdi:
            return full
        # The mount of the allocation's folder stays: its host path has the allocation's id, which the agent needs to rebuild the ledger.
        kept = tuple(mount for mount in base.mounts if mount.container_path == ALLOCATION_PATH)
        names = () if kind == "memory" else (cdi.device_name(allocation.id),)
        return ContainerResponse(mounts=kept, annotations=full.annotations, cdi_devices=names)

    async def start(self, base: ContainerResponse, allocation: Allocation, tenant: GpuShare | None) -> None:
        self._on_start(tenant, allocation.mechanisms)
        async with self._starting.setdefault(allocation.id, asyncio.Lock()):
            self._orphans.pop(allocation.id, None)
            try:
                if tenant is not None and not (allocation.claim and await self._runs(allocation.id)):
                    self._refuse_mixture(tenant, allocation.mechanisms)
                    if not _by_mps(allocation.mechanisms):  # an idle MPS daemon keeps the GPU in exclusive mode
                        await self.vacate([gpu.uuid for gpu in tenant.gpus])
                    for backend in self._of(allocation.mechanisms):
                        await backend.start(tenant)
                if allocation.cdi:
                    text = cdi.spec(allocation, self._full(base, allocation, tenant, RESOURCES))
                    # Not on a thread: the folder is in memory by default (/var/run/cdi), and the threads of many claims would wait for
                    # each other longer than a write takes.
                    self._write_spec(allocation.id, text)
            except OSError as error:
                where = f" {error.filename}" if error.filename else ""
                raise Refusal(
                    "internal", f"the container's limits can't be put in place:{where}: {error.strerror or error}"
                ) from error

    async def _runs(self, allocation: AllocationId) -> bool:
        """Whether a container may already run with this allocation's files. A claim can be prepared again while its containers run. Running
        containers never see new files, so the old files must stay."""
        there = allocation in await asyncio.to_thread(self._list_remains)
        return there and allocation in await self._used([allocation])

    async def vacate(self, uuids: Collection[str]) -> None:
        for backend in self.backends.values():
            await backend.vacate(uuids)

    def _refuse_mixture(self, tenant: GpuShare, mechanisms: Mechanisms) -> None:
        """Raises Refusal if only one of two containers on a GPU uses MPS. MPS sets the GPU to exclusive mode, so the other container would
        lose the GPU or prevent the daemon's start."""
        for holder, others in self._others_on_gpus(tenant):
            if _by_mps(mechanisms) != _by_mps(others):
                mine, theirs = ("MPS", "another mechanism") if _by_mps(mechanisms) else ("+".join(mechanisms), "MPS")
                raise Refusal(
                    "conflict",
                    f"the container is to be limited by {mine}, and {holder} uses the same GPU through {theirs}: if one container "
                    "on a GPU uses MPS, all must use MPS; this container starts when the other one has ended",
                )

    def _full(
        self, base: ContainerResponse, allocation: Allocation, tenant: GpuShare | None, kinds: Iterable[Resource]
    ) -> ContainerResponse:
        if tenant is None:
            return base
        parts = [backend.prepare(tenant, kind) for backend in self._of(allocation.mechanisms) for kind in kinds]
        annotation = ContainerResponse(annotations={ENFORCEMENT_ANNOTATION: "+".join(allocation.mechanisms)})
        return merged(base, *parts, annotation)

    def _of(self, mechanisms: Mechanisms) -> list[Backend]:
        """Raises Refusal for a mechanism that this version of gpumgr does not have."""
        unknown = [name for name in mechanisms if name not in self.backends]
        if unknown:
            raise Refusal(
                "internal", f"this gpumgr has no enforcement backend {unknown[0]!r}; delete the pod and create it again"
            )
        return [self.backends[name] for name in mechanisms]

    # -- once a sample -----------------------------------------------------------------------------------------------------

    async def observe(self, running: Sequence[tuple[RunningContainer, Mechanisms]]) -> Sequence[tuple[str, Finding]]:
        """(name of the mechanism, finding) of all mechanisms."""
        findings: list[tuple[str, Finding]] = []
        for backend, containers in self._by_backend(running):
            with self._retried(log.warning, "enforcement_not_observed", backend=backend.name):
                findings += [(backend.name, finding) for finding in await backend.observe(containers)]
        return findings

    async def adjust(self, running: Sequence[tuple[RunningContainer, Mechanisms]]) -> Mapping[AllocationId, str]:
        """The reason for each memory limit that is not in force."""
        obstacles: dict[AllocationId, str] = {}
        for backend, containers in self._by_backend(running):
            with self._retried(log.warning, "enforcement_not_adjusted", backend=backend.name):
                try:
                    obstacles |= await backend.adjust(containers)
                except (GpumgrError, OSError) as error:
                    obstacles |= {each.tenant.allocation: str(error) for each in containers}
                    raise
        return obstacles

    def _by_backend(self, running: Sequence[tuple[RunningContainer, Mechanisms]]) -> list[tuple[Backend, list[RunningContainer]]]:
        """All backends, each with its containers. A backend without containers may have daemons to check or records to drop."""
        return [(backend, [each for each, names in running if name in names]) for name, backend in self.backends.items()]

    def turns(self) -> Mapping[AllocationOnGpu, TurnUse]:
        """As of the last `observe`."""
        return {place: use for backend in self.backends.values() for place, use in backend.turns().items()}

    def kept_bytes(self) -> Mapping[AllocationId, int]:
        """Container -> the highest memory limit that its programs still have from before a change, as of the last `adjust`."""
        return {name: size for backend in self.backends.values() for name, size in backend.kept_bytes().items()}

    def obstacle_to_change(self, mechanisms: Mechanisms, resource: Resource) -> str | None:
        """Why these mechanisms can't change the limit of a running container; None: they can."""
        limiting = [name for name in mechanisms if name in self.backends and resource in self.backends[name].limits]
        fixed = [name for name in limiting if not self.backends[name].adjustable]
        what = "memory" if resource == "memory" else "cores"
        if fixed:
            return f"the backend {fixed[0]} can't change the limit of {what} of a running container"
        return None if limiting else f"no backend limits the container's {what}"

    def obstacle_to_burst(self, mechanisms: Mechanisms) -> str | None:
        """Why these mechanisms can't change the memory limit of running programs; None: they can."""
        for name in mechanisms:
            if name in self.backends and "memory" in self.backends[name].limits and self.backends[name].running_keep_limits:
                return f"with the backend {name}, programs that run keep the limits with which they started"
        return self.obstacle_to_change(mechanisms, "memory")

    def own_pids(self, started: Mapping[int, int]) -> frozenset[int]:
        return frozenset(pid for backend in self.backends.values() for pid in backend.own_pids(started))

    @contextlib.contextmanager
    def _retried(self, warn: Callable[..., object], event: str, **fields: str) -> Iterator[None]:
        """Logs an error in the block instead of raising it, since a later call repeats the work. The same error in a row is logged once."""
        work = (event, *fields.values())
        try:
            yield
        except (GpumgrError, OSError) as error:
            if self._logged.get(work) != str(error):
                warn(event, error=str(error), **fields)
            self._logged[work] = str(error)
        else:
            self._logged.pop(work, None)

    # -- start of the agent, and removal -----------------------------------------------------------------------------------

    async def recover(self, tenants: Sequence[tuple[GpuShare, Mechanisms]]) -> None:
        for name, backend in self.backends.items():
            with self._retried(log.warning, "enforcement_not_recovered", backend=name):
                await backend.recover([tenant for tenant, names in tenants if name in names])

    async def tend(self, known: Callable[[], Collection[AllocationId]]) -> float | None:
        """Like `Backend.tend`. Also removes the files of an allocation gone for `orphan_grace_seconds`, unless a process has them
        mounted."""
        later = [await backend.tend(known) for backend in self.backends.values()]
        now = self._clock()
        self._starting = {key: lock for key, lock in self._starting.items() if key in known() or lock.locked()}
        for lost in self._written.keys() - set(known()):
            self._written.pop(lost, None)
        gone = await asyncio.to_thread(self._list_remains) - set(known())
        self._orphans = {allocation: self._orphans.get(allocation, now) for allocation in gone}
        due = [allocation for allocation, since in self._orphans.items() if now - since >= self._settings.orphan_grace_seconds]
        used = await self._used(due) if due else ()
        for allocation in due:
            if allocation not in used:
                await self._remove(allocation, known)
        waiting = [
            since + self._settings.orphan_grace_seconds - now
            for allocation, since in self._orphans.items()
            if allocation not in due
        ]
        return min((seconds for seconds in (*waiting, *later) if seconds is not None), default=None)

    async def _used(self, due: Collection[AllocationId]) -> Collection[AllocationId]:
        """Which of these allocations have files that a process has mounted; all if that can't be read."""
        with self._retried(log.warning, "orphans_kept", remedy=_ALLOW_TRACING):
            return await asyncio.to_thread(self._in_use, due)
        return due

    def _list_remains(self) -> set[AllocationId]:
        """The allocations with files. A folder that can't be listed is tried again later."""
        listings = {name: backend.remains for name, backend in self.backends.items()} | {"cdi": self._specs}
        found: set[AllocationId] = set()
        for name, listing in listings.items():
            with self._retried(log.warning, "orphans_not_listed", backend=name, remedy=_MAKE_READABLE):
                found |= set(listing())
        return found

    def _write_spec(self, allocation: AllocationId, spec: bytes) -> None:
        """Raises OSError."""
        self._cdi_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
        # Not durable: every start of the container writes the file again, also after a reboot.
        path = self._cdi_dir / cdi.file_name(allocation)
        replace_file(path, spec, durable=False)
        self._written[allocation] = FileIdentity.at(path)

    def _specs(self) -> Collection[AllocationId]:
        return [allocation for name in names_in(self._cdi_dir) if (allocation := cdi.allocation_of(name)) is not None]

    async def _remove(self, allocation: AllocationId, known: Callable[[], Collection[AllocationId]]) -> None:
        async with self._starting.setdefault(allocation, asyncio.Lock()):
            if allocation in known():
                return
            removals = {name: backend.cleanup for name, backend in self.backends.items()} | {"cdi": self._remove_spec}
            failed = False
            for name, remove in removals.items():
                try:
                    await remove(allocation)
                except (GpumgrError, OSError) as error:
                    failed = True
                    log.warning("orphan_not_removed", allocation=allocation, backend=name, error=str(error))
        if not failed:
            self._orphans.pop(allocation, None)
            log.info("orphan_removed", allocation=allocation)

    def intact_specs(self) -> Collection[AllocationId]:
        """The allocations with a CDI spec that this process wrote and that has not changed since."""
        written = [*self._written.items()]
        return {each for each, spec in written if spec and FileIdentity.at(self._cdi_dir / cdi.file_name(each)) == spec}

    async def _remove_spec(self, allocation: AllocationId) -> None:
        self._written.pop(allocation, None)
        (self._cdi_dir / cdi.file_name(allocation)).unlink(missing_ok=True)

    async def close(self) -> None:
        for backend in self.backends.values():
            await backend.close()


def _by_mps(mechanisms: Mechanisms) -> bool:
    return bool({"mps", "mps-open"} & set(mechanisms))
