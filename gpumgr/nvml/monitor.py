"""Owns NVML for the agent's whole life: waits for the driver, samples, judges health, survives hangs and reloads.

1. Without a driver it waits (it may be installed later) and says so once, not at every try.
2. What one GPU answers concerns that GPU. Only when NVML as a whole is down are all GPUs unhealthy, until it is back.
3. A GPU that was seen once is never forgotten: if it is no longer listed it is missing, and healthy again when it returns.
4. While the driver is let go for somebody else's sake, nobody looks and nobody's health changes: that is no outage.
5. Weather is retried here. DriverMismatchError alone leaves `run`: no library can be loaded twice in a process, so it must end.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NoReturn, Protocol

import structlog

from gpumgr.errors import NvmlAbsent, NvmlError
from gpumgr.nvml.binding import DriverMismatchError
from gpumgr.nvml.driver import Nvml
from gpumgr.nvml.health import (
    DoubleBitError,
    Failed,
    GpuHealth,
    HealthRules,
    Held,
    Looked,
    Observation,
    Released,
    Xid,
    new_health,
    step,
)
from gpumgr.nvml.modules import load_modules
from gpumgr.topology.devices import GpuProcess, NodeSample, NodeSnapshot

log = structlog.get_logger()


class NodeListener(Protocol):
    """Who wants to know. The monitor waits for each of these before it goes on."""

    async def snapshot_taken(self, snapshot: NodeSnapshot) -> None:
        """The node's GPUs, at first and whenever they may have changed. Their health was told before; so was, and will be, that of
        GPUs of before which the snapshot lacks."""

    async def health_changed(self, health: Mapping[str, GpuHealth]) -> None:
        """Every GPU's health by UUID, whenever a state, a reason or its message changed; newcomers' before their snapshot."""

    async def sample_taken(self, sample: NodeSample) -> None:
        """One round, each period."""

    async def driver_down(self, message: str) -> None:
        """NVML does not answer as a whole; told once for each outage. The next `snapshot_taken` ends it."""


class Monitor:
    """`run` it as one task. The other methods are for the same event loop."""

    def __init__(
        self,
        nvml: Nvml,
        listener: NodeListener,
        *,
        rules: HealthRules | None = None,
        sample_period_seconds: float = 5.0,
        retry_seconds: tuple[float, float] = (1.0, 60.0),
        load_kernel_modules: bool = False,
        load: Callable[[], Awaitable[bool]] = load_modules,
        clock: Callable[[], float] = time.time,
        on_xid: Callable[[str | None, int], None] = lambda *_: None,
        on_batch: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`retry_seconds`: the first and the longest pause between two tries to reach the driver; it doubles from one to the other.

        `on_xid` hears of every XID (UUID, None if the driver names no GPU), `on_batch` how many seconds a sample took.
        """
        #: Whether samples tell how busy each process keeps its GPU. May be switched at any time; from the next sample on.
        self.watch_processes = False
        self._nvml = nvml
        self._listener = listener
        #: May be changed at any time, too: from the next look on.
        self.rules = rules or HealthRules()
        self._sample_period_seconds = sample_period_seconds
        self._retry_seconds = retry_seconds
        self._load = load if load_kernel_modules else None
        self._clock = clock
        self._on_xid, self._on_batch = on_xid, on_batch
        self._health: dict[str, GpuHealth] = {}
        self._told: dict[str, GpuHealth] = {}
        self._snapshot: NodeSnapshot | None = None
        self._held: dict[str, str] = {}
        self._down = False
        self._stale = False
        self._wake = asyncio.Event()

    @property
    def health(self) -> Mapping[str, GpuHealth]:
        """Every GPU ever seen, by UUID."""
        return dict(self._health)

    @property
    def sample_period_seconds(self) -> float:
        """May be changed at any time; the pause under way is then as long, from its beginning on."""
        return self._sample_period_seconds

    @sample_period_seconds.setter
    def sample_period_seconds(self, seconds: float) -> None:
        self._sample_period_seconds = seconds
        self._wake.set()

    def hold(self, uuid: str, message: str) -> None:
        """An operator takes this GPU out of service, also one that is not there (yet)."""
        self._held[uuid] = message
        self._observe(uuid, Held(message=message))
        self._wake.set()

    def release(self, uuid: str) -> None:
        """An operator gives it back; it is offered after the usual probation."""
        self._held.pop(uuid, None)
        self._observe(uuid, Released())
        self._wake.set()

    async def tell_health(self) -> None:
        """Tells the listener if anybody's health differs from what it knows. When this returns, what was held before is closed."""
        if any(_shown(self._told.get(uuid)) != _shown(health) for uuid, health in self._health.items()):
            self._log_changes()
            self._told = dict(self._health)
            await self._listener.health_changed(self.health)

    async def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """Who has a context on the GPU at this moment; None if the driver does not list them, or the GPU answers with an error.
        Raises NvmlError if the driver as a whole does not answer."""
        return await self._nvml.processes(uuid)

    @asynccontextmanager
    async def let_go(self) -> AsyncIterator[None]:
        """While this is entered, this process has no session with the driver; samples and looks wait, and everybody's health stays.

        What the driver would have reported meanwhile is not heard; the first look afterwards finds what came of it. Raises NvmlError
        if a call hangs, and then the driver was not let go.
        """
        try:
            async with self._nvml.let_go():
                yield
        finally:
            self._stale = True  # in any case nobody waits for events any more

    async def run(self) -> NoReturn:
        """Until cancelled. Raises DriverMismatchError; closes NVML in any case."""
        try:
            while True:
                await self._reach_driver()
                try:
                    await self._watch()
                except DriverMismatchError:
                    raise
                except NvmlError as exc:
                    await self._fall(str(exc))
        finally:
            try:
                await self._nvml.close()
            except NvmlError as exc:
                log.warning("nvml_close_failed", reason=str(exc))

    # -- without a driver ------------------------------------------------------------------------------------------------

    async def _reach_driver(self) -> None:
        pause, longest = self._retry_seconds
        told = ""
        while True:
            try:
                await self._nvml.open()
                return
            except DriverMismatchError:
                raise
            except NvmlError as exc:
                message = str(exc)
                absent = isinstance(exc, NvmlAbsent)
            if not told:
                await self._fall(message)
                if absent and self._load is not None:
                    await self._load()
            told = message
            await self._nvml.rest(pause)
            pause = min(pause * 2, longest)

    async def _fall(self, message: str) -> None:
        """NVML as a whole is down. Says so once for each outage."""
        first, self._down = not self._down, True
        for uuid in self._health:
            self._observe(uuid, Failed(reason="nvml_down", message=message))
        if first:
            log.warning("nvml_down", reason=message, gpus=len(self._health))
            await self._listener.driver_down(message)
        await self.tell_health()

    # -- with one --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> NoReturn:
        snapshot = await self._take_snapshot()
        while True:
            await self._nvml.at_hand()
            begun = time.perf_counter()
            sample = await self._nvml.sample(utilization=self.watch_processes)
            self._on_batch(time.perf_counter() - begun)
            await self._listener.sample_taken(sample)
            await self._pause()
            looks = await self._nvml.look()
            readable = {gpu.uuid for gpu in snapshot.gpus}
            if self._stale or any(isinstance(look, Looked) and uuid not in readable for uuid, look in looks.items()):
                snapshot = await self._take_snapshot()
            else:
                self._judge(looks)
                await self.tell_health()

    async def _take_snapshot(self) -> NodeSnapshot:
        self._stale = False
        snapshot = await self._nvml.snapshot()
        failed = {failure.uuid for failure in snapshot.failures if failure.uuid is not None}
        readable = {gpu.uuid for gpu in snapshot.gpus}
        for uuid in sorted((readable | failed) - self._health.keys()):
            self._health[uuid] = new_health(self._clock())
            if uuid in self._held:
                self._observe(uuid, Held(message=self._held[uuid]))
        unmonitored = await self._nvml.watch_events(self._on_event)
        self._judge(await self._nvml.look())
        if self._down or snapshot != self._snapshot:
            log.info("gpus_found", gpus=len(snapshot.gpus), driver=snapshot.driver_version, without_events=sorted(unmonitored))
            for failure in snapshot.failures:
                log.warning("gpu_not_readable", index=failure.index, gpu=failure.uuid, reason=failure.reason)
        self._down = False
        self._snapshot = snapshot
        await self.tell_health()
        await self._listener.snapshot_taken(snapshot)
        return snapshot

    def _judge(self, looks: Mapping[str, Observation]) -> None:
        missing = Failed(reason="missing", message="the driver no longer lists this GPU")
        for uuid in self._health:
            self._observe(uuid, looks.get(uuid, missing))

    async def _pause(self) -> None:
        """Until the next round is due; what an event or an operator brings is told at once."""
        begun = asyncio.get_running_loop().time()
        while True:
            try:
                async with asyncio.timeout_at(begun + self._sample_period_seconds):
                    await self._wake.wait()
            except TimeoutError:
                return
            self._wake.clear()
            await self.tell_health()

    def _on_event(self, uuid: str | None, event: Xid | DoubleBitError) -> None:
        """From the driver. An event that names no GPU concerns them all, as the driver can't tell which is hit."""
        for name in [uuid] if uuid is not None else list(self._health):
            self._observe(name, event)
        if isinstance(event, Xid):
            self._on_xid(uuid, event.number)
        log.warning("gpu_event", gpu=uuid, xid=event.number if isinstance(event, Xid) else None)
        self._wake.set()

    def _observe(self, uuid: str, observation: Observation) -> None:
        health = self._health.get(uuid)
        if health is not None:
            self._health[uuid] = step(health, observation, self._clock(), self.rules)

    def _log_changes(self) -> None:
        """A line for each GPU whose state or reason differs from what was told; none for one that is new and well."""
        for uuid, health in self._health.items():
            before = self._told.get(uuid)
            if _shown(before) != _shown(health) and (before is not None or not health.offered):
                tell = log.info if health.offered else log.warning
                tell(
                    "gpu_health_changed",
                    gpu=uuid,
                    state="held" if health.well and health.held is not None else health.state,
                    reason=health.word,
                    message="; ".join(filter(None, (health.held, health.message))),
                )


def _shown(health: GpuHealth | None) -> tuple[str | None, ...]:
    return () if health is None else (health.state, health.reason, health.message, health.held)
