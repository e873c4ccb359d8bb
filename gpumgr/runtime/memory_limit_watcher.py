"""Evaluates each sample of the driver: finds what each container uses and which use too much, starts resizes, bursts and suspensions, and
reports the findings of the enforcement backends.

The driver's figures, the kernel's cgroups and the ledger decide which container uses too much. What containers and the libraries in them
report about themselves does not count for this decision.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

import structlog
from msgspec.structs import replace

from gpumgr.agent.container_starts import is_share, tenants
from gpumgr.agent.ports import Eviction, Evictor, Finding, Pods, RunningContainer
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import LogPace
from gpumgr.common.units import MEMORY_RESOURCE, Resource
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.join import AllocationIndex, join
from gpumgr.ledger.ledger import AllocationId, Ledger
from gpumgr.ledger.node_use import AllocationOnGpu, ContainerUse, NodeUse, TurnUse
from gpumgr.ledger.use_changes import KnownProcesses, OverLimitState, apply_readings, update_unattributed
from gpumgr.placement.devices import NodeSample
from gpumgr.runtime.bursts import NOT_LISTED, Bursts
from gpumgr.runtime.container_events import OVER_LIMIT, ContainerEvents, FindingsReporter, report_overcommitted
from gpumgr.runtime.limits_in_force import Limits
from gpumgr.runtime.process_owners import BackgroundCall, ProcessOwners
from gpumgr.runtime.resizes import decide_resizes
from gpumgr.runtime.suspend_parts import Parts, SuspendMeter
from gpumgr.runtime.suspensions import Suspensions
from gpumgr.settings.schema import EnforcementSettings

log = structlog.get_logger(__name__)

EVICTED: Final = "GpuPodEvicted"
_REQUESTER: Final = "memory limit"
#: How long an evaluation waits for the container runtime, and for the enforcement backends.
TIMEOUT_SECONDS: Final = 0.5

Mechanisms = tuple[str, ...]


class Backends(Protocol):
    """All enforcement backends together (gpumgr.enforcement.enforcer.Enforcer)."""

    async def observe(self, running: Sequence[tuple[RunningContainer, Mechanisms]]) -> Sequence[tuple[str, Finding]]: ...

    async def adjust(self, running: Sequence[tuple[RunningContainer, Mechanisms]]) -> Mapping[AllocationId, str]: ...

    def turns(self) -> Mapping[AllocationOnGpu, TurnUse]: ...

    def kept_bytes(self) -> Mapping[AllocationId, int]: ...

    def obstacle_to_change(self, mechanisms: Mechanisms, resource: Resource) -> str | None: ...

    def obstacle_to_burst(self, mechanisms: Mechanisms) -> str | None: ...


class LimitMeter(SuspendMeter, Protocol):
    """Implemented by gpumgr.web.metrics.Metrics."""

    def went_over(self) -> None: ...

    def evicted(self) -> None: ...

    def found(self, backend: str, code: str) -> None: ...


class MemoryLimitWatcher:
    """`evictor`: None without an API server. `owners` has the clock, and the time limit for waits. `suspending`: what suspensions need."""

    def __init__(
        self,
        *,
        agent_state: AgentState,
        pods: Pods,
        owners: ProcessOwners,
        backends: Backends,
        evictor: Evictor | None,
        meter: LimitMeter,
        settings: EnforcementSettings,
        suspending: Parts,
    ) -> None:
        self._agent_state, self._owners, self._backends, self._clock = agent_state, owners, backends, owners.clock
        self._events = ContainerEvents(agent_state, containers=lambda: owners.latest.containers)
        self._evictions, self._can_evict = _Evictions(evictor, self._events, meter.evicted), evictor is not None
        self._meter, self._unsaved = meter, LogPace(owners.clock)
        self._pods = pods
        self.bursts = Bursts(agent_state, pods, self._events, obstacle=backends.obstacle_to_burst)
        self.suspensions = Suspensions(agent_state, pods, self._events, self.bursts, suspending, meter, clock=owners.clock)
        self.apply(settings)
        self._enforce = BackgroundCall("enforce_limits")
        self._use: NodeUse | None = None
        self._limit_state = OverLimitState()
        self._unattributed: KnownProcesses = {}
        self._findings = FindingsReporter(self._events, count=meter.found, clock=owners.clock)

    def apply(self, settings: EnforcementSettings) -> None:
        self._settings = self.bursts.settings = settings
        self.suspensions.when_idle_seconds = settings.suspend_when_idle_seconds

    # -- what is shown -----------------------------------------------------------------------------------------------------

    @property
    def use(self) -> NodeUse | None:
        """The latest evaluation, without containers that are gone; None before the first."""
        return self._use.of(self._agent_state.ledger.allocations) if self._use is not None else None

    @property
    def over(self) -> frozenset[AllocationOnGpu]:
        """The containers that are over their memory limit, with the GPU."""
        known = self._agent_state.ledger.allocations
        return frozenset(place for place in self._limit_state.over if place[0] in known)

    def needs_process_utilization(self) -> bool:
        """Whether a container shares a GPU, so that samples need the utilization of each process."""
        return any(map(is_share, self._agent_state.ledger.allocations.values()))

    # -- once a sample -----------------------------------------------------------------------------------------------------

    async def evaluate(self, sample: NodeSample, started: Mapping[int, int]) -> None:
        """Evaluates a sample that was read after the previous call had returned. `started`: pid -> start time in clock ticks since boot, of
        running processes."""
        ledger = self._agent_state.ledger
        shares = self._shares(ledger)
        index = AllocationIndex(ledger.allocations.values(), self._pods.all())
        seen = {process.pid for gpu in sample.gpus.values() for process in gpu.processes or ()}
        ownership = await self._owners.find(index, shares, seen, started)
        use = join(ledger, sample, ownership.owners, index=index)
        self.bursts.begin_evaluation(ledger, shares, use)
        obstacle, unsaved, listed = self._backends.obstacle_to_change, self._unsaved, ownership.listed
        if await decide_resizes(
            self._agent_state, self._pods, self.bursts, use, obstacle=obstacle, unsaved=unsaved, listed=listed
        ):
            ledger = self._agent_state.ledger
            shares = self._shares(ledger)
            use = join(ledger, sample, ownership.owners, index=index)
        use = _with_turns(use, self._backends.turns())
        shares, use = await self.bursts.apply(ledger, shares, use, sample)
        self._use = use
        await self.suspensions.evaluate(shares, use, ownership)
        report_overcommitted(self._agent_state, self._events)
        limited = [(each.allocation, gpu.name) for each in shares.values() for gpu in each.gpus if gpu.memory_bytes]
        self._check_limits([use.containers[place] for place in limited])
        self._log_unattributed(use, started)
        running = [(one, ledger.allocations[one.tenant.allocation].mechanisms) for one in self._running(shares, use)]
        unknown = () if ownership.listed else ledger.allocations  # before the first list no limit is set
        computed = self.bursts.in_force.latest or {}
        await self._enforce.start(
            lambda: self._observe_and_adjust(running, computed, unknown), timeout_seconds=self._owners.timeout_seconds
        )
        self.bursts.in_force.end_evaluation()

    async def close(self) -> None:
        await self.suspensions.close()
        await self._enforce.close()
        await self._owners.close()

    def _shares(self, ledger: Ledger) -> Mapping[AllocationId, GpuShare]:
        return {share.allocation: share for share, _ in tenants(ledger, self._agent_state.inventory, self._pods)}

    def _running(self, shares: Mapping[AllocationId, GpuShare], use: NodeUse) -> Iterator[RunningContainer]:
        ownership = self._owners.latest
        away = {name for name, each in self._agent_state.suspensions.items() if not each.measured}
        for allocation, tenant in shares.items():
            if not (containers := ownership.containers.get(allocation)):
                continue
            uses = {gpu.name: use.containers[allocation, gpu.name] for gpu in tenant.gpus}
            gpu_pids = frozenset(pid for each in uses.values() for pid in each.processes)
            yield RunningContainer(
                tenant=tenant,
                container=containers[0],
                others=tuple(containers[1:]),
                pids=tuple(sorted(gpu_pids.union(ownership.pids.get(allocation, ())))),
                gpu_pids=gpu_pids,
                # For a suspended container the driver's figure is not the container's memory.
                memory_bytes={gpu: None if allocation in away else each.memory_bytes for gpu, each in uses.items()},
            )

    async def _observe_and_adjust(
        self, running: Sequence[tuple[RunningContainer, Mechanisms]], computed: Limits, unknown: Collection[AllocationId]
    ) -> None:
        """`observe` comes first, because `adjust` corrects what `observe` must find. `unknown`: allocations with containers that may run
        although the runtime has not listed them yet."""
        self._findings.report(await self._backends.observe(running), self._agent_state.ledger.allocations)
        obstacles = {**dict.fromkeys(unknown, NOT_LISTED), **await self._backends.adjust(running)}
        self.bursts.in_force.enforced(computed, obstacles, self._backends.kept_bytes())

    # -- memory ------------------------------------------------------------------------------------------------------------

    def _check_limits(self, uses: Sequence[ContainerUse]) -> None:
        settings = self._settings
        slack_bytes = settings.over_limit_slack_mebibytes << 20
        change = apply_readings(self._limit_state, uses, samples=settings.over_limit_samples, slack_bytes=slack_bytes)
        self._limit_state = change.state
        for use in change.began:
            self._meter.went_over()
            log.warning("container_over_limit", **_log_fields(use))
            self._events.add(use.allocation, OVER_LIMIT, self._over_limit_message(use), use.gpu)
            if settings.evict and (why := self._evictions.obstacle(use)):
                log.warning("not_evicted", allocation=use.allocation, holder=use.describe(), reason=why)
        over = self._limit_state.over if settings.evict else ()
        self._evictions.request([use for use in uses if (use.allocation, use.gpu) in over])
        for use in change.ended:
            log.info("container_within_limit", **_log_fields(use))

    def _over_limit_message(self, use: ContainerUse) -> str:
        """The message lacks the amount in use (see log and metrics), so that Kubernetes counts all repetitions as one Event."""
        settings = self._settings
        return (
            f"container {use.container or '?'} is over its limit: it may use {(use.memory_limit_bytes or 0) >> 20} MiB of memory on "
            f"{use.uuid}, and used more than this plus the tolerance of {settings.over_limit_slack_mebibytes} MiB in "
            f"{settings.over_limit_samples} samples in a row; reduce its use, or request more {MEMORY_RESOURCE}"
            + ("; the pod is evicted" if settings.evict and self._can_evict else "")
        )

    # -- unattributed processes --------------------------------------------------------------------------------------------

    def _log_unattributed(self, use: NodeUse, started: Mapping[int, int]) -> None:
        """Logs each GPU process without an allocation once, if it stays."""
        self._unattributed, new = update_unattributed(self._unattributed, use, started, now=self._clock())
        for (pid, _), processes in new.items():
            log.warning(
                "gpu_process_unattributed",
                pid=pid,
                container=processes[0].container,
                gpus=tuple(process.gpu for process in processes),
                memory_bytes=sum(process.memory_bytes or 0 for process in processes),
                consequence="it uses a GPU without an allocation, and its memory is not accounted to any container",
            )


class _Evictions:
    """Evicts pods that stay over their GPU memory (setting `enforcement.evict`). `count` counts the requested evictions."""

    def __init__(self, evictor: Evictor | None, events: ContainerEvents, count: Callable[[], None]) -> None:
        self._evictor, self._events, self._count = evictor, events, count
        self._requested: frozenset[str] = frozenset()

    def obstacle(self, use: ContainerUse) -> str | None:
        if self._evictor is None:
            return "there is no API server to request it from"
        return "its pod is not known" if self._events.pod_of(use.allocation) is None else None

    def request(self, uses: Sequence[ContainerUse]) -> None:
        """Requests the eviction of exactly these containers' pods, as far as they are known."""
        if self._evictor is None:
            return
        wanted: dict[str, Eviction] = {}
        for use in uses:
            name, reason = self._events.pod_of(use.allocation), f"container {use.container or '?'} stayed over its GPU memory"
            if name is not None and name[1] not in wanted:
                wanted[name[1]] = Eviction(uid=name[1], pod=name[0], reason=reason)
                if name[1] not in self._requested:
                    self._count()
                    self._events.add_once(use.allocation, EVICTED, f"the pod is evicted: {reason}", use.gpu)
        if wanted or self._requested:
            self._evictor.evict(_REQUESTER, wanted.values())
        self._requested = frozenset(wanted)


def _with_turns(use: NodeUse, turns: Mapping[AllocationOnGpu, TurnUse]) -> NodeUse:
    containers = {place: replace(each, turns=turns[place]) if place in turns else each for place, each in use.containers.items()}
    return replace(use, containers=containers)


def _log_fields(use: ContainerUse) -> dict[str, object]:
    return {
        "allocation": use.allocation,
        "holder": use.describe(),
        "gpu": use.gpu,
        "memory_bytes": use.memory_bytes,
        "memory_limit_bytes": use.memory_limit_bytes,
        "pids": use.pids,
    }
