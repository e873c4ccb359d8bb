"""Cordons and resets on a simulated node: the monitor, the books and a checkpoint on a disk, over a kill of the agent."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpumgr.agent.books import Books
from gpumgr.agent.maintenance import Maintenance, Order
from gpumgr.agent.offers import Offers
from gpumgr.allocator.offer import Offer
from gpumgr.app.listener import News
from gpumgr.checkpoint.store import SqliteCheckpoint
from gpumgr.nvml.driver import Nvml
from gpumgr.nvml.health import GpuHealth
from gpumgr.nvml.monitor import Monitor
from gpumgr.nvml.reset import reset_gpu
from gpumgr.proc import HostProcesses
from gpumgr.sim.library import SimNode
from tests.component.stage.stage import Drift, MemoryPods

from .conftest import PERIOD_SECONDS, RETRY_SECONDS, Prepare
from .smi import install_smi


class Heard(News):
    """Keeps what it heard of the GPUs' health."""

    history: list[Mapping[str, GpuHealth]]

    async def health_changed(self, health: Mapping[str, GpuHealth]) -> None:
        self.history.append(health)
        await super().health_changed(health)


class Life:
    """One life of an agent, from its checkpoint to a kill."""

    def __init__(self, sim: SimNode, checkpoint: SqliteCheckpoint, program: str) -> None:
        loaded = checkpoint.load()
        processes = HostProcesses()
        self.offers: list[Offer] = []
        self._offers = Offers(self.offers.append, clock=time.monotonic)
        self.books = Books(
            loaded.ledger,
            checkpoint=checkpoint,
            offers=self._offers,
            meter=Drift(),
            runs=processes.runs,
            policy="binpack",
            clock=time.monotonic,
        )
        self.news = Heard(
            self.books,
            processes,
            device_root=None,
            before_snapshot=lambda _snapshot: asyncio.sleep(0),
            on_processes=lambda _sample, _started: asyncio.sleep(0),
            on_sample=lambda _sample: None,
        )
        self.news.history = []
        nvml = Nvml(library_path=sim.library_path, sysfs_root=sim.sysfs_root)
        self.monitor = Monitor(nvml, self.news, sample_period_seconds=PERIOD_SECONDS, retry_seconds=RETRY_SECONDS)
        self.maintenance = Maintenance(
            books=self.books,
            health=self.monitor,
            checkpoint=checkpoint,
            pods=MemoryPods(),
            announcer=None,
            reset=lambda uuid: reset_gpu(self.monitor, uuid, program=program),
        )
        self.maintenance.restore(loaded.notes)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.monitor.run())
        try:
            await self.news.known.wait()
            self.books.tell()
            self._offers.start()
            yield
        finally:
            self._offers.close()
            task.cancel()
            await asyncio.wait([task])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 (the monitor runs at its own pace)
                await asyncio.sleep(PERIOD_SECONDS)


async def test_a_broken_gpu_is_cordoned_outlives_a_kill_is_reset_and_comes_back(
    node: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = node("pcie-a10-4")
    program = install_smi(tmp_path, sim, monkeypatch)
    uuid = sim.description.uuid_of(2)
    killed = SqliteCheckpoint.open(tmp_path / "checkpoint")
    first = Life(sim, killed, program)
    async with first.run():
        await first.maintenance.follow(Order(action="cordon", gpu="2", reason="falls off the bus"))
        name = first.books.ledger.cards.by_uuid[uuid].name
        closed = {name: "cordoned by the operator: falls off the bus"}
        assert first.books.node().unfit == closed
    sim.control.lose_gpu(2)
    again = SqliteCheckpoint.open(tmp_path / "checkpoint")  # nobody closed it: what is on the disk is what was confirmed
    second = Life(sim, again, program)
    async with second.run():
        assert not any(card.healthy_cores for offer in second.offers for card in offer if card.card.name == name)
        answer = await second.maintenance.follow(Order(action="reset", gpu=uuid))
        assert "successfully reset" in answer["said"]
        await second.until(lambda: second.books.node().unfit == closed)
        cordoned = len(second.news.history)
        await second.maintenance.follow(Order(action="uncordon", gpu="GPU2"))
        await second.until(lambda: not second.books.node().unfit)
        assert "probation" in {health[uuid].state for health in second.news.history[cordoned:]}, "it is watched for a while first"
    assert [entry.code for entry in second.books.history.entries()] == ["not_readable", "reset", "uncordoned"]
    after = SqliteCheckpoint.open(tmp_path / "checkpoint")
    assert after.load().notes["cordons"] == "{}"
    for checkpoint in (killed, again, after):
        await checkpoint.close()
