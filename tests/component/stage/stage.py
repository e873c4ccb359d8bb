"""A node in one event loop: simulated kubelet, our servers, the agent; the durable side and the API server are plain memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpumgr.agent.admission import Admission
from gpumgr.agent.container_starts import ContainerStarts
from gpumgr.agent.inventory import HardwareHealth, Inventory
from gpumgr.agent.pods import PodEnds
from gpumgr.agent.ports import PodResources
from gpumgr.agent.reconciler import Reconciler
from gpumgr.agent.state import AgentState, DeviceListPublisher
from gpumgr.agent.writer import Agent
from gpumgr.common.aio import LatestValue
from gpumgr.common.errors import CheckpointError, CriError
from gpumgr.common.units import ALL_RESOURCES, BLOCK_BYTES, RESOURCE_NAMES, RESOURCES, Process, Resource
from gpumgr.enforcement.backend import Unlimited
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.kube.hami_formats import replica_request
from gpumgr.kube.pods import parse_quantity, selected
from gpumgr.kubelet.device_lists import encode_node_devices
from gpumgr.kubelet.plugin_registration import KubeletLink
from gpumgr.kubelet.records import PodResourcesClient, stored_nodes
from gpumgr.ledger.answer import HostPaths
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Allocation, AllocationId, Change, Ledger
from gpumgr.ledger.node import NodeDevices
from gpumgr.placement.devices import Gpu, Level, NodeSnapshot, Topology
from gpumgr.placement.pods import ContainerSpec, NamedGpu, PodKey, PodSandbox, PodView
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import EnforcementSettings
from gpumgr.sim.kubelet import PodStatus, SimContainer, SimKubelet, SimPod

from .mig import MemoryMig

#: The resources of a node with the profile both.
WITHOUT_MIG: tuple[Resource, ...] = (*RESOURCES, "replica")
HAMI = ReplicaResources()


@dataclass
class MemoryCheckpoint:
    """A checkpoint in memory that can be full."""

    allocations: dict[str, Any] = field(default_factory=dict)
    gpu_registry: GpuRegistry = field(default_factory=GpuRegistry)
    full: bool = False

    async def save(self, change: Change) -> None:
        if self.full:
            raise CheckpointError("no space left on the disk of the checkpoint")
        for gone in change.drop:
            self.allocations.pop(gone, None)
        self.allocations.update({a.id: a for a in change.put})
        self.gpu_registry = change.gpu_registry or self.gpu_registry

    async def save_note(self, key: str, value: str, entries: Sequence[HistoryEntry] = ()) -> None:
        pass


@dataclass
class MemoryPods:
    """The API server's pods of this node; a pod may be late."""

    views: dict[PodKey, PodView] = field(default_factory=dict)
    synced: bool = True
    down: bool = False

    @property
    def reachable(self) -> bool:
        return self.synced and not self.down

    def get(self, pod: PodKey) -> PodView | None:
        return self.views.get(pod)

    def by_uid(self, uid: str) -> PodView | None:
        return next((view for view in self.views.values() if view.uid == uid), None)

    def all(self) -> Iterable[PodView]:
        return list(self.views.values())

    async def wait_for(self, pod: PodKey, timeout_seconds: float, *, uid: str | None = None) -> PodView | None:  # noqa: ARG002
        await asyncio.sleep(0)
        found = self.views.get(pod) if uid is None else self.by_uid(uid)
        return None if found is None or (uid is None and found.ended) else found

    async def wait_ended(self, uids: Collection[str], timeout_seconds: float) -> None:  # noqa: ARG002
        await asyncio.sleep(0)


@dataclass
class MemoryRuntime:
    """The container runtime; `pods` are those with a ready sandbox. `error`: it does not answer."""

    pods: Callable[[], Iterable[SimPod]] = tuple
    error: str | None = None
    asked: int = 0

    async def ready_sandboxes(self) -> Collection[PodSandbox]:
        self.asked += 1
        if self.error is not None:
            raise CriError(self.error)
        return [PodSandbox(pod=(pod.namespace, pod.name), uid=pod.uid) for pod in self.pods()]


class Drift:
    """A meter that records drift."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def drifted(self, what: str, number: int) -> None:
        self.seen[what] = self.seen.get(what, 0) + number


class Clock:
    """Monotonic time, which a test advances by `now`; `running`: it passes by itself, too."""

    def __init__(self, *, running: bool = False) -> None:
        self.now = 1000.0
        self._started = time.monotonic() if running else None

    def __call__(self) -> float:
        return self.now + (0.0 if self._started is None else time.monotonic() - self._started)


def unlimited(cdi_dir: Path = Path("/nonexistent"), overrides: tuple[str, ...] = ()) -> Enforcer:
    """A node without enforcement."""
    return Enforcer(
        [Unlimited(lambda _tenant, _message: None)],
        EnforcementSettings(backend="none", overrides=overrides, cdi_dir=cdi_dir, orphan_grace_seconds=0),
        clock=Clock(),
    )


def snapshot(gpus: int = 4, blocks: int = 16, *, numa: bool = False) -> NodeSnapshot:
    gpu_registry = tuple(
        Gpu(
            index=i,
            uuid=f"GPU-{i:08x}-1111-2222-3333-444444444444",
            minor=i,
            bus_id=f"00000000:{i:02X}:00.0",
            model="Test",
            memory_bytes=blocks * BLOCK_BYTES,
            numa_node=i * 2 // gpus if numa else None,
        )
        for i in range(gpus)
    )

    def level(a: int, b: int) -> Level:
        return Level.PSB if a == b else Level.PIX if a // 2 == b // 2 else Level.PHB

    levels = tuple(tuple(level(a, b) for b in range(gpus)) for a in range(gpus))
    return NodeSnapshot(gpus=gpu_registry, topology=Topology(levels, tuple((0,) * gpus for _ in range(gpus))))


def app(cores: int, blocks: int = 0, name: str = "main") -> SimContainer:
    return SimContainer(name=name, cores=cores, memory_blocks=blocks)


def init(cores: int, blocks: int = 0, name: str = "prepare") -> SimContainer:
    return SimContainer(name=name, cores=cores, memory_blocks=blocks, kind="init")


class MemoryAgent:
    """The agent; its durable side, the API server and the container runtime are plain memory. Its parts call the methods."""

    def __init__(
        self, pods: MemoryPods, checkpoint: MemoryCheckpoint, runtime: MemoryRuntime, *, clock: Clock, limits: Enforcer | None
    ) -> None:
        self.pods, self.checkpoint, self.runtime, self.clock = pods, checkpoint, runtime, clock
        self.limits, self.drift, self.share_mode = limits or unlimited(), Drift(), True
        self.wall_clock: Callable[[], float] = time.time
        self.hami, self._numbers = HAMI, count(1)
        #: UID -> the pod's annotations.
        self.annotations: dict[str, Mapping[str, str]] = {}
        ids = count(1)
        self.new_id = lambda: f"{next(ids):016x}"

    def build(
        self,
        ledger: Ledger,
        pod_resources: PodResources,
        host: HostPaths,
        *,
        mig: MemoryMig | None = None,
        inventory: Inventory | None = None,
        before_offer: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Makes the agent, or the next one after a restart."""
        self.device_lists = DeviceListPublisher(self.publish, clock=self.clock)
        self.agent_state = AgentState(
            ledger,
            checkpoint=self.checkpoint,
            device_lists=self.device_lists,
            runs=self.runs,
            clock=self.clock,
            inventory=inventory,
            before_offer=before_offer,
        )
        pod_ends = PodEnds(self.pods, self.runtime, node="node-1", clock=self.clock)
        self.admission = Admission(self.pods, pod_resources, pod_ends, pod_wait_seconds=lambda: 0.01, clock=self.clock)
        self.reconciler = Reconciler(
            agent_state=self.agent_state,
            admission=self.admission,
            pods=self.pods,
            pod_ends=pod_ends,
            meter=self.drift,
            new_id=self.new_id,
            clock=self.clock,
            wall_clock=self.wall_clock,
        )
        self.agent = Agent(
            agent_state=self.agent_state,
            mig_driver=mig or MemoryMig(),
            admission=self.admission,
            reconciler=self.reconciler,
            starts=ContainerStarts(
                agent_state=self.agent_state,
                pods=self.pods,
                enforcement=self.limits,
                host=host,
                make_dir=self.make_dir,
                make_room=self.make_room,
                stored_nodes=self.stored_nodes,
            ),
            share_mode=lambda: self.share_mode,
            new_id=self.new_id,
            wall_clock=self.wall_clock,
        )

    @property
    def ledger(self) -> Ledger:
        return self.agent_state.ledger.check()

    # -- pods

    def pod(self, name: str, *containers: SimContainer) -> SimPod:
        return SimPod(namespace="team", name=name, uid=f"uid-{next(self._numbers)}", containers=containers)

    def view(self, pod: SimPod, phase: str = "Pending") -> PodView:
        specs = tuple(
            ContainerSpec(
                name=c.name,
                kind=c.kind,
                cores=c.cores,
                memory_blocks=c.memory_blocks,
                replicas=replica_request(c.limits, self.hami, parse_quantity),
            )
            for c in pod.admission_order
        )
        return PodView(
            namespace=pod.namespace,
            name=pod.name,
            uid=pod.uid,
            phase=phase,
            created_at=float(pod.uid.removeprefix("uid-")),
            containers=specs,
            **selected(self.annotations.get(pod.uid, {})),
        )

    def tell(self, pod: SimPod, phase: str = "Pending") -> None:
        """The API server's cache has the pod so."""
        self.pods.views[pod.namespace, pod.name] = self.view(pod, phase)

    # -- what the agent's parts call

    def publish(self, node_devices: NodeDevices) -> None:
        """The devices for the kubelet."""

    def runs(self, _process: Process) -> bool:
        return True

    def make_dir(self, path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    async def make_room(self, allocation: Allocation) -> None:
        """No container bursts."""

    async def stored_nodes(self, _allocation: AllocationId) -> Collection[str]:
        return ()


class Stage(MemoryAgent):
    """`devices`: what our servers offer of each resource."""

    def __init__(self, kubelet: SimKubelet, kinds: Sequence[Resource], hami: ReplicaResources, **parts: Any) -> None:
        super().__init__(checkpoint=MemoryCheckpoint(), clock=Clock(running=True), runtime=MemoryRuntime(self._running), **parts)
        self.kubelet, self.hami = kubelet, hami
        self.devices: dict[Resource, LatestValue[bytes]] = {kind: LatestValue(b"") for kind in kinds}

    def _running(self) -> list[SimPod]:
        return [pod for pod in self.kubelet.pods() if self.kubelet.statuses[pod.uid].phase == "Running"]

    def publish(self, node_devices: NodeDevices) -> None:
        for kind, message in encode_node_devices(self.agent_state.ledger.gpu_registry, node_devices, [*self.devices]).items():
            self.devices[kind].set(message)

    async def stored_nodes(self, allocation: AllocationId) -> Collection[str]:
        return await stored_nodes(self.kubelet.plugin_folder, allocation)

    def pod(
        self, name: str, *containers: SimContainer, known: bool = True, annotations: Mapping[str, str] | None = None
    ) -> SimPod:
        """A pod bound to this node; `known`: the API server's cache has it."""
        pod = super().pod(name, *containers)
        self.annotations[pod.uid] = annotations or {}
        if known:
            self.tell(pod)
        return pod

    def kubelet_prefers(self, *ids: str) -> None:
        """The kubelet takes these ids. It does not ask the agent."""

        async def preferred(*_: object) -> list[str]:
            return [*ids]

        self.agent.prefer = preferred  # type: ignore[method-assign, assignment]

    def placed(self, pod: SimPod, *shares: NamedGpu, containers: Sequence[str] = ("main",)) -> None:
        """A scheduler's placement: each of these containers has these shares."""
        view = self.pods.views[pod.namespace, pod.name]
        self.pods.views[view.key] = replace(view, placed=tuple((name, shares) for name in containers))

    async def run(self, pod: SimPod) -> PodStatus:
        status = await self.kubelet.run(pod)
        self.tell(pod, status.phase)
        return status

    async def run_all(self, *pods: SimPod) -> None:
        """The same for pods that must start, one after the other."""
        for pod in pods:
            status = await self.run(pod)
            assert status.phase == "Running", status.message

    async def refused(self, pod: SimPod, reason: str = "") -> None:
        """The same for a pod that fails with a message in which the reason is."""
        status = await self.run(pod)
        assert (status.phase, reason in (status.message or "")) == ("Failed", True), status.message

    def delete(self, pod: SimPod) -> None:
        self.kubelet.delete(pod.uid)
        self.pods.views.pop((pod.namespace, pod.name), None)

    def check_agreement(self, *pods: SimPod) -> None:
        """The ids that the kubelet holds for these pods are the ledger's, under their names, and no others."""
        ledger = self.ledger
        for pod in pods:
            for container in pod.containers:
                for kind in ALL_RESOURCES:
                    mine = [
                        a for a in ledger.of((pod.namespace, pod.name), pod.uid) if a.container == container.name and a.held(kind)
                    ]
                    ids = {text for a in mine for text in ledger.gpu_registry.format(kind, a.held(kind))}
                    assert ids == self.kubelet.held(pod.uid, container.name, RESOURCE_NAMES[kind])
                    assert len(mine) <= 1


async def no_bursts(_allocation: Allocation) -> None:
    """No container bursts."""


def mig_mode(mig: MemoryMig | None) -> dict[str, str]:
    """What the health of the GPUs says about those in MIG mode."""
    return {gpu.uuid: "MIG is enabled" for gpu in mig.snapshot.gpus if gpu.mig_enabled} if mig else {}


@asynccontextmanager
async def stage(
    folder: Path,
    *,
    node: NodeSnapshot | None = None,
    known: bool = True,
    host: HostPaths | None = None,
    kinds: Sequence[Resource] = RESOURCES,
    hami: ReplicaResources = HAMI,
    mig: MemoryMig | None = None,
    mig_profiles: Sequence[str] = (),
    enforcement: Enforcer | None = None,
    **kubelet_options: Any,
) -> AsyncIterator[Stage]:
    async with SimKubelet(folder, **kubelet_options) as kubelet:
        client = PodResourcesClient(kubelet.pod_resources_socket, timeout_seconds=30, rate_limit_budget_seconds=30)
        made = Stage(kubelet, kinds, hami, pods=MemoryPods(synced=known), limits=enforcement)
        made.build(
            Ledger(),
            client,
            host or HostPaths(exists=lambda _path: False, allocation_dir=str(folder / "vm")),
            mig=mig,
            inventory=Inventory(replicas=10 if "replica" in kinds else 0, mig_on_demand=mig_profiles if mig else None),
        )
        await made.agent_state.set_snapshot(mig.snapshot if mig else node or snapshot())
        await made.agent_state.set_health(HardwareHealth(failed={}, cordoned=mig_mode(mig), in_mig_mode=mig_mode(mig)))
        made.device_lists.start()
        link = KubeletLink(kubelet.plugin_folder, made.agent, made.devices)
        task = asyncio.create_task(link.run())
        try:
            for kind in kinds:
                if mig:  # none may be allocatable
                    await kubelet.until(lambda name=RESOURCE_NAMES[kind]: name in kubelet.node_status())  # type: ignore[misc]
                else:
                    await kubelet.until_allocatable(RESOURCE_NAMES[kind])
            yield made
        finally:
            await link.stop(1.0)
            await asyncio.gather(task, return_exceptions=True)
            made.device_lists.close()
            client.close()
