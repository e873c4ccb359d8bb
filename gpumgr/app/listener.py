"""Carries the nvml station's news to the agent and to the metrics."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

import structlog

from gpumgr.agent.books import Books
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ids import Cards
from gpumgr.nvml.health import GpuHealth
from gpumgr.proc import HostProcesses
from gpumgr.topology.devices import NodeSample, NodeSnapshot

log = structlog.get_logger(__name__)

#: Reasons for which a GPU takes nothing new but goes on working for those who are on it.
CLOSING_REASONS = frozenset({"mig", "operator"})
#: Reasons for which the history calls a GPU lost, and not just unhealthy.
LOST_REASONS = frozenset({"lost", "missing"})
#: What the history tells of a GPU by itself; an operator's orders are told with them.
HEALTH_CODES = frozenset({"lost", "unhealthy", "back"})


class News:
    """Implements nvml.monitor.NodeListener. `device_root` None: device nodes are not looked at (a simulated node has none).

    `before_snapshot` is awaited before GPUs of a snapshot are offered; `on_processes` hears of each sample with the start times of
    its processes (pid -> clock ticks since boot).
    """

    def __init__(
        self,
        books: Books,
        processes: HostProcesses,
        *,
        device_root: str | None,
        before_snapshot: Callable[[NodeSnapshot], Awaitable[None]],
        on_processes: Callable[[NodeSample, Mapping[int, int]], Awaitable[None]],
        on_sample: Callable[[NodeSample | None], None],
    ) -> None:
        self._books, self._processes, self._device_root = books, processes, device_root
        self._before_snapshot, self._on_processes, self._on_sample = before_snapshot, on_processes, on_sample
        #: Set once the driver was heard of for the first time, be it only that it is not there.
        self.known = asyncio.Event()
        self._health: Mapping[str, GpuHealth] = {}
        self._nodeless: Mapping[str, str] = {}
        #: Code of what the history was told last of each GPU that is not well; None: it has not been asked for what was before us.
        self._told: dict[str, str] | None = None
        #: Indices of those that it was told of and that have no name; None: this life has not looked yet.
        self._nameless: frozenset[int] | None = None
        self.down_because: str | None = None

    async def snapshot_taken(self, snapshot: NodeSnapshot) -> None:
        self.down_because = None
        await self._before_snapshot(snapshot)
        await self._books.set_snapshot(snapshot)
        self._look_at_nodes()
        await self._tell()
        self._tell_nameless()
        self._on_sample(NodeSample())
        self.known.set()

    async def health_changed(self, health: Mapping[str, GpuHealth]) -> None:
        self._health = health
        await self._tell()

    async def sample_taken(self, sample: NodeSample) -> None:
        before = self._nodeless
        self._look_at_nodes()
        if self._nodeless != before:
            await self._tell()
        pids = {p.pid for gpu in sample.gpus.values() for p in gpu.processes or ()}
        started = await asyncio.to_thread(self._processes.start_times, pids) if pids else {}
        await self._books.set_sample(sample, started)
        self._on_sample(sample)
        await self._on_processes(sample, started)

    async def driver_down(self, message: str) -> None:
        self.down_because = message
        self._on_sample(None)
        self.known.set()

    async def _tell(self) -> None:
        held = {uuid: health.held for uuid, health in self._health.items() if health.held is not None}
        bad = {uuid: health for uuid, health in self._health.items() if not health.well}
        failed = {uuid: _why(health) for uuid, health in bad.items() if health.reason not in CLOSING_REASONS}
        closed = {uuid: _why(health) for uuid, health in bad.items() if health.reason in CLOSING_REASONS}
        await self._books.set_fitness(failed={**self._nodeless, **failed}, closed={**closed, **held})
        self._tell_history(bad, held)

    def _tell_history(self, bad: Mapping[str, GpuHealth], held: Collection[str]) -> None:
        """Which GPUs are lost, unhealthy and back, once each. What an operator does with one he tells himself, MIG is a setting of
        his, and one that he holds is not back before he releases it. A GPU that was never offered has no name to tell yet."""
        books = self._books
        if self._told is None:
            self._told = _told_before(books.history.entries(), books.ledger.cards)
        shown = {gpu.uuid for gpu in books.inventory.snapshot.gpus}
        for uuid, card in books.ledger.cards.by_uuid.items():
            health, before = bad.get(uuid), self._told.get(uuid)
            if health is not None and health.reason in CLOSING_REASONS:
                continue
            if health is not None:
                code, why = "lost" if health.reason in LOST_REASONS else "unhealthy", _why(health)
            elif uuid in self._nodeless:
                code, why = "unhealthy", self._nodeless[uuid]
            elif uuid in held:
                continue
            elif before is not None and uuid in shown:  # of one that the driver has not shown since our start nobody knows
                code, why = "back", "it is well again and takes pods"
            else:
                continue
            if code != before:
                books.history.add(Entry(at=books.history.now(), what="gpu", code=code, gpus=(card.name,), why=why))
            if code == "back":
                del self._told[uuid]
            else:
                self._told[uuid] = code

    def _tell_nameless(self) -> None:
        """Which GPUs can't be described and were none that we know, once each: after a restart not again."""
        history = self._books.history
        tell = history.add_news if self._nameless is None else history.add
        nameless = {failure.index: failure for failure in self._books.inventory.unnamed(self._books.ledger.cards)}
        for index in sorted(nameless.keys() - (self._nameless or ())):
            tell(Entry(at=history.now(), what="gpu", code="not_readable", why=nameless[index].sentence))
        self._nameless = frozenset(nameless)

    def _look_at_nodes(self) -> None:
        """A GPU without its device node can't be given to a container, whatever NVML says of it."""
        if self._device_root is None:
            return
        missing = {}
        for gpu in self._books.inventory.snapshot.gpus:
            path = f"{self._device_root}/nvidia{gpu.minor}"
            if gpu.minor is not None and not os.path.exists(path):
                missing[gpu.uuid] = (
                    f"its device node {path} is missing: run `nvidia-modprobe -c {gpu.minor}` or restart nvidia-persistenced"
                )
        for uuid in missing.keys() - self._nodeless.keys():
            log.warning("device_node_missing", gpu=uuid, reason=missing[uuid])
        for uuid in self._nodeless.keys() - missing.keys():
            log.info("device_node_back", gpu=uuid)
        self._nodeless = missing


def _told_before(entries: Iterable[Entry], cards: Cards) -> dict[str, str]:
    """After a restart: how the GPUs that were not well were told of, by UUID."""
    last = {gpu: entry.code for entry in entries if entry.what == "gpu" and entry.code in HEALTH_CODES for gpu in entry.gpus}
    return {card.uuid: code for card in cards.cards if (code := last.get(card.name)) is not None and code != "back"}


def _why(health: GpuHealth) -> str:
    """What people are told; a GPU that answers again is watched for a while before it is offered."""
    why = health.message or str(health.reason)
    return f"recovering, was: {why}" if health.state == "probation" else why
