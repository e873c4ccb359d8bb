"""Once a second: who uses what, what the mechanisms see, who is over its memory, and who is where nobody let it be.

What containers and their libraries tell of themselves plays no part: the driver says which process uses how much, the kernel says
whose process it is, and the ledger says what that container was granted.

While nobody shares a GPU there is nothing to keep, and a look every 10 s shows what whole GPUs are used for.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from gpumgr.agent.history import History
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.ports import Pods
from gpumgr.agent.tenants import tenant_of, view_of
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ledger import AllocationId, Ledger
from gpumgr.allocator.pods import PodKey
from gpumgr.allocator.tenant import Tenant
from gpumgr.app.errand import Errand
from gpumgr.app.findings import OVER_LIMIT, Findings
from gpumgr.app.offenders import Announcer, Offenders
from gpumgr.app.owners import Owners, Runtime, Whereabouts
from gpumgr.enforcement.backend import Finding, Running
from gpumgr.topology.devices import NodeSample
from gpumgr.units import MEMORY_RESOURCE, GpuName
from gpumgr.usage.claims import Claims
from gpumgr.usage.excess import Excess, weigh
from gpumgr.usage.join import join
from gpumgr.usage.picture import ContainerUse, NodeUse
from gpumgr.usage.strangers import Known, encounter

log = structlog.get_logger(__name__)

#: How often to look for strangers while nobody has a GPU.
CALM_PERIOD_SECONDS: Final = 10.0
#: How long a sample waits for the container runtime, and for the mechanisms.
PATIENCE_SECONDS: Final = 0.5

Mechanisms = tuple[str, ...]


class Bookkeeping(Protocol):
    """The books, to read, and the history, to add to (gpumgr.agent.books.Books)."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def inventory(self) -> Inventory: ...

    @property
    def history(self) -> History: ...


class Backends(Protocol):
    """All mechanisms as one (gpumgr.enforcement.limits.Limits)."""

    async def observe(self, running: Sequence[tuple[Running, Mechanisms]]) -> Sequence[tuple[str, Finding]]: ...

    async def adjust(self, running: Sequence[tuple[Running, Mechanisms]]) -> None: ...

    def own_pids(self) -> Collection[int]: ...


class Meter(Protocol):
    """Counts what happened (gpumgr.metrics.live.Metrics)."""

    def went_over(self) -> None: ...

    def evicted(self) -> None: ...

    def found(self, backend: str, code: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLimit:
    """When a container is an offender, and what then: settings of the section enforcement."""

    samples: int
    slack_bytes: int
    evict: bool = False


class Truth:
    """`announcer` is None where there is no API server. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        *,
        books: Bookkeeping,
        pods: Pods,
        runtime: Runtime,
        backends: Backends,
        announcer: Announcer | None,
        meter: Meter,
        over_limit: OverLimit,
        clock: Callable[[], float] = time.monotonic,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._books, self._pods, self._backends = books, pods, backends
        self._announcer, self._meter, self._clock = announcer, meter, clock
        #: May be changed at any time; from the next sample on.
        self.over_limit = over_limit
        self._owners = Owners(runtime, clock=clock, patience_seconds=patience_seconds)
        self._tending, self._patience_seconds = Errand("tend_limits"), patience_seconds
        self._looked_at = float("-inf")
        self._use: NodeUse | None = None
        self._where = Whereabouts()
        self._excess = Excess()
        self._strangers: Known = {}
        self._offenders = Offenders(announcer, pod_of=self._pod_of, tell=self._tell_news, count=meter.evicted, clock=clock)
        self._findings = Findings(count=meter.found, tell=self._tell, clock=clock)

    # -- what readers see --------------------------------------------------------------------------------------------------

    @property
    def use(self) -> NodeUse | None:
        """The latest look, without containers that are gone; None before the first."""
        return self._use.of(self._books.ledger.allocations) if self._use is not None else None

    @property
    def over(self) -> frozenset[AllocationId]:
        """Containers that are over their memory."""
        return self._excess.over & self._books.ledger.allocations.keys()

    def wanted(self) -> bool:
        """Whether anybody shares a GPU, so that samples should tell how busy each process keeps it."""
        return next(self._tenants(self._books.ledger), None) is not None

    # -- once a sample -----------------------------------------------------------------------------------------------------

    async def sampled(self, sample: NodeSample, started: Mapping[int, int]) -> None:
        """`started`: pid -> its start time in clock ticks since boot; processes that are gone are not in it."""
        ledger, now = self._books.ledger, self._clock()
        tenants = {tenant.allocation: tenant for tenant in self._tenants(ledger)}
        if not ledger.allocations and now - self._looked_at < CALM_PERIOD_SECONDS:
            return
        self._looked_at = now
        claims = Claims(ledger.allocations.values())
        seen = {process.pid for gpu in sample.gpus.values() for process in gpu.processes or ()}
        own_pids = frozenset(await asyncio.to_thread(self._backends.own_pids)) if seen else frozenset()
        self._where = await self._owners.look(claims, tenants, seen - own_pids, started)
        use = self._use = join(ledger, sample, self._where.owners, own_pids=own_pids, claims=claims, taken_at=now)
        self._weigh([use.containers[one.allocation, one.gpu] for one in tenants.values() if one.memory_bytes])
        self._meet_strangers(use, started)
        running = [(one, ledger.allocations[one.tenant.allocation].mechanisms) for one in self._running(tenants.values(), use)]
        await self._tending.send(lambda: self._tend(running), patience_seconds=self._patience_seconds)

    async def close(self) -> None:
        await self._tending.close()
        await self._owners.close()

    def _tenants(self, ledger: Ledger) -> Iterator[Tenant]:
        gpus = self._books.inventory.gpus(ledger.cards)
        for allocation in ledger.allocations.values():
            tenant = tenant_of(allocation, ledger.cards, gpus, view_of(allocation, self._pods))
            if tenant is not None:
                yield tenant

    def _running(self, tenants: Iterable[Tenant], use: NodeUse) -> Iterator[Running]:
        for tenant in tenants:
            container = self._where.homes.get(tenant.allocation)
            if container is None:
                continue
            mine, pids = use.containers[tenant.allocation, tenant.gpu], self._where.pids.get(tenant.allocation, ())
            if not mine.processes.keys() <= set(pids):
                pids = tuple(sorted({*pids, *mine.processes}))
            yield Running(
                tenant=tenant,
                container=container,
                pids=pids,
                gpu_processes=mine.processes,
                utilization_ratio=mine.utilization_ratio,
            )

    # -- memory ------------------------------------------------------------------------------------------------------------

    def _weigh(self, uses: Sequence[ContainerUse]) -> None:
        rule = self.over_limit
        weighed = weigh(self._excess, uses, samples=rule.samples, slack_bytes=rule.slack_bytes)
        self._excess = weighed.state
        for use in weighed.began:
            self._meter.went_over()
            self._log_use(log.warning, "container_over_limit", use)
            self._tell(use.allocation, OVER_LIMIT, self._over_limit_message(use), use.gpu)
        over = self._excess.over if rule.evict else ()
        self._offenders.evict([use for use in uses if use.allocation in over])
        for use in weighed.ended:
            self._log_use(log.info, "container_within_limit", use)

    def _log_use(self, tell: Callable[..., None], event: str, use: ContainerUse) -> None:
        tell(
            event,
            allocation=use.allocation,
            holder=use.describe(),
            gpu=use.gpu,
            memory_bytes=use.memory_bytes,
            memory_limit_bytes=use.memory_limit_bytes,
            pids=use.pids,
        )

    def _over_limit_message(self, use: ContainerUse) -> str:
        """How much it uses is in the log and the metrics: the same sentence each time is one Event with a count."""
        rule = self.over_limit
        return (
            f"container {use.container or '?'} is over its limit: it was granted {_mebibytes(use.memory_limit_bytes)} MiB of memory on "
            f"{use.uuid} and used more than that and {_mebibytes(rule.slack_bytes)} MiB that are tolerated, for {rule.samples} samples in "
            f"a row; let it use less, or ask for more {MEMORY_RESOURCE}"
            + ("; the pod is evicted" if rule.evict and self._announcer else "")
        )

    # -- strangers ---------------------------------------------------------------------------------------------------------

    def _meet_strangers(self, use: NodeUse, started: Mapping[int, int]) -> None:
        met = encounter(self._strangers, use, started)
        self._strangers = met.known
        for (pid, _), strangers in met.new.items():
            log.warning(
                "gpu_stranger",
                pid=pid,
                container=strangers[0].container,
                gpus=tuple(stranger.gpu for stranger in strangers),
                memory_bytes=sum(stranger.memory_bytes or 0 for stranger in strangers),
                consequence="it uses a GPU that nobody gave it, and its memory is in nobody's account",
            )
        for pid, _ in sorted(met.gone):
            log.info("gpu_stranger_gone", pid=pid)

    # -- mechanisms --------------------------------------------------------------------------------------------------------

    async def _tend(self, running: Sequence[tuple[Running, Mechanisms]]) -> None:
        """Looks before it repairs, or nothing would be found."""
        self._findings.tell(await self._backends.observe(running), self._books.ledger.allocations)
        await self._backends.adjust(running)

    # -- what people are told ----------------------------------------------------------------------------------------------

    def _tell(self, allocation: AllocationId, reason: str, message: str, *gpus: GpuName) -> None:
        self._books.history.add(self._entry(allocation, reason, message, *gpus))

    def _tell_news(self, allocation: AllocationId, reason: str, message: str, *gpus: GpuName) -> None:
        """Nothing if the like was told a moment ago."""
        self._books.history.add_news(self._entry(allocation, reason, message, *gpus))

    def _entry(self, allocation: AllocationId, reason: str, message: str, *gpus: GpuName) -> Entry:
        """`gpus` are all of the allocation's if none is named."""
        holder, history = self._books.ledger.allocations.get(allocation), self._books.history
        pod, uid = self._pod_of(allocation) or (None, None)
        return Entry(
            at=history.now(),
            what="event",
            id=allocation,
            pod=pod,
            pod_uid=uid,
            container=holder.container if holder else None,
            gpus=gpus or (holder.gpus if holder else ()),
            why=message,
            code=reason,
        )

    def _pod_of(self, allocation: AllocationId) -> tuple[PodKey, str] | None:
        """Name and UID of its pod, as the ledger has them, else as the runtime has."""
        holder, container = self._books.ledger.allocations.get(allocation), self._where.homes.get(allocation)
        pod = (holder.pod if holder else None) or (container.pod if container else None)
        uid = (holder.uid if holder else None) or (container.pod_uid if container else None)
        return (pod, uid) if pod and uid else None


def _mebibytes(count: int | None) -> int:
    return (count or 0) >> 20
