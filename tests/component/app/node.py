"""What stands around Truth, in plain memory: books, pods, a runtime, mechanisms, who evicts, a meter."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumgr.agent.history import History
from gpumgr.agent.inventory import Inventory
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ledger import Allocation, AllocationId, Ledger
from gpumgr.allocator.pods import PodKey
from gpumgr.app.truth import Mechanisms, OverLimit, Truth
from gpumgr.enforcement.backend import Finding, Running
from gpumgr.errors import CriError
from gpumgr.topology.devices import NodeSample
from gpumgr.usage.containers import Container
from tests.component.stage.stage import Clock, MemoryCheckpoint, MemoryPods
from tests.unit.metrics.pictures import view_of


@dataclass
class MemoryBooks:
    ledger: Ledger
    inventory: Inventory
    history: History = field(default_factory=lambda: History(MemoryCheckpoint(), wall_clock=lambda: 7.0))


@dataclass
class MemoryRuntime:
    """`inside`: container id -> its processes. `elsewhere`: what else `of_process` knows. Whoever waits for `answers` waits for the
    runtime."""

    containers: list[Container] = field(default_factory=list)
    inside: dict[str, tuple[int, ...]] = field(default_factory=dict)
    elsewhere: dict[int, Container] = field(default_factory=dict)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    cgroups_broken: bool = False
    ticks: int = 0
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers.set()

    async def tick(self) -> None:
        self.ticks += 1
        await self.answers.wait()

    def running(self) -> Sequence[Container]:
        return [container for container in self.containers if container.running]

    def pids(self, container: Container) -> tuple[int, ...]:
        if self.cgroups_broken:
            raise CriError("can't read /sys/fs/cgroup: permission denied; run gpumgr as root")
        return self.inside.get(container.id, ())

    async def of_process(self, pid: int, start_time: int) -> Container | None:  # noqa: ARG002
        self.asked.append(pid)
        await self.answers.wait()
        return self.elsewhere.get(pid)


@dataclass
class MemoryBackends:
    """`findings` are found at each look; all that was seen and done stands in `seen`, in order."""

    findings: list[tuple[str, Finding]] = field(default_factory=list)
    own: set[int] = field(default_factory=set)
    seen: list[tuple[str, list[tuple[Running, Mechanisms]]]] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    bug: Exception | None = None

    def __post_init__(self) -> None:
        self.ready.set()

    async def observe(self, running: Sequence[tuple[Running, Mechanisms]]) -> Sequence[tuple[str, Finding]]:
        self.seen.append(("observe", list(running)))
        await self.ready.wait()
        if self.bug is not None:
            raise self.bug
        return tuple(self.findings)

    async def adjust(self, running: Sequence[tuple[Running, Mechanisms]]) -> None:
        self.seen.append(("adjust", list(running)))

    def own_pids(self) -> Collection[int]:
        return frozenset(self.own)


@dataclass
class MemoryAnnouncer:
    evictions: list[tuple[PodKey, str, str]] = field(default_factory=list)
    cancelled: list[tuple[str, str | None]] = field(default_factory=list)

    def evict(self, pod: PodKey, uid: str, *, reason: str) -> None:
        self.evictions.append((pod, uid, reason))

    def cancel_evict(self, uid: str, *, reason: str | None = None) -> None:
        self.cancelled.append((uid, reason))


@dataclass
class MemoryMeter:
    over: int = 0
    evictions: int = 0
    findings: list[tuple[str, str]] = field(default_factory=list)

    def went_over(self) -> None:
        self.over += 1

    def evicted(self) -> None:
        self.evictions += 1

    def found(self, backend: str, code: str) -> None:
        self.findings.append((backend, code))


class Node:
    """One Truth with its world. Every process' start time is its pid times 10."""

    def __init__(self, *allocations: Allocation, evict: bool = False, standalone: bool = False, samples: int = 3) -> None:
        view = view_of(*allocations)
        self.books = MemoryBooks(view.ledger, view.inventory)
        self.pods, self.runtime, self.backends = MemoryPods(), MemoryRuntime(), MemoryBackends()
        self.announcer, self.meter, self.clock = MemoryAnnouncer(), MemoryMeter(), Clock()
        self.truth = Truth(
            books=self.books,
            pods=self.pods,
            runtime=self.runtime,
            backends=self.backends,
            announcer=None if standalone else self.announcer,
            meter=self.meter,
            over_limit=OverLimit(samples=samples, slack_bytes=0, evict=evict),
            clock=self.clock,
            patience_seconds=60.0,
        )

    def give_up_after(self, seconds: float) -> None:
        """From now on nobody is waited for any longer."""
        self.truth._patience_seconds = self.truth._owners._patience_seconds = seconds

    def runs(self, container: Container, *pids: int) -> None:
        """The container runs with these processes; an earlier start of it is over."""
        same = (container.pod_uid, container.name)
        self.runtime.containers = [
            replace(c, running=False) if (c.pod_uid, c.name) == same else c for c in self.runtime.containers
        ] + [container]
        self.runtime.inside[container.id] = pids

    @property
    def told(self) -> list[Entry]:
        """What pods are told: the history's entries."""
        return list(self.books.history.entries())

    def holds(self, allocation: Allocation) -> None:
        self.books.ledger = self.books.ledger.occupy(allocation)

    def frees(self, *allocations: AllocationId) -> None:
        self.books.ledger = self.books.ledger.free(allocations)

    async def sampled(self, node: NodeSample, *, after_seconds: float = 1.0, gone: Collection[int] = ()) -> None:
        self.clock.now += after_seconds
        pids = {process.pid for gpu in node.gpus.values() for process in gpu.processes or ()}
        await self.truth.sampled(node, started(pids - set(gone)))


def started(pids: Collection[int]) -> Mapping[int, int]:
    return {pid: pid * 10 for pid in pids}


async def breathe() -> None:
    """Lets tasks that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)
