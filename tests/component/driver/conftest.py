"""Simulated nodes behind the real binding, and a listener of the monitor."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpumgr.driver import worker
from gpumgr.driver.driver import Nvml
from gpumgr.driver.health import GpuHealth
from gpumgr.driver.monitor import Monitor
from gpumgr.placement.devices import NodeSample, NodeSnapshot
from gpumgr.sim.library import SimNode, prepare
from tests.background import until

PERIOD_SECONDS = 0.01
RETRY_SECONDS = (0.01, 0.02)

Prepare = Callable[[str], SimNode]


@pytest.fixture(autouse=True)
def _sessions_end_in_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gets no time to end for a second or two is not one that hangs in the driver."""
    monkeypatch.setattr("gpumgr.driver.session._STOP_SECONDS", 30.0)
    monkeypatch.setattr("gpumgr.driver.session._SHUTDOWN_SECONDS", 30.0)
    # A session ends when its thread returns from the wait for events, so each test would last a second longer.
    monkeypatch.setattr("gpumgr.driver.session._WAIT_MILLISECONDS", 20)
    monkeypatch.setattr("gpumgr.driver.session._PAUSE_SECONDS", 0.02)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int | None, float]:
    """NVML's index of a GPU -> the time limit of the calls about it, in seconds, in place of the session's. The other calls have their
    time also where this very process gets none."""
    made, seconds = worker._Job, dict[int | None, float]()

    def job(*, subject: int | None, timeout_seconds: float, **more: Any) -> worker._Job:
        return made(subject=subject, timeout_seconds=seconds.get(subject, timeout_seconds), **more)

    monkeypatch.setattr(worker, "_Job", job)
    return seconds


def give_up_after(nvml: Nvml, seconds: float) -> None:
    """From now on. As long as the driver is to answer it has its time, which passes too while this very process is stopped."""
    nvml._timeout_seconds = seconds


async def until_calls_return(nvml: Nvml) -> None:
    """After the end of a hang."""
    await until(lambda: not nvml._worker.stuck)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Prepare]:
    """Lays nodes out, each in a folder of its own; at the end nothing hangs any more, so that no thread outlives its test."""
    made: list[SimNode] = []

    def make(name: str) -> SimNode:
        made.append(prepare(name, tmp_path / f"node-{len(made)}"))
        return made[-1]

    yield make
    for each in made:
        each.control.clear()


@asynccontextmanager
async def opened(node: SimNode) -> AsyncIterator[Nvml]:
    """An open session with a node's library."""
    nvml = Nvml(library_path=node.library_path, sysfs_root=node.sysfs_root, timeout_seconds=10.0)
    await nvml.open()
    try:
        yield nvml
    finally:
        node.control.clear()
        await until_calls_return(nvml)
        await nvml.close()


@pytest.fixture
def mixed(node: Prepare) -> SimNode:
    """An A100 and a T4."""
    return node("mixed-2")


@pytest.fixture
async def nvml(mixed: SimNode) -> AsyncIterator[Nvml]:
    async with opened(mixed) as made:
        yield made


class Listener:
    """Records all reports; `until` waits for a condition."""

    def __init__(self) -> None:
        self.snapshots: list[NodeSnapshot] = []
        self.samples: list[NodeSample] = []
        self.outages: list[str] = []
        self.history: list[Mapping[str, GpuHealth]] = []
        self._changed = asyncio.Condition()

    @property
    def health(self) -> Mapping[str, GpuHealth]:
        return self.history[-1] if self.history else {}

    @property
    def states(self) -> list[tuple[str, str | None]]:
        """State, and the word for why it is so, of the first snapshot's GPUs, in their order."""
        gpus = self.snapshots[0].gpus if self.snapshots else ()
        return [(self.health[gpu.uuid].state, self.health[gpu.uuid].effective_reason) for gpu in gpus]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(condition)

    async def rounds(self, count: int) -> None:
        """So many more samples."""
        enough = len(self.samples) + count
        await self.until(lambda: len(self.samples) >= enough)

    async def snapshot_taken(self, snapshot: NodeSnapshot) -> None:
        assert {gpu.uuid for gpu in snapshot.gpus} <= self.health.keys()
        self.snapshots.append(snapshot)
        await self._notify()

    async def health_changed(self, health: Mapping[str, GpuHealth]) -> None:
        self.history.append(health)
        await self._notify()

    async def sample_taken(self, sample: NodeSample) -> None:
        self.samples.append(sample)
        await self._notify()

    async def driver_down(self, message: str) -> None:
        self.outages.append(message)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def watched(
    node: SimNode, *, kind: type[Nvml] = Nvml, timeout_seconds: float = 10.0, **settings: Any
) -> AsyncIterator[tuple[Monitor, Listener]]:
    """A monitor that runs over a node, quickly, and its listener."""
    listener = Listener()
    nvml = kind(library_path=node.library_path, sysfs_root=node.sysfs_root, timeout_seconds=timeout_seconds)
    monitor = Monitor(nvml, listener, **{"sample_period_seconds": PERIOD_SECONDS, "retry_seconds": RETRY_SECONDS, **settings})
    task = asyncio.create_task(monitor.run())
    try:
        yield monitor, listener
    finally:
        node.control.clear()
        task.cancel()
        await asyncio.wait([task])
        await nvml.close()
