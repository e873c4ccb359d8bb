"""The API server's side as the agent starts it: what joins the writer with the history, and what becomes of a bug."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpumgr.allocator.history import Entry
from gpumgr.allocator.ledger import Ledger
from gpumgr.app.podside import PodSide
from gpumgr.app.readers import Readers
from gpumgr.app.station import Hardware, Station
from gpumgr.app.upkeep import make_maintenance
from gpumgr.settings import Settings
from gpumgr.settings.schema import (
    CheckpointSettings,
    ContainerSettings,
    CriSettings,
    EnforcementSettings,
    KubernetesSettings,
    NodeSettings,
)
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.kubelet_pods import SimContainer, SimPod
from tests.component.stage.stage import MemoryCheckpoint

POD = SimPod(namespace="team", name="web", uid="uid-1", containers=(SimContainer(name="main", cores=30, memory_blocks=4),))


@pytest.fixture
async def sim() -> AsyncIterator[SimApiServer]:
    async with SimApiServer("node-1") as running:
        yield running


@asynccontextmanager
async def started(sim: SimApiServer, folder: Path) -> AsyncIterator[tuple[PodSide, Station]]:
    """Its daemons run, nothing else does."""
    settings = Settings(
        node=NodeSettings(name="node-1"),
        kubernetes=KubernetesSettings(kubeconfig=sim.kubeconfig(folder / "kubeconfig")),
        checkpoint=CheckpointSettings(dir=folder),
        container=ContainerSettings(allocation_dir=folder / "vm"),
        cri=CriSettings(socket=folder / "none.sock"),
        enforcement=EnforcementSettings(backend="none", run_dir=folder / "run"),
    )
    checkpoint = MemoryCheckpoint()
    async with PodSide.open(settings) as side:
        station = Station(
            settings, Hardware(simulated=True), ledger=Ledger(), checkpoint=checkpoint, pods=side.pods, announcer=side.announcer
        )
        readers = Readers(station, pods=side.pods, maintenance=make_maintenance(station, checkpoint, side), outbox=side.outbox)
        async with asyncio.TaskGroup() as group:
            daemons = side.start(group, station, readers)
            yield side, station
            assert not any(daemon.done() for daemon in daemons), daemons
            for daemon in daemons:
                daemon.cancel()
        await station.close()


async def test_an_eviction_that_the_api_server_refuses_is_in_the_history(sim: SimApiServer, tmp_path: Path) -> None:
    sim.put(POD)
    sim.forbidden.add(("create", "pods/eviction"))
    async with started(sim, tmp_path) as (side, station):
        assert side.announcer is not None
        heard: asyncio.Queue[Entry] = asyncio.Queue()
        station.books.history.subscribe(heard.put_nowait)
        side.announcer.evict(("team", "web"), "uid-1", reason="GPU0 is drained")
        async with asyncio.timeout(10):
            told = await heard.get()
        assert station.books.history.entries() == (told,)
    assert (told.what, told.code, told.pod, told.pod_uid) == ("event", "GpuPodNotEvicted", ("team", "web"), "uid-1")


async def test_a_bug_in_what_people_are_shown_does_not_end_the_agent(sim: SimApiServer, tmp_path: Path) -> None:
    looks: asyncio.Queue[None] = asyncio.Queue()

    def stumble() -> None:
        looks.put_nowait(None)
        raise LookupError("a bug")

    with capture_logs() as logs:
        async with started(sim, tmp_path) as (side, _):
            side.describing = stumble
            async with asyncio.timeout(10):
                await looks.get()
                await looks.get()
    assert [line["daemon"] for line in logs if line["event"] == "daemon_failed"] == ["announcing"]
