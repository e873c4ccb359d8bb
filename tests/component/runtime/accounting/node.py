"""MemoryLimitWatcher and in-memory implementations of its ports."""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from msgspec.structs import replace

from gpumgr.agent.history import History
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.ports import Eviction, Finding, RunningContainer
from gpumgr.agent.state import AgentState, DeviceListPublisher
from gpumgr.common.errors import CriError
from gpumgr.common.units import Process, Resource
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.node_use import AllocationOnGpu, Container, NodeUse, TurnUse
from gpumgr.ledger.suspension import HostMemory, Moved, State, Suspension, Verb
from gpumgr.placement.devices import NodeSample
from gpumgr.placement.pods import PodKey
from gpumgr.runtime.containers import Containers
from gpumgr.runtime.memory_limit_watcher import Mechanisms, MemoryLimitWatcher
from gpumgr.runtime.process_owners import ProcessOwners
from gpumgr.runtime.suspend_parts import Parts
from gpumgr.settings.schema import EnforcementSettings
from tests.component.stage.stage import Clock, MemoryCheckpoint, MemoryPods
from tests.unit.web.metrics.pictures import view_of


class RecordingState(AgentState):
    """`saved`: all states of suspensions that were saved, in order."""

    def __init__(self, ledger: Ledger, inventory: Inventory, clock: Clock) -> None:
        self.checkpoint, self.saved = MemoryCheckpoint(), list[tuple[AllocationId, State | None]]()
        lists = DeviceListPublisher(lambda _: None, clock=clock)
        super().__init__(
            ledger, checkpoint=self.checkpoint, device_lists=lists, runs=lambda _: False, clock=clock, inventory=inventory
        )
        self.history = History(self.checkpoint, wall_clock=lambda: 7.0)

    async def set_suspension(self, allocation: AllocationId, suspension: Suspension | None) -> None:
        await super().set_suspension(allocation, suspension)
        self.saved.append((allocation, None if suspension is None else suspension.state))


@dataclass
class MemoryRuntime:
    """`inside`: container id -> its processes. `elsewhere`: further answers of `container_of`. `ended`: processes that are gone. The
    runtime does not answer while `answers` is cleared."""

    containers: list[Container] = field(default_factory=list)
    inside: dict[str, tuple[int, ...]] = field(default_factory=dict)
    elsewhere: dict[int, Container] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    cgroups_broken: bool = False
    unavailable: bool = False
    due: bool = True
    listed: bool = False
    ticks: int = 0
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers.set()

    async def tick(self) -> None:
        self.ticks += 1
        await self.answers.wait()
        self.listed = True

    def running(self) -> Sequence[Container]:
        return [container for container in self.containers if container.running]

    def pids(self, container: Container) -> tuple[int, ...]:
        if self.cgroups_broken:
            raise CriError("can't read /sys/fs/cgroup: permission denied; run gpumgr as root")
        return self.inside.get(container.id, ())

    async def container_of(self, pid: int, start_time: int) -> Container | None:  # noqa: ARG002
        self.asked.append(pid)
        await self.answers.wait()
        if self.unavailable:
            raise CriError("the container runtime is away")
        return self.elsewhere.get(pid)

    def runs(self, process: Process, /) -> bool:
        return process[0] not in self.ended


@dataclass
class MemoryBackends:
    """`findings` is the result of each `observe`, `obstacles` of each `adjust`; `seen` records all calls, in order."""

    findings: list[tuple[str, Finding]] = field(default_factory=list)
    seen: list[tuple[str, list[tuple[RunningContainer, Mechanisms]]]] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    bug: Exception | None = None
    obstacles: Mapping[AllocationId, str] = field(default_factory=dict)
    kept: Mapping[AllocationId, int] = field(default_factory=dict)
    by_turns: Mapping[AllocationOnGpu, TurnUse] = field(default_factory=dict)
    #: Whether the containers have pages; the containers with held calls, and the ones that ask for their resume.
    by_pages: bool = True
    held: set[AllocationId] = field(default_factory=set)
    asking: set[AllocationId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ready.set()

    async def observe(self, running: Sequence[tuple[RunningContainer, Mechanisms]]) -> Sequence[tuple[str, Finding]]:
        self.seen.append(("observe", list(running)))
        await self.ready.wait()
        if self.bug is not None:
            raise self.bug
        return tuple(self.findings)

    async def adjust(self, running: Sequence[tuple[RunningContainer, Mechanisms]]) -> Mapping[AllocationId, str]:
        self.seen.append(("adjust", list(running)))
        return self.obstacles

    def hold_calls(self, allocation: AllocationId, *, hold: bool) -> bool:
        if not self.by_pages:
            return False
        (self.held.add if hold else self.held.discard)(allocation)
        if hold:
            self.asking.discard(allocation)
        return True

    def holds_calls(self, allocation: AllocationId) -> bool:
        return allocation in self.held

    def asks_for_resume(self, allocation: AllocationId) -> bool:
        return allocation in self.asking

    def obstacle_to_change(self, mechanisms: Mechanisms, resource: Resource) -> str | None:
        if resource == "core" and mechanisms == ("nvml-memory",):
            return "no backend limits the container's cores"
        return "the backend vcuda can't" if "vcuda" in mechanisms else None

    def obstacle_to_burst(self, mechanisms: Mechanisms) -> str | None:
        return self.obstacle_to_change(mechanisms, "memory")

    def kept_bytes(self) -> Mapping[AllocationId, int]:
        return self.kept

    def turns(self) -> Mapping[AllocationOnGpu, TurnUse]:
        return self.by_turns


@dataclass
class MemoryEvictor:
    """`evictions` are the evictions that a call added: pod, UID and reason; `withdrawn` are the UIDs that a call left out."""

    wanted: dict[str, Eviction] = field(default_factory=dict)
    evictions: list[tuple[PodKey, str, str]] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)

    def evict(self, requester: str, evictions: Iterable[Eviction], *, immediately: bool = False) -> None:  # noqa: ARG002
        assert requester == "memory limit"
        wanted = {each.uid: each for each in evictions}
        self.evictions += [(each.pod, uid, each.reason) for uid, each in wanted.items() if uid not in self.wanted]
        self.withdrawn += self.wanted.keys() - wanted.keys()
        self.wanted = wanted


@dataclass
class MemoryMeter:
    over: int = 0
    evictions: int = 0
    findings: list[tuple[str, str]] = field(default_factory=list)
    moves: list[tuple[str, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def went_over(self) -> None:
        self.over += 1

    def evicted(self) -> None:
        self.evictions += 1

    def found(self, backend: str, code: str) -> None:
        self.findings.append((backend, code))

    def moved(self, operation: str, seconds: float, memory_bytes: int) -> None:  # noqa: ARG002
        self.moves.append((operation, memory_bytes))

    def resumed(self, waited_seconds: float) -> None:
        self.waits.append(waited_seconds)


@dataclass
class MemoryHost:
    """`ended`: processes that are gone. Every process' start time is its pid times 10."""

    ended: set[int]
    left: HostMemory = field(default_factory=HostMemory)

    def start_times(self, pids: Collection[int]) -> Mapping[int, int]:
        return started({pid for pid in pids if pid not in self.ended})

    def runs(self, process: Process, /) -> bool:
        return process[0] not in self.ended

    def memory_left(self, containers: Sequence[Container]) -> HostMemory:  # noqa: ARG002
        return self.left


@dataclass
class MemoryMover:
    """Records the operations. `answers`: what the next ones do; None: they succeed once `ends` is set."""

    done: list[tuple[str, AllocationId]] = field(default_factory=list)
    answers: list[Moved | None] = field(default_factory=list)
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    #: What the last operation got.
    last: Suspension = field(default_factory=lambda: Suspension(state="running"))

    async def move(self, verb: Verb, allocation: AllocationId, suspension: Suspension) -> Moved:
        self.last = suspension
        self.done.append((verb, allocation))
        success = Moved(pids=[pid for pid, _ in suspension.processes])
        answer = self.answers.pop(0) if self.answers else success
        if answer is None:
            await self.ends.wait()
        return answer or success


class Node:
    """One MemoryLimitWatcher with its ports. Every process' start time is its pid times 10."""

    def __init__(self, *allocations: Allocation, evict: bool = False, standalone: bool = False, samples: int = 3) -> None:
        view = view_of(*allocations)
        self.clock = Clock()
        self.agent_state = RecordingState(view.ledger, view.inventory, self.clock)
        self.pods, self.runtime, self.backends = MemoryPods(), MemoryRuntime(), MemoryBackends()
        self.publisher, self.meter = MemoryEvictor(), MemoryMeter()
        publisher = None if standalone else self.publisher
        self.host, self.mover = MemoryHost(self.runtime.ended), MemoryMover()
        self.owners = ProcessOwners(cast("Containers", self.runtime), clock=self.clock, timeout_seconds=60.0)
        #: How many operations need samples soon.
        self.awaited = 0
        self.memory_watcher = MemoryLimitWatcher(
            agent_state=self.agent_state,
            pods=self.pods,
            owners=self.owners,
            backends=self.backends,
            evictor=publisher,
            meter=self.meter,
            settings=EnforcementSettings(over_limit_samples=samples, over_limit_slack_mebibytes=0, evict=evict),
            suspending=Parts(
                machine="x86_64",
                start_times=lambda pids: self.host.start_times(pids),
                runs=lambda process: self.host.runs(process),
                memory_left=lambda containers: self.host.memory_left(containers),
                move=self.mover.move,
                pages=self.backends,
                sampling_soon=self.sampling_soon,
            ),
        )

    @contextmanager
    def sampling_soon(self) -> Iterator[None]:
        self.awaited += 1
        yield
        self.awaited -= 1

    def set_timeout(self, seconds: float) -> None:
        """How long evaluations wait for the runtime and the backends from now on."""
        self.owners.timeout_seconds = seconds

    def runs(self, container: Container, *pids: int) -> None:
        """The container runs with these processes; its earlier start has ended."""
        same = (container.pod_uid, container.name)
        self.runtime.containers = [
            replace(c, running=False) if (c.pod_uid, c.name) == same else c for c in self.runtime.containers
        ] + [container]
        self.runtime.inside[container.id] = pids

    @property
    def use(self) -> NodeUse:
        """The latest evaluation."""
        assert self.memory_watcher.use is not None
        return self.memory_watcher.use

    @property
    def told(self) -> list[HistoryEntry]:
        """The history's entries, which become events of pods."""
        return list(self.agent_state.history.entries())

    def holds(self, allocation: Allocation) -> None:
        self.agent_state.ledger = self.agent_state.ledger.occupy(allocation)

    def frees(self, *allocations: AllocationId) -> None:
        self.agent_state.ledger = self.agent_state.ledger.free(allocations)

    async def start(self, allocation: Allocation) -> asyncio.Task[None]:
        """Begins the start of this container, which may wait for memory."""
        begun = asyncio.create_task(self.memory_watcher.bursts.make_room(allocation))
        await breathe()
        return begun

    async def sampled(self, node: NodeSample, *, times: int = 1, after_seconds: float = 1.0, gone: Collection[int] = ()) -> None:
        """Evaluations of this sample, one a second; tasks that wait for them have run at the end."""
        pids = {process.pid for gpu in node.gpus.values() for process in gpu.processes or ()}
        for _ in range(times):
            self.clock.now += after_seconds
            await self.memory_watcher.evaluate(node, started(pids - set(gone)))
            await breathe()


def started(pids: Collection[int]) -> Mapping[int, int]:
    return {pid: pid * 10 for pid in pids}


async def breathe() -> None:
    """Lets tasks that are ready run."""
    for _ in range(200):
        await asyncio.sleep(0)
