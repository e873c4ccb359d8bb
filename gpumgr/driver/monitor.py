"""The loop that reads the GPUs through NVML: waits for the driver, takes samples, and determines the health.

Invariants:
* Without a driver the monitor waits, since one may be installed later, and logs the outage once.
* An error of one GPU affects only that GPU. All GPUs are unhealthy only while NVML as a whole is down.
* While NVML lists no GPU, or fewer than sysfs has, the session is opened again from time to time.
* A GPU that was listed once stays known, as unhealthy ("missing") while it is not listed.
* While the session is closed for another program, nothing is read and no health changes.
* `run` raises only DriverMismatchError: a process can't load the library twice, so the agent must end.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NoReturn, Protocol

import structlog
from msgspec.structs import replace

from gpumgr.common.aio import next_tick
from gpumgr.common.errors import NvmlAbsent, NvmlError
from gpumgr.driver.binding import DriverMismatchError
from gpumgr.driver.driver import Nvml
from gpumgr.driver.health import (
    DoubleBitError,
    Failed,
    GpuHealth,
    HealthReading,
    HealthRules,
    Observation,
    Xid,
    new_health,
    step,
    step_mig_devices,
    uncordoned,
)
from gpumgr.placement.devices import GpuProcess, NodeSample, NodeSnapshot, Topology

log = structlog.get_logger()

#: The longest sample period while a caller waits for a sample.
_AWAITED_PERIOD_SECONDS: Final = 1.0


class NodeListener(Protocol):
    """Receives what the monitor reads. The monitor waits for the end of each call."""

    async def snapshot_taken(self, snapshot: NodeSnapshot) -> None:
        """Called at the start, and whenever the node's GPUs may have changed. `health_changed` was called before with their health."""

    async def health_changed(self, health: Mapping[str, GpuHealth]) -> None:
        """Called when a state, reason, message or cordon has changed. `health`: UUID -> health of all GPUs, even if the last snapshot lacks
        them, and of each MIG device with a fault of its own."""

    async def sample_taken(self, sample: NodeSample) -> None:
        """Called once in each sample period."""

    async def driver_down(self, message: str) -> None:
        """Called once for each outage of NVML as a whole. The next `snapshot_taken` ends the outage."""


class DriverMeter(Protocol):
    def xid(self, uuid: str | None, number: int) -> None:
        """`uuid` None: the event names no GPU."""

    def batched(self, seconds: float) -> None:
        """A reading of all GPUs took this long."""


class Monitor:
    """`run` it as one task, and call the other methods in the same event loop."""

    def __init__(
        self,
        nvml: Nvml,
        listener: NodeListener,
        *,
        rules: HealthRules | None = None,
        sample_period_seconds: float = 5.0,
        retry_seconds: tuple[float, float] = (1.0, 60.0),
        load_kernel_modules: Callable[[], Awaitable[bool]] | None = None,
        meter: DriverMeter | None = None,
        process_utilization: Callable[[], bool] = lambda: False,
    ) -> None:
        """`retry_seconds`: the first and the longest pause between two attempts to reach the driver or missing GPUs; the pause doubles.
        `load_kernel_modules` is called once for each outage without a driver. `process_utilization` returns whether the next sample
        contains the utilization of each process.
        """
        self._process_utilization = process_utilization
        self._nvml = nvml
        self._listener = listener
        self._rules = rules or HealthRules()
        self._sample_period_seconds = sample_period_seconds
        self._retry_seconds = retry_seconds
        self._load_kernel_modules = load_kernel_modules
        self._meter = meter
        self._health: dict[str, GpuHealth] = {}
        #: MIG devices with a fault of their own.
        self._mig_health: dict[str, GpuHealth] = {}
        self._published: dict[str, GpuHealth] = {}
        self._snapshot = NodeSnapshot(gpus=(), topology=Topology((), ()))
        self._cordons: dict[str, str] = {}
        #: The GPUs with a hanging call at the last reading.
        self._hung: frozenset[str] = frozenset()
        #: When the session may be opened again because GPUs are missing, and the pause after that attempt.
        self._relist_at, self._relist_seconds = float("-inf"), retry_seconds[0]
        self._down = False
        #: A new snapshot is due.
        self._stale = False
        self._wake = asyncio.Event()
        #: The number of callers that wait for samples.
        self._awaited = 0

    @property
    def health(self) -> dict[str, GpuHealth]:
        """UUID -> health of every GPU that was ever listed, and of each MIG device with a fault of its own."""
        return {**self._health, **self._mig_health}

    def apply(self, *, rules: HealthRules, sample_period_seconds: float) -> None:
        """The rules apply from the next reading on. The period applies at once, even to a wait that has begun."""
        self._rules, self._sample_period_seconds = rules, sample_period_seconds
        self._wake.set()

    @contextmanager
    def sampling_soon(self) -> Iterator[None]:
        """A context manager: in its block the period is at most one second."""
        self._awaited += 1
        if self._sample_period_seconds > _AWAITED_PERIOD_SECONDS:
            self._wake.set()
        try:
            yield
        finally:
            self._awaited -= 1

    def cordon(self, uuid: str, message: str) -> None:
        self._cordons[uuid] = message
        if uuid in self._health:
            self._health[uuid] = replace(self._health[uuid], cordon_reason=message)
        self._wake.set()

    def uncordon(self, uuid: str) -> None:
        self._cordons.pop(uuid, None)
        if uuid in self._health:
            self._health[uuid] = uncordoned(self._health[uuid], time.time())
        self._wake.set()

    async def publish_health(self) -> None:
        """Calls the listener if a health has changed. When it returns, cordons are in force."""
        before, health = self._published, self.health
        changed = [
            uuid for uuid in {**before, **health} if _published_parts(before.get(uuid)) != _published_parts(health.get(uuid))
        ]
        if changed:
            for uuid in changed:
                # A MIG device without a fault is not in `health`.
                _log_change(uuid, before.get(uuid), health.get(uuid) or new_health(time.time()))
            self._published = health
            await self._listener.health_changed(health)

    async def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """Like `Nvml.processes`. Raises NvmlError if the driver as a whole does not answer."""
        return await self._nvml.processes(uuid)

    @asynccontextmanager
    async def without_session(self) -> AsyncIterator[None]:
        """Like `Session.without_session`. In the block readings wait, no health changes, and events are lost. The next reading shows the
        effect of lost events."""
        try:
            async with self._nvml.without_session():
                yield
        finally:
            self._stale = True  # events have to be registered again

    async def run(self) -> NoReturn:
        """Runs until cancelled; uses a session that is already open. Raises DriverMismatchError. The caller closes NVML."""
        if not self._nvml.opened:
            await self._reach_driver()
        while True:
            try:
                await self._watch()
            except DriverMismatchError:
                raise
            except NvmlError as exc:
                await self._mark_down(str(exc))
            await self._reach_driver()

    async def _reach_driver(self) -> None:
        pause, longest = self._retry_seconds
        logged = False
        while True:
            try:
                await self._nvml.open()
                return
            except DriverMismatchError:
                raise
            except NvmlError as exc:
                if not logged:
                    await self._mark_down(str(exc))
                    if isinstance(exc, NvmlAbsent) and self._load_kernel_modules is not None:
                        await self._load_kernel_modules()
            logged = True
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)

    async def _mark_down(self, message: str) -> None:
        first, self._down = not self._down, True
        for uuid in self._health:
            self._observe(uuid, Failed(reason="nvml_down", message=message))
        if first:
            log.warning("nvml_down", reason=message, gpus=len(self._health))
            await self._listener.driver_down(message)
        await self.publish_health()

    async def _watch(self) -> NoReturn:
        await self._take_snapshot()
        while True:
            await self._nvml.wait_for_session()
            begun = time.perf_counter()
            reading = await self._nvml.read(utilization=self._process_utilization())
            if self._meter is not None:
                self._meter.batched(time.perf_counter() - begun)
            readings = reading.health
            instances = {gpu.uuid: {each.uuid for each in gpu.mig_instances} for gpu in self._snapshot.gpus}
            answered = {uuid: each for uuid, each in readings.items() if isinstance(each, HealthReading)}
            back = self._hung - _hanging(readings)  # their events may have to be registered again
            self._stale |= bool(back) or any(instances.get(uuid) != {*each.mig_instances} for uuid, each in answered.items())
            # A snapshot would wait while MIG is changed (up to half a minute), so only samples and health are read.
            if self._stale and not self._nvml.busy:
                await self._take_snapshot()
            else:
                self._judge(readings)
                await self.publish_health()
            await self._listener.sample_taken(reading.sample)
            await self._pause()
            if not self._nvml.busy and await self._opened_again():
                await self._take_snapshot(only_changed=True)

    async def _opened_again(self) -> bool:
        """Opens the session again if NVML lacks GPUs and a retry is due. Returns whether it tried."""
        now = asyncio.get_running_loop().time()
        if now < self._relist_at:
            return False
        first, longest = self._retry_seconds
        lacks = await self._nvml.lacks_gpus() or self._snapshot.unlisted > 0
        self._relist_at = now + (self._relist_seconds if lacks else longest)
        self._relist_seconds = min(2 * self._relist_seconds, longest) if lacks else first
        if lacks:
            try:
                await self._nvml.open()
            except NvmlError as error:
                if not self._nvml.opened:
                    raise
                log.warning("nvml_not_reopened", reason=str(error))  # a call was in progress, so the old session continues
        return lacks

    async def _take_snapshot(self, *, only_changed: bool = False) -> None:
        """Passes a new snapshot to the listener; with `only_changed` only if it differs from the last one."""
        self._stale = False
        before, snapshot = self._snapshot, await self._nvml.snapshot()
        failed = {failure.uuid for failure in snapshot.failures if failure.uuid is not None}
        readable = {gpu.uuid for gpu in snapshot.gpus}
        for uuid in sorted((readable | failed) - self._health.keys()):
            self._health[uuid] = new_health(time.time(), self._cordons.get(uuid))
        unmonitored = await self._nvml.watch_events(self._on_event)
        self._judge((await self._nvml.read(sample=False)).health)
        if self._down or snapshot != before:
            log.info("gpus_found", gpus=len(snapshot.gpus), driver=snapshot.driver_version, without_events=sorted(unmonitored))
            for failure in snapshot.failures:
                log.warning("gpu_not_readable", index=failure.index, gpu=failure.uuid, reason=failure.reason)
            if snapshot.unlisted_sentence is not None:
                log.warning("gpus_not_listed", reason=snapshot.unlisted_sentence)
        self._down = False
        self._snapshot = snapshot
        await self.publish_health()
        if not only_changed or snapshot != before:
            await self._listener.snapshot_taken(snapshot)

    def _judge(self, readings: Mapping[str, Observation | None]) -> None:
        """A GPU with the reading None keeps its health. A GPU without a reading is missing."""
        self._hung = _hanging(readings)
        missing = Failed(reason="missing", message="the driver no longer lists this GPU")
        for uuid in self._health:
            observation = readings.get(uuid, missing)
            if observation is not None:
                self._observe(uuid, observation)
        self._mig_health = step_mig_devices(self._mig_health, readings, time.time(), self._rules)

    async def _pause(self) -> None:
        """Waits for the next sample's time. Health that an event or an operator changes is published at once."""
        begun = asyncio.get_running_loop().time()
        while True:
            period = min(self._sample_period_seconds, _AWAITED_PERIOD_SECONDS if self._awaited else math.inf)
            try:
                async with asyncio.timeout_at(next_tick(period, begun)):
                    await self._wake.wait()
            except TimeoutError:
                return
            self._wake.clear()
            await self.publish_health()

    def _on_event(self, uuid: str | None, event: Xid | DoubleBitError) -> None:
        """If the event names a GPU instance, applies it to that instance's MIG devices, else to the GPU (`uuid` None: to all GPUs)."""
        instance = event.gpu_instance if isinstance(event, Xid) else None
        if uuid is not None and instance is not None:
            devices = [each for gpu in self._snapshot.gpus if gpu.uuid == uuid for each in gpu.mig_instances]
            for name in [each.uuid for each in devices if each.gpu_instance == instance]:
                after = step(self._mig_health.get(name, new_health(time.time())), event, time.time(), self._rules)
                if after.state != "healthy":  # an application's XID is no fault
                    self._mig_health[name] = after
        else:
            for name in [uuid] if uuid is not None else list(self._health):
                self._observe(name, event)
        if isinstance(event, Xid) and self._meter is not None:
            self._meter.xid(uuid, event.number)
        log.warning("gpu_event", gpu=uuid, xid=event.number if isinstance(event, Xid) else None, gpu_instance=instance)
        self._wake.set()

    def _observe(self, uuid: str, observation: Observation) -> None:
        health = self._health.get(uuid)
        if health is not None:
            self._health[uuid] = step(health, observation, time.time(), self._rules)


def _log_change(uuid: str, before: GpuHealth | None, health: GpuHealth) -> None:
    """A new GPU that is offered is not logged."""
    if before is not None or not health.offered:
        record = log.info if health.offered else log.warning
        record(
            "gpu_health_changed",
            gpu=uuid,
            state="held" if health.healthy and health.cordon_reason is not None else health.state,
            reason=health.effective_reason,
            message="; ".join(filter(None, (health.cordon_reason, health.message))),
        )


def _hanging(readings: Mapping[str, Observation | None]) -> frozenset[str]:
    return frozenset(uuid for uuid, each in readings.items() if isinstance(each, Failed) and each.reason == "hang")


def _published_parts(health: GpuHealth | None) -> tuple[str | None, ...]:
    return () if health is None else (health.state, health.reason, health.message, health.cordon_reason)
