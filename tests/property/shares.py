"""One GPU with tenants that burst, are resized and suspended, and an agent that can be killed between any two of its actions.

`Gpu` is what outlives the agent: the kubelet's record of ids, the tenants with their memory, the limits in force and held calls of CUDA,
the driver's operations, and the checkpoint, as the text that is on disk. `Agent` is one process of the agent: everything else.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast
from unittest.mock import Mock

from msgspec.structs import replace

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.agent.state import AgentState, DeviceListPublisher
from gpumgr.common.units import BLOCK_MEBIBYTES, RESOURCES, Process, Resource
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Request, choose
from gpumgr.ledger.grant import grant
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Allocation, AllocationId, Change, Ledger
from gpumgr.ledger.node import NodeDevices
from gpumgr.ledger.node_use import AllocationOnGpu, Container, TurnUse
from gpumgr.ledger.suspension import HostMemory, Moved, Suspension, Verb
from gpumgr.ledger.tables import decode_allocation, encode_allocation
from gpumgr.placement.devices import GpuProcess, GpuSample, NodeSample
from gpumgr.placement.pods import PodView
from gpumgr.runtime.containers import Containers
from gpumgr.runtime.memory_limit_watcher import LimitMeter, Mechanisms, MemoryLimitWatcher
from gpumgr.runtime.process_owners import ProcessOwners
from gpumgr.runtime.suspend_parts import Parts
from gpumgr.settings.schema import EnforcementSettings
from tests.component.runtime.accounting.node import MemoryRuntime
from tests.component.stage.stage import MemoryPods, snapshot
from tests.unit.agent.world import ClockLoop
from tests.unit.ledger.nodes import app, pod

BLOCKS: Final = 8
MEMORY: Final = BLOCKS * BLOCK_MEBIBYTES
MIB: Final = 1 << 20
SNAPSHOT: Final = replace(snapshot(1, BLOCKS), driver_version="580.95.05")
UUID: Final = SNAPSHOT.gpus[0].uuid
GPU: Final = GpuRegistry().register(UUID, MEMORY).by_uuid[UUID].name
_T = TypeVar("_T")


class Killed(BaseException):
    """The agent's process has ended."""


@dataclass
class Tenant:
    """Figures in MiB. `used` is on the GPU, `moved` in the host's memory. `limit` is in force; None: it has not started."""

    pid: int
    ids: dict[Resource, int] = field(default_factory=dict)
    used: int = 0
    moved: int = 0
    suspended: bool = False
    limit: int | None = None
    held: bool = False
    asks: bool = False
    launches: int = 0

    @property
    def works(self) -> bool:
        """Whether its calls of CUDA reach the driver."""
        return self.limit is not None and not self.suspended and not self.held


@dataclass
class Operation:
    """What the driver does with a process now. `answer`: the agent that waits for it may have ended."""

    verb: str
    memory_mebibytes: int
    answer: "asyncio.Future[Moved]"


@dataclass
class Gpu:
    """`fuse`: after so many actions the agent is killed, before or (`done`) after the last one's effect; None: it is not."""

    loop: ClockLoop
    tenants: dict[str, Tenant] = field(default_factory=dict)
    pods: MemoryPods = field(default_factory=MemoryPods)
    operations: dict[str, Operation] = field(default_factory=dict)
    rows: dict[AllocationId, tuple[AllocationId, str, int]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    gpu_registry: GpuRegistry = field(default_factory=GpuRegistry)
    offered: NodeDevices = ()
    fuse: int | None = None
    done: bool = False
    dead: bool = False
    #: Whether the backends answer.
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    #: What must never happen.
    faults: list[str] = field(default_factory=list)

    @property
    def free(self) -> int:
        return MEMORY - sum(each.used for each in self.tenants.values())

    def act(self, effect: Callable[[], _T]) -> _T:
        """An action of the agent, which may be its last one."""
        if self.dead:
            raise Killed
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.dead = True
                if self.done:
                    effect()
                raise Killed
        return effect()

    def sample(self) -> NodeSample:
        processes = tuple(
            GpuProcess(pid=each.pid, memory_bytes=each.used * MIB, utilization_ratio=0.0)
            for each in self.tenants.values()
            if each.limit is not None and (each.used or not each.suspended)
        )
        used = sum(each.used for each in self.tenants.values()) * MIB
        return NodeSample(gpus={UUID: GpuSample(uuid=UUID, memory_used_bytes=used, processes=processes)})

    def finish(self, name: str, *, works: bool, killed: bool = False) -> None:
        """The driver ends its operation. Not `works`: it refuses a suspension. `killed`: the helper is, after it has stopped the processes;
        not `works`: before it has moved any memory."""
        operation = self.operations.pop(name)
        tenant = self.tenants.get(name)
        if tenant is None:
            moved = Moved(error="no process uses CUDA", untouched=True)
        elif killed:
            if works:
                self._moved(tenant, operation, works=True)
            tenant.suspended = True
            moved = Moved(held=[tenant.pid], error="the helper was killed")
        else:
            moved = self._moved(tenant, operation, works=works)
        if not operation.answer.done():
            operation.answer.set_result(moved)

    def _moved(self, tenant: Tenant, operation: Operation, *, works: bool) -> Moved:
        pids = [tenant.pid]
        if operation.verb == "suspend":
            if not works and not tenant.suspended:
                return Moved(pids=pids, error="its work did not end")
            tenant.moved, tenant.used, tenant.suspended = tenant.moved + tenant.used, 0, True
        elif tenant.moved > self.free:
            self.faults.append(
                f"a resume of {tenant.moved} MiB (known: {operation.memory_mebibytes}) began with {self.free} MiB free"
            )
            return Moved(pids=pids, held=pids, error="out of memory", out_of_memory=True)
        else:
            tenant.used, tenant.moved, tenant.suspended = tenant.used + tenant.moved, 0, False
        return Moved(pids=pids)

    # -- what the agent calls; each is an action ---------------------------------------------------------------------------

    async def save(self, change: Change) -> None:
        def written() -> None:
            for gone in change.drop:
                self.rows.pop(gone, None)
            self.rows.update({each.id: encode_allocation(each) for each in change.put})
            self.gpu_registry = change.gpu_registry or self.gpu_registry

        self.act(written)

    async def save_note(self, key: str, value: str, entries: Sequence[HistoryEntry] = ()) -> None:  # noqa: ARG002
        self.act(lambda: self.notes.update({key: value}))

    async def observe(self, running: Sequence[tuple[RunningContainer, Mechanisms]]) -> Sequence[tuple[str, Finding]]:  # noqa: ARG002
        await self.answers.wait()
        return ()

    async def adjust(self, running: Sequence[tuple[RunningContainer, Mechanisms]]) -> Mapping[AllocationId, str]:
        for each, _ in running:
            self.act(lambda each=each: self._limit(each))  # type: ignore[misc]
        return {}

    def _limit(self, each: RunningContainer) -> None:
        if (tenant := self.tenants.get(each.tenant.allocation)) is not None and tenant.limit is not None:
            tenant.limit = each.tenant.gpus[0].limit_bytes // MIB

    def kept_bytes(self) -> Mapping[AllocationId, int]:
        return {}

    def turns(self) -> Mapping[AllocationOnGpu, TurnUse]:
        return {
            (name, GPU): TurnUse(held_seconds=0.0, waited_seconds=0.0, launches=each.launches, overruns=0)
            for name, each in self.tenants.items()
        }

    def obstacle_to_change(self, mechanisms: Mechanisms, resource: Resource) -> str | None:  # noqa: ARG002
        return None

    def obstacle_to_burst(self, mechanisms: Mechanisms) -> str | None:
        return self.obstacle_to_change(mechanisms, "memory")

    def hold_calls(self, allocation: AllocationId, *, hold: bool) -> bool:
        def changed() -> bool:
            if (tenant := self.tenants.get(allocation)) is None:
                return False
            tenant.held, tenant.asks = hold, False
            return True

        return self.act(changed)

    def holds_calls(self, allocation: AllocationId) -> bool:
        return allocation in self.tenants and self.tenants[allocation].held

    def asks_for_resume(self, allocation: AllocationId) -> bool:
        return allocation in self.tenants and self.tenants[allocation].asks

    async def move(self, verb: Verb, allocation: AllocationId, suspension: Suspension) -> Moved:
        def begun() -> "asyncio.Future[Moved]":
            if allocation in self.operations:  # of an earlier agent, for which the helper waits
                self.finish(allocation, works=True)
            operation = Operation(verb, suspension.size_bytes // MIB, self.loop.create_future())
            self.operations[allocation] = operation
            return operation.answer

        return await self.act(begun)

    # -- the machine -------------------------------------------------------------------------------------------------------

    def start_times(self, pids: Collection[int]) -> Mapping[int, int]:
        return {pid: pid for pid in pids if self.runs((pid, pid))}

    def runs(self, process: Process, /) -> bool:
        return any(each.pid == process[0] and each.limit is not None for each in self.tenants.values())


class Agent:
    """One process of the agent, which knows what is on disk."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.starts = gpu, dict[str, asyncio.Task[None]]()
        clock = gpu.loop.time
        self.state = AgentState(
            Ledger(gpu.gpu_registry, {name: decode_allocation(*row) for name, row in gpu.rows.items()}),
            checkpoint=gpu,
            device_lists=DeviceListPublisher(self._offer, clock=clock),
            runs=lambda _: False,
            clock=clock,
        )
        self.state.restore_suspensions(gpu.notes)
        runtime = MemoryRuntime()
        self.watcher = MemoryLimitWatcher(
            agent_state=self.state,
            pods=gpu.pods,
            owners=ProcessOwners(cast("Containers", runtime), clock=clock, timeout_seconds=0.5),
            backends=gpu,
            evictor=None,
            meter=Mock(spec=LimitMeter),
            settings=EnforcementSettings(
                over_limit_samples=1,
                over_limit_slack_mebibytes=0,
                memory_burst=True,
                max_growth_cores=100,
                max_growth_memory_mebibytes=MEMORY,
            ),
            suspending=Parts(
                machine="x86_64",
                start_times=gpu.start_times,
                runs=gpu.runs,
                memory_left=lambda _: HostMemory(),
                move=gpu.move,
                pages=gpu,
            ),
        )
        self._runtime = runtime

    def _offer(self, devices: NodeDevices) -> None:
        self.gpu.offered = devices

    async def start(self) -> None:
        await self.state.set_snapshot(SNAPSHOT)
        self.state._device_lists.start()
        self.looking = asyncio.create_task(self.watcher.suspensions.run())

    async def evaluate(self, sample: NodeSample) -> None:
        self._runtime.containers = [container_of(name) for name, each in self.gpu.tenants.items() if each.limit is not None]
        self._runtime.inside = {container_of(name).id: (each.pid,) for name, each in self.gpu.tenants.items()}
        pids = {each.pid for each in self.gpu.tenants.values() if each.limit is not None}
        await self.watcher.evaluate(sample, {pid: pid for pid in pids})

    async def admit(self, name: str, view: PodView) -> dict[Resource, int]:
        """The ids that the kubelet gets. Raises Refusal."""
        caller, got = Caller(pod=view.key, view=view, spec=view.containers[0]), dict[Resource, int]()
        for kind in RESOURCES:
            async with self.state.lock:
                node = self.state.node()
                (devices,) = self.gpu.offered
                healthy = devices.healthy_cores if kind == "core" else devices.healthy_blocks
                available = {GPU: healthy & ~self.gpu_held(kind)}
                size = 1 if kind == "core" else view.containers[0].memory_blocks
                masks = choose(
                    node, self.state.ledger, caller, Request(resource=kind, available=available, must={}, size=size)
                ).masks
                held = grant(node, self.state.ledger, caller, kind, masks, new_id=name, now=0.0, why="")
                held = replace(held, mechanisms=("limiter",))
                await self.state.commit(self.state.ledger.occupy(held))
                self.state.publish()
            got[kind] = masks[GPU]
        return got

    def gpu_held(self, kind: Resource) -> int:
        held = 0
        for each in self.gpu.tenants.values():
            held |= each.ids.get(kind, 0)
        return held

    async def sweep(self) -> None:
        """Frees what the kubelet does not have."""
        async with self.state.lock:
            await self.state.commit(self.state.ledger.free(self.state.ledger.allocations.keys() - self.gpu.tenants.keys()))
            self.state.publish()

    def allocations(self) -> Iterator[tuple[Tenant, Allocation]]:
        """The tenants that have an allocation."""
        for name, tenant in self.gpu.tenants.items():
            if (found := self.state.ledger.allocations.get(name)) is not None:
                yield tenant, found


def container_of(name: str) -> Container:
    return Container(id=name * 8, pod=("team", name), pod_uid=f"uid-{name}", name="main", attempt=0, cgroup=f"/{name}")


def view_of(name: str, blocks: int, **fields: object) -> PodView:
    return replace(pod(name, app(1, blocks)), phase="Running", **fields)
