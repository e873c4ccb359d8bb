"""Passes snapshots, samples and health of the GPUs from the driver to the agent's state and history."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

import structlog
from msgspec.structs import replace

from gpumgr.agent.inventory import HardwareHealth
from gpumgr.agent.state import AgentState
from gpumgr.common.proc import HostProcesses
from gpumgr.driver.health import GpuHealth
from gpumgr.ledger.answer import WSL_NODE
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.instances import obstacle_of_single
from gpumgr.placement.devices import NodeSample, NodeSnapshot

log = structlog.get_logger(__name__)

#: Reasons for which a GPU takes no new containers, while running ones continue.
CLOSING_REASONS = frozenset({"mig", "operator"})
#: Reasons for which the history calls a GPU lost instead of unhealthy.
LOST_REASONS = frozenset({"lost", "missing"})
#: Codes of history entries about a GPU's health; gpumgr.agent.maintenance adds the entries of maintenance.
HEALTH_CODES = frozenset({"lost", "unhealthy", "back"})


class HardwareEvents:
    """Implements driver.monitor.NodeListener.

    `device_root`: the folder of device nodes. `simulated`: the GPUs need no device nodes. `before_snapshot` is awaited before the GPUs of a
    snapshot are offered. `on_sample` is awaited after each sample, with the start times of its processes (pid -> clock ticks since boot).
    `own_pids` is called on a thread with these start times. It returns the pids of gpumgr's own processes, which are left out of the
    sample.
    """

    def __init__(
        self,
        agent_state: AgentState,
        processes: HostProcesses,
        *,
        device_root: str,
        simulated: bool,
        before_snapshot: Callable[[NodeSnapshot], Awaitable[None]],
        on_sample: Callable[[NodeSample, Mapping[int, int]], Awaitable[None]],
        own_pids: Callable[[Mapping[int, int]], Collection[int]] = lambda _: (),
    ) -> None:
        self._agent_state, self._processes, self._device_root = agent_state, processes, device_root
        self._simulated = simulated
        self._before_snapshot, self._on_sample, self._own_pids = before_snapshot, on_sample, own_pids
        #: Set at the driver's first answer or error.
        self.known = asyncio.Event()
        #: Set when a sample was evaluated.
        self.sampled = asyncio.Event()
        #: Whether the driver answers, and why not.
        self.driver_up = False
        self.down_reason: str | None = None
        #: The latest sample, and its time in monotonic seconds.
        self.sample: NodeSample | None = None
        self.sampled_at: float | None = None
        self._health: Mapping[str, GpuHealth] = {}
        #: UUID of a GPU without a device node -> the reason for its fault.
        self._without_device_node: Mapping[str, str] = {}
        #: UUID -> code of an unhealthy GPU's latest history entry; None: the history has not been read yet.
        self._reported: dict[str, str] | None = None
        #: Indices of the unregistered GPUs that the driver can't describe; None before the first check.
        self._not_readable: frozenset[int] | None = None
        #: Why MIG devices can't be offered, as last logged.
        self._mig_obstacle: str | None = None

    async def snapshot_taken(self, snapshot: NodeSnapshot) -> None:
        self.down_reason = None
        await self._before_snapshot(snapshot)
        self._check_device_nodes(snapshot)
        await self._agent_state.set_snapshot(snapshot, self._hardware_health())
        self._add_to_history()
        self._report_not_readable()
        self._report_obstacle()
        self._keep(NodeSample())
        self.known.set()

    async def health_changed(self, health: Mapping[str, GpuHealth]) -> None:
        self._health = health
        await self._publish_health()

    async def sample_taken(self, sample: NodeSample) -> None:
        before = self._without_device_node
        self._check_device_nodes(self._agent_state.inventory.snapshot)
        if self._without_device_node != before:
            await self._publish_health()
        pids = {p.pid for gpu in sample.gpus.values() for p in gpu.processes or ()}
        started, own = await asyncio.to_thread(self._look_up, pids) if pids else ({}, frozenset())
        if own:
            sample = _without(sample, own)
        await self._agent_state.set_sample(sample, started)
        self._keep(sample)
        await self._on_sample(sample, started)
        self.sampled.set()

    def _look_up(self, pids: Collection[int]) -> tuple[Mapping[int, int], frozenset[int]]:
        started = self._processes.start_times(pids)
        return started, frozenset(self._own_pids(started))

    async def driver_down(self, message: str) -> None:
        self.driver_up, self.down_reason = False, message
        self.known.set()

    def _keep(self, sample: NodeSample) -> None:
        self.driver_up, self.sample, self.sampled_at = True, sample, time.monotonic()

    async def _publish_health(self) -> None:
        await self._agent_state.set_health(self._hardware_health())
        self._add_to_history()

    def _hardware_health(self) -> HardwareHealth:
        bad = {uuid: health for uuid, health in self._health.items() if not health.healthy}
        by_operator = {uuid: each.cordon_reason for uuid, each in self._health.items() if each.cordon_reason is not None}
        failed = {uuid: _why(health) for uuid, health in bad.items() if health.reason not in CLOSING_REASONS}
        cordoned = {uuid: _why(health) for uuid, health in bad.items() if health.reason in CLOSING_REASONS}
        in_mig_mode = {uuid for uuid, health in bad.items() if health.reason == "mig"} - by_operator.keys()
        return HardwareHealth(
            failed={**self._without_device_node, **failed},
            cordoned={**cordoned, **by_operator},
            in_mig_mode=in_mig_mode,
            lost={uuid for uuid, health in bad.items() if health.reason in LOST_REASONS and health.state == "unhealthy"},
        )

    def _add_to_history(self) -> None:
        """Adds an entry when a GPU of the ledger's registry becomes lost or unhealthy, or is back.

        MIG mode is a setting and gets no entry. gpumgr.agent.maintenance adds the entries about cordons. A GPU that recovers while it is
        cordoned gets the entry "back" only after it is uncordoned.
        """
        agent_state = self._agent_state
        if self._reported is None:
            self._reported = _reported_before(agent_state.history.entries(), agent_state.ledger.gpu_registry)
        shown = {gpu.uuid for gpu in agent_state.inventory.snapshot.gpus}
        for uuid, registered in agent_state.ledger.gpu_registry.by_uuid.items():
            health, before = self._health.get(uuid), self._reported.get(uuid)
            if health is not None and not health.healthy:
                if health.reason in CLOSING_REASONS:
                    continue
                code, why = "lost" if health.reason in LOST_REASONS else "unhealthy", _why(health)
            elif uuid in self._without_device_node:
                code, why = "unhealthy", self._without_device_node[uuid]
            elif health is not None and health.cordon_reason is not None:
                continue
            elif before is not None and uuid in shown:  # after a restart, a GPU that is not listed has no known health
                code, why = "back", "it is healthy again and takes pods"
            else:
                continue
            if code != before:
                agent_state.history.add(HistoryEntry(what="gpu", code=code, gpus=(registered.name,), why=why))
            if code == "back":
                del self._reported[uuid]
            else:
                self._reported[uuid] = code

    def _report_not_readable(self) -> None:
        """Adds one entry for each unregistered GPU that the driver can't describe. A restart adds no second entry."""
        history = self._agent_state.history
        add = history.add_unless_repeated if self._not_readable is None else history.add
        unreadable = {
            failure.index: failure for failure in self._agent_state.inventory.unnamed(self._agent_state.ledger.gpu_registry)
        }
        for index in sorted(unreadable.keys() - (self._not_readable or ())):
            add(HistoryEntry(what="gpu", code="not_readable", why=unreadable[index].sentence))
        self._not_readable = frozenset(unreadable)

    def _report_obstacle(self) -> None:
        inventory, before = self._agent_state.inventory, self._mig_obstacle
        self._mig_obstacle = obstacle_of_single(inventory.snapshot.gpus) if inventory.mig_strategy == "single" else None
        if self._mig_obstacle and self._mig_obstacle != before:
            log.error("mig_devices_not_offered", mig_strategy="single", reason=self._mig_obstacle)

    def _check_device_nodes(self, snapshot: NodeSnapshot) -> None:
        """Finds GPUs without a device node, which containers can't use even if NVML reports them as healthy."""
        missing = {}
        for gpu in snapshot.gpus:
            path = f"{self._device_root}/{WSL_NODE if gpu.minor is None else f'nvidia{gpu.minor}'}"
            if (self._simulated and gpu.minor is not None) or os.path.exists(path):
                continue
            missing[gpu.uuid] = (
                f"the driver reports no minor number for it, and {path}, the device node of WSL2's GPUs, does not exist"
                if gpu.minor is None
                else f"its device node {path} is missing: run `nvidia-modprobe -c {gpu.minor}` or restart nvidia-persistenced"
            )
        for uuid in missing.keys() - self._without_device_node.keys():
            log.warning("device_node_missing", gpu=uuid, reason=missing[uuid])
        for uuid in self._without_device_node.keys() - missing.keys():
            log.info("device_node_back", gpu=uuid)
        self._without_device_node = missing


def _reported_before(entries: Iterable[HistoryEntry], gpu_registry: GpuRegistry) -> dict[str, str]:
    """UUID -> code of the latest entry, of GPUs that were unhealthy before the restart."""
    last = {gpu: entry.code for entry in entries if entry.what == "gpu" and entry.code in HEALTH_CODES for gpu in entry.gpus}
    return {
        registered.uuid: code
        for registered in gpu_registry.gpus
        if (code := last.get(registered.name)) is not None and code != "back"
    }


def _without(sample: NodeSample, pids: Collection[int]) -> NodeSample:
    gpus = {
        uuid: gpu if gpu.processes is None else replace(gpu, processes=tuple(p for p in gpu.processes if p.pid not in pids))
        for uuid, gpu in sample.gpus.items()
    }
    return replace(sample, gpus=gpus)


def _why(health: GpuHealth) -> str:
    why = health.message or str(health.reason)
    return f"recovering, was: {why}" if health.state == "probation" else why
