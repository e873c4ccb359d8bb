"""What the mechanisms' side tells people of a container that runs without limits."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumgr.allocator.pods import PodView
from gpumgr.allocator.tenant import Tenant
from gpumgr.app.enforcing import Enforcing
from gpumgr.nvml.driver import Nvml
from gpumgr.proc import HostProcesses
from gpumgr.settings import Settings
from gpumgr.settings.schema import CheckpointSettings, ContainerSettings, CriSettings, EnforcementSettings
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World


@pytest.fixture
async def world() -> World:
    return await World.made(snapshot(1, 16))


@pytest.fixture
async def enforcing(world: World, tmp_path: Path) -> AsyncIterator[Enforcing]:
    settings = Settings(
        checkpoint=CheckpointSettings(dir=tmp_path),
        container=ContainerSettings(allocation_dir=tmp_path / "vm"),
        cri=CriSettings(socket=tmp_path / "none.sock"),
        enforcement=EnforcementSettings(backend="none", run_dir=tmp_path / "run"),
    )
    made = Enforcing(
        settings,
        nvml=Nvml(timeout_seconds=1.0, sysfs_root=tmp_path),
        processes=HostProcesses(),
        proc_root=Path("/proc"),
        pods=world.pods,
        announcer=None,
        simulated=True,
    )
    await made.open(world.books, lost=False)
    yield made
    await made.close()


async def test_a_container_without_limits_is_told_once_however_often_it_starts(world: World, enforcing: Enforcing) -> None:
    world.pods.views["team", "web"] = PodView(namespace="team", name="web", uid="uid-7")
    card = world.ledger.cards.cards[0]
    tenant = Tenant(allocation="a", gpu=card.name, uuid=card.uuid, pod=("team", "web"), container="main", cores=30)
    for _ in range(3):
        await enforcing.limits.backends["none"].start(tenant)
    (told,) = world.books.history.entries()
    assert (told.what, told.code, told.id, told.gpus) == ("event", "GpuLimitNotEnforced", "a", ("00000000",))
    assert (told.pod, told.pod_uid, told.container) == (("team", "web"), "uid-7", "main")
    assert told.why.startswith("nothing on this node keeps container main within its 30 cores")
