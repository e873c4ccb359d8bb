"""MemoryLimitWatcher on a node of two GPUs with 2 GiB each, and in-memory implementations of its ports."""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
from msgspec.structs import replace

from gpumgr.agent.history import History
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.ports import Evictor, Finding, RunningContainer
from gpumgr.agent.state import AgentState, DeviceListPublisher
from gpumgr.common.errors import CriError, Refusal
from gpumgr.common.units import Process, Resource
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.node_use import AllocationOnGpu, Container, NodeUse, TurnUse
from gpumgr.ledger.suspension import HostMemory, Moved, State, Suspension, Verb
from gpumgr.placement.devices import NodeSample
from gpumgr.placement.pods import PodKey, PodView, ResizeRequest
from gpumgr.runtime import bursts
from gpumgr.runtime.containers import Containers
from gpumgr.runtime.memory_limit_watcher import LimitMeter, Mechanisms, MemoryLimitWatcher
from gpumgr.runtime.process_owners import ProcessOwners
from gpumgr.runtime.suspend_parts import Parts
from gpumgr.settings.schema import EnforcementSettings
from tests.component.stage.stage import Clock, MemoryCheckpoint, MemoryPods
from tests.unit.ledger.samples import MIB, container, sample
from tests.unit.web.metrics.pictures import allocation, name_of, uuid_of, view_of

GPU, GPU1 = name_of(0), name_of(1)
WEB, TRAIN, THIRD = ("team", "web"), ("team", "train"), ("team", "third")
#: Allocation -> its pod, and the process of its container.
PODS: Mapping[str, PodKey] = {"a": WEB, "t": TRAIN, "b": THIRD}
PIDS: Mapping[str, int] = {"a": 11, "t": 21, "b": 31}


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
    """One MemoryLimitWatcher with its ports. Each process' start time is its pid times 10. `settings`: those of `enforcement`."""

    def __init__(self, *allocations: Allocation, standalone: bool = False, driver: str = "580.95.05", **settings: Any) -> None:
        view = view_of(*allocations)
        self.clock = Clock()
        inventory = replace(view.inventory, snapshot=replace(view.inventory.snapshot, driver_version=driver))
        self.agent_state = RecordingState(view.ledger, inventory, self.clock)
        self.pods, self.runtime, self.backends = MemoryPods(), MemoryRuntime(), MemoryBackends()
        self.publisher, self.meter = Mock(spec=Evictor), Mock(spec=LimitMeter)
        self.mover, self.host_memory = MemoryMover(), HostMemory()
        self.owners = ProcessOwners(cast("Containers", self.runtime), clock=self.clock, timeout_seconds=60.0)
        #: How many operations need samples soon.
        self.awaited = 0
        self._settings = EnforcementSettings(**{"over_limit_samples": 3, "over_limit_slack_mebibytes": 0, **settings})
        self.memory_watcher = MemoryLimitWatcher(
            agent_state=self.agent_state,
            pods=self.pods,
            owners=self.owners,
            backends=self.backends,
            evictor=None if standalone else self.publisher,
            meter=self.meter,
            settings=self._settings,
            suspending=Parts(
                machine="x86_64",
                start_times=lambda pids: started({pid for pid in pids if pid not in self.runtime.ended}),
                runs=self.runtime.runs,
                memory_left=lambda _: self.host_memory,
                move=self.mover.move,
                pages=self.backends,
                sampling_soon=self.sampling_soon,
            ),
        )
        self.make_room = self.memory_watcher.bursts.make_room

    @contextmanager
    def sampling_soon(self) -> Iterator[None]:
        self.awaited += 1
        yield
        self.awaited -= 1

    def apply(self, **settings: Any) -> None:
        """These settings change."""
        self._settings = replace(self._settings, **settings)
        self.memory_watcher.apply(self._settings)

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

    def demands(self, letter: str, *, limit: int | None = None, resize: ResizeRequest | None = None, **fields: Any) -> None:
        """The pod of this container has these annotations now. `limit`: its highest burst, in MiB."""
        namespace, name = PODS[letter]
        view = PodView(
            namespace=namespace,
            name=name,
            uid=f"uid-{letter}",
            memory_limits=() if limit is None else (("main", limit),),
            resizes=() if resize is None else (("main", resize),),
        )
        self.pods.views[view.key] = replace(view, **fields)

    @property
    def use(self) -> NodeUse:
        """The latest evaluation."""
        assert self.memory_watcher.use is not None
        return self.memory_watcher.use

    @property
    def amounts(self) -> dict[str, tuple[int, int]]:
        """Allocation -> the cores and MiB of its first GPU that the mechanisms got last."""
        tenants = (each.tenant for each, _ in self.backends.seen[-1][1])
        return {each.allocation: (each.gpus[0].cores, each.gpus[0].limit_bytes // MIB) for each in tenants}

    @property
    def limits(self) -> dict[str, int]:
        """The same without the cores."""
        return {name: mebibytes for name, (_, mebibytes) in self.amounts.items()}

    @property
    def told(self) -> list[HistoryEntry]:
        """The history's entries, which become events of pods."""
        return list(self.agent_state.history.entries())

    @property
    def evicted(self) -> list[Mapping[str, tuple[PodKey, str]]]:
        """The evictions that each sample requested: UID -> pod and reason."""
        requests = [call.args[1] for call in self.publisher.evict.call_args_list]
        return [{each.uid: (each.pod, each.reason) for each in wanted} for wanted in requests]

    def events(self, code: str) -> list[str]:
        return [entry.why for entry in self.told if entry.code == code]

    def holds(self, allocation: Allocation) -> None:
        self.agent_state.ledger = self.agent_state.ledger.occupy(allocation)

    def frees(self, *allocations: AllocationId) -> None:
        self.agent_state.ledger = self.agent_state.ledger.free(allocations)

    async def start(self, allocation: Allocation) -> asyncio.Task[None]:
        """Begins the start of this container, which may wait for memory."""
        begun = asyncio.create_task(self.make_room(allocation))
        await breathe()
        return begun

    async def starts_with_sample(self, number: int, allocation: Allocation, sample: NodeSample) -> None:
        """The start of this container waits for so many evaluations."""
        start = await self.start(allocation)
        for _ in range(number):
            assert not start.done()
            await self.sampled(sample)
        assert start.done()
        await start

    async def refusal(self, allocation: Allocation) -> str:
        """Why this container does not start within 10 ms."""
        with impatient(), pytest.raises(Refusal) as refusal:
            await self.make_room(allocation)
        return str(refusal.value)

    async def sampled(self, node: NodeSample, *, times: int = 1, after_seconds: float = 1.0, gone: Collection[int] = ()) -> None:
        """Evaluations of this sample, one a second; tasks that wait for them have run at the end."""
        pids = {process.pid for gpu in node.gpus.values() for process in gpu.processes or ()}
        for _ in range(times):
            self.clock.now += after_seconds
            await self.memory_watcher.evaluate(node, started(pids - set(gone)))
            await breathe()


def node_of(*allocations: Allocation, **options: Any) -> Node:
    """These containers run. One sample above its limit makes a container go over it."""
    node = Node(*allocations, **{"over_limit_samples": 1, **options})
    for each in allocations:
        assert each.pod is not None
        node.demands(each.id)
        node.runs(container(each.id, each.pod), PIDS[each.id])
    return node


def share(letter: str, blocks: int, *, cores: int = 0b1, mechanism: str = "limiter") -> Allocation:
    """A share of GPU 0. `blocks`, `cores`: masks."""
    return replace(allocation(letter, PODS[letter], cores={0: cores}, blocks={0: blocks}), mechanisms=(mechanism,))


def uses(**mebibytes: int) -> NodeSample:
    """One sample of GPU 0, with what is in use on it. No kernel runs."""
    found = sample({PIDS[each]: size * MIB for each, size in mebibytes.items()}, ratios={PIDS[each]: 0.0 for each in mebibytes})
    gpu = replace(found.gpus[uuid_of(0)], memory_used_bytes=sum(mebibytes.values()) * MIB)
    return NodeSample(gpus={uuid_of(0): gpu})


def impatient() -> AbstractContextManager[object]:
    """Starts wait for 10 ms at most."""
    return patch.object(bursts, "_ROOM_SECONDS", 0.01)


def started(pids: Collection[int]) -> Mapping[int, int]:
    return {pid: pid * 10 for pid in pids}


async def breathe() -> None:
    """Lets tasks that are ready run."""
    for _ in range(200):
        await asyncio.sleep(0)
