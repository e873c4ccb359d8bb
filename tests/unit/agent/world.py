"""A node without sockets: the kubelet's device manager calls the agent directly, so a test sees hundreds of pods a second."""

import asyncio
import selectors
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from gpumgr.common.errors import CheckpointError, KubeletError, Refusal
from gpumgr.common.units import RESOURCE_BY_NAME, RESOURCE_NAMES, RESOURCES, Amounts, Process, Resource
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.ledger.answer import ContainerResponse, HostPaths
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, Change, Ledger
from gpumgr.ledger.node import NodeDevices
from gpumgr.ledger.rebuild import KubeletEntry, Rebuilt
from gpumgr.placement.devices import NodeSnapshot
from gpumgr.placement.pods import Listing, PodKey, PodView
from gpumgr.sim.kubelet_devices import DeviceManager
from gpumgr.sim.kubelet_plugins import DeviceList
from gpumgr.sim.kubelet_pods import SimKubeletError, SimPod
from tests.component.stage.stage import Clock, MemoryAgent, MemoryCheckpoint, MemoryPods, MemoryRuntime, snapshot
from tests.listings import listing_from


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop on a test's clock: a wait for a timer sets the clock forward. On a slow machine no timer fires sooner."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(_ClockSelector(self))

    def time(self) -> float:
        return self.clock.now


class _ClockSelector(selectors.DefaultSelector):
    def __init__(self, loop: ClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self._loop.clock.now += timeout
        return super().select(timeout and 0)


class Refused(Exception):
    """The kubelet failed the pod, with this text."""


@dataclass
class LatePods(MemoryPods):
    """A pod cache that gets a pod, and the end of one, only while the agent waits for it, or when the test adds it. `too_late`: it gets no
    pod while the agent waits."""

    coming: dict[PodKey, PodView] = field(default_factory=dict)
    too_late: bool = False
    #: Changes that it does not have yet.
    ends: list[Callable[[], None]] = field(default_factory=list)

    async def wait_ended(self, uids: Collection[str], timeout_seconds: float) -> None:
        if not self.down:
            self.catch_up()
        await super().wait_ended(uids, timeout_seconds)

    def catch_up(self) -> None:
        for change in self.ends:
            change()
        self.ends.clear()

    async def wait_for(self, pod: PodKey, timeout_seconds: float, *, uid: str | None = None) -> PodView | None:
        if pod in self.coming and not self.too_late:
            self.views[pod] = self.coming.pop(pod)
        return await super().wait_for(pod, timeout_seconds, uid=uid)


@dataclass
class NotedCheckpoint(MemoryCheckpoint):
    """With the notes and entries in it, and an event for each try to write."""

    notes: dict[str, str] = field(default_factory=dict)
    entries: list[HistoryEntry] = field(default_factory=list)
    tried: asyncio.Event = field(default_factory=asyncio.Event)

    async def save(self, change: Change) -> None:
        self.tried.set()
        await super().save(change)
        self.entries += change.entries

    async def save_note(self, key: str, value: str, entries: Sequence[HistoryEntry] = ()) -> None:
        if self.full:
            raise CheckpointError("no space left on the disk of the checkpoint")
        self.notes[key] = value
        self.entries += entries


class Plugin:
    """The device manager's client of one resource, without a socket between."""

    options = SimpleNamespace(get_preferred_allocation_available=True, pre_start_required=True)

    def __init__(self, world: "World", kind: Resource) -> None:
        self._world, self._kind = world, kind

    async def prefer(self, available: Sequence[str], must_include: Sequence[str], size: int) -> set[str]:
        return set(await self._answered(self._world.agent.prefer(self._kind, available, must_include, size)))

    async def allocate(self, ids: Sequence[str]) -> bytes:
        if self._world.in_flight is not None:
            self._world.in_flight()
        self._world.answers.append(await self._answered(self._world.agent.allocate(self._kind, ids)))
        return b""

    async def pre_start(self, ids: Sequence[str]) -> None:
        await self._answered(self._world.agent.pre_start(self._kind, ids))

    async def _answered(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except Refusal as refusal:
            raise SimKubeletError(str(refusal)) from refusal


class _PodResources:
    def __init__(self, world: "World") -> None:
        self._world = world

    async def list(self) -> Listing:
        return self._world.listing()


class World(MemoryAgent):
    """The agent, its kubelet and its pods. `known`: the cache has each pod before its admission ("late": only when waited for; False:
    never)."""

    pods: LatePods
    checkpoint: NotedCheckpoint

    def __init__(
        self,
        node: NodeSnapshot | None = None,
        *,
        seed: int = 0,
        known: bool | str = True,
        ledger: Ledger | None = None,
        folder: Path = Path("/nonexistent"),
        share_mode: bool = True,
        limits: Enforcer | None = None,
        **kubelet: Any,
    ) -> None:
        self.node = node or snapshot()
        self.known = known
        self.random = Random(seed)
        self.kubelet = DeviceManager(self.random, **kubelet)
        self.kubelet.clients = {RESOURCE_NAMES[kind]: Plugin(self, kind) for kind in RESOURCES}  # type: ignore[misc]
        #: The pods with a sandbox. These pods were admitted.
        self.sandboxes: dict[str, SimPod] = {}
        super().__init__(
            LatePods(synced=known is not False),
            NotedCheckpoint(),
            MemoryRuntime(self.sandboxes.values),
            clock=Clock(),
            limits=limits,
        )
        self.wall = 1_000_000.0
        self.active: dict[str, SimPod] = {}
        #: What the kubelet does not know any more of running pods: UID -> container -> resource -> ids.
        self.forgotten: dict[str, dict[str, dict[str, frozenset[str]]]] = {}
        #: The API server shows the end of a pod only when the agent waits for it.
        self.late_ends = False
        self.folders: list[str] = []
        self.host_error: OSError | None = None
        self.no_room: Refusal | None = None
        self.room_for: list[str] = []
        self.answers: list[ContainerResponse] = []
        self.in_flight: Any = None
        self.processes: set[Process] = set()
        self.away = False
        #: Pod -> GPU on which the scheduler placed all of its containers.
        self.placed: dict[str, int] = {}
        #: So many of the next `List` calls fail.
        self.failing_lists = 0
        self.sources_ready = True
        self.lists = 0
        self._host = HostPaths(exists=lambda _path: True, allocation_dir=str(folder))
        self.share_mode, self.wall_clock = share_mode, lambda: self.wall
        self.build(ledger or Ledger(), _PodResources(self), self._host)

    async def make_room(self, allocation: Allocation) -> None:
        self.room_for.append(allocation.id)
        if self.no_room is not None:
            raise self.no_room

    def make_dir(self, path: str) -> None:
        if self.host_error is not None:
            raise self.host_error
        self.folders.append(path)

    def runs(self, process: Process) -> bool:
        return process in self.processes

    async def restart(self, *, lost: bool = False) -> Rebuilt:
        """The agent dies and starts again from its checkpoint, or without one, and asks the kubelet what it knows."""
        self.device_lists.close()
        ledger = Ledger() if lost else Ledger(self.checkpoint.gpu_registry, dict(self.checkpoint.allocations))
        self.build(ledger, _PodResources(self), self._host)
        if lost:
            self.checkpoint.allocations.clear()
        await self.agent_state.set_snapshot(self.node)
        self.device_lists.start()
        entries = [
            KubeletEntry(uid=uid, container=container, resource=RESOURCE_BY_NAME[resource], device_ids=tuple(sorted(holding.ids)))
            for uid, containers in self.kubelet.held.items()
            for container, resources in containers.items()
            for resource, holding in resources.items()
        ]
        self.random.shuffle(entries)
        return await self.reconciler.adopt(entries)

    @classmethod
    async def made(cls, node: NodeSnapshot | None = None, **options: Any) -> "World":
        world = cls(node, **options)
        await world.agent_state.set_snapshot(world.node)
        world.device_lists.start()
        return world

    # -- the kubelet's side ------------------------------------------------------------------------------------------------

    def publish(self, node_devices: NodeDevices) -> None:
        gpu_registry = self.agent_state.ledger.gpu_registry
        for kind in RESOURCES:
            devices: DeviceList = {
                text: (bool(healthy >> number & 1), frozenset() if each.numa_node is None else frozenset({each.numa_node}))
                for each in node_devices
                for healthy in [each.healthy_cores if kind == "core" else each.healthy_blocks]
                for number, text in enumerate(gpu_registry.ids[kind][each.gpu.name])
            }
            self.kubelet.update(RESOURCE_NAMES[kind], devices)

    def free_ended(self) -> None:
        if self.sources_ready:
            self.kubelet.free_ended(list(self.active))

    def forget(self) -> None:
        """The kubelet loses its checkpoint and restarts; the pods run on."""
        self.free_ended()
        for uid, containers in self.kubelet.held.items():
            for container, resources in containers.items():
                ids = {resource: holding.ids for resource, holding in resources.items()}
                self.forgotten.setdefault(uid, {})[container] = ids
        self.kubelet.held.clear()
        self.kubelet.allocated.clear()
        self.reconciler.kubelet_restarted()

    def listing(self) -> Listing:
        """PodResources `List`: active pods in random order, no ordinary init containers."""
        self.lists += 1
        if self.away or self.failing_lists:
            self.failing_lists = max(0, self.failing_lists - 1)
            raise KubeletError("no PodResources socket")
        self.free_ended()
        pods = list(self.active.values()) if self.sources_ready else []
        self.random.shuffle(pods)
        return listing_from(
            {
                (pod.namespace, pod.name): {
                    c.name: {r: sorted(h.ids) for r, h in self.kubelet.held.get(pod.uid, {}).get(c.name, {}).items()}
                    for c in pod.admission_order
                    if c.kind != "init"
                }
                for pod in pods
            }
        )

    def held(self, pod: SimPod, container: str, kind: Resource) -> frozenset[str]:
        holding = self.kubelet.held.get(pod.uid, {}).get(container, {}).get(RESOURCE_NAMES[kind])
        forgotten = self.forgotten.get(pod.uid, {}).get(container, {}).get(RESOURCE_NAMES[kind], frozenset())
        return holding.ids if holding else forgotten

    # -- pods --------------------------------------------------------------------------------------------------------------

    def view(self, pod: SimPod, phase: str = "Pending") -> PodView:
        view = super().view(pod, phase)
        gpu = self.placed.get(pod.name)
        if gpu is None:
            return view
        uuid = self.node.gpus[gpu].uuid
        return replace(view, placed=tuple((c.name, ((uuid, Amounts(c.cores, c.memory_blocks * 256)),)) for c in view.containers))

    async def admit(self, pod: SimPod) -> None:
        """Raises Refused; the pod is over then."""
        if self.known == "late":
            self.pods.coming[pod.namespace, pod.name] = self.view(pod)
        elif self.known:
            self.tell(pod)
        self.active[pod.uid] = pod
        try:
            for container in pod.admission_order:
                await self.kubelet.allocate(pod, container, self.free_ended)
        except SimKubeletError as error:
            del self.active[pod.uid]
            if self.known:
                self.pods.coming.pop((pod.namespace, pod.name), None)
                self.tell(pod, "Failed")
            raise Refused(str(error)) from error
        self.sandboxes[pod.uid] = pod
        if (pod.namespace, pod.name) in self.pods.coming:
            del self.pods.coming[pod.namespace, pod.name]
            self.tell(pod)

    async def start(self, pod: SimPod) -> None:
        """All containers start, a while after their admission. Raises SimKubeletError."""
        self.clock.now += 2
        for container in pod.admission_order:
            await self.kubelet.pre_start(pod, container)

    async def run(self, pod: SimPod) -> SimPod:
        await self.admit(pod)
        await self.start(pod)
        return pod

    def end(self, pod: SimPod, phase: str | None = "Succeeded") -> None:
        """The pod is over; `phase` None: also deleted from the API server."""
        self.active.pop(pod.uid, None)
        self.sandboxes.pop(pod.uid, None)
        self.forgotten.pop(pod.uid, None)
        self.pods.coming.pop((pod.namespace, pod.name), None)
        self.pods.ends.append(partial(self._show_end, pod, phase))
        if not (self.late_ends or self.pods.down):
            self.pods.catch_up()

    def _show_end(self, pod: SimPod, phase: str | None) -> None:
        key = (pod.namespace, pod.name)
        if key in self.pods.views and self.pods.views[key].uid == pod.uid:
            if phase is None:
                del self.pods.views[key]
            else:
                self.tell(pod, phase)

    async def sweep(self, seconds: float = 1.0, *, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += seconds
            assert await self.reconciler.sweep()

    # -- what must hold ----------------------------------------------------------------------------------------------------

    def mine(self, pod: SimPod, container: str, kind: Resource) -> list[Allocation]:
        found = self.agent_state.ledger.of((pod.namespace, pod.name), pod.uid)
        return [a for a in found if a.container == container and a.held(kind)]

    def check_ids(self) -> None:
        """The ids that the kubelet has given to live pods are held in the ledger, and no two live pods have one in common."""
        ledger = self.ledger
        for kind in RESOURCES:
            held = set(ledger.gpu_registry.format(kind, ledger.held(kind)))
            owner: dict[str, str] = {}
            for pod in self.active.values():
                for container in pod.containers:
                    for text in self.held(pod, container.name, kind):
                        assert text in held, f"{text} of {pod.name} is not in the ledger"
                        assert owner.setdefault(text, pod.uid) == pod.uid, f"{text} is held twice"

    def check_names(self) -> None:
        """Every live container's ids stand under its name, in one allocation."""
        ledger = self.ledger
        for pod in self.active.values():
            for container in pod.containers:
                if container.kind == "init" and self.known is not True:
                    continue
                allocations = set()
                for kind in RESOURCES:
                    ids = self.held(pod, container.name, kind)
                    mine = self.mine(pod, container.name, kind)
                    allocations |= {a.id for a in mine}
                    texts = [set(ledger.gpu_registry.format(kind, a.held(kind))) for a in mine]
                    if self.known is True:
                        assert texts == ([set(ids)] if ids else []), (pod.name, container.name, kind)
                    else:
                        # An earlier life of the name may not be swept yet. What the kubelet forgot before any `List` has no name.
                        nameless = [a for a in ledger.allocations.values() if a.pod is None and pod.uid in self.forgotten]
                        texts += [set(ledger.gpu_registry.format(kind, a.held(kind))) for a in nameless]
                        assert not ids or set(ids) in texts, (pod.name, container.name, kind)
                assert len(allocations) <= 1 or self.known is not True

    def check_places(self) -> None:
        """What a container was given lies together."""
        ledger = self.ledger
        for a in ledger.allocations.values():
            if a.held("core") and a.held("memory") and not a.whole and not a.anonymous:
                assert set(a.gpus) <= set(a.held("core")) | set(a.held("memory"))
        for pod in self.active.values():
            if any(c.kind == "init" for c in pod.containers):
                continue
            for c in pod.containers:
                places = {kind: set(ledger.gpu_registry.known(kind, self.held(pod, c.name, kind))) for kind in RESOURCES}
                if c.cores and c.memory_blocks:
                    assert places["memory"] <= places["core"], (pod.name, places)
                assert len(places["core"]) == -(-c.cores // 100), (pod.name, places)


def played(scenario: Callable[[World], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Runs the scenario in an event loop on the clock of its world: waits take no time."""
    loop = ClockLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        world = runner.run(World.made(**options))
        loop.clock = world.clock
        runner.run(scenario(world))
