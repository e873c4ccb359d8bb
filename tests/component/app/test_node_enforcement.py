"""The reports of enforcement for a container that runs without limits."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumgr.allocator.gpu_share import GpuShare, SharedGpu
from gpumgr.allocator.pods import PodView
from gpumgr.app.node_enforcement import NodeEnforcement
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
async def enforcement(world: World, tmp_path: Path) -> AsyncIterator[NodeEnforcement]:
    settings = Settings(
        checkpoint=CheckpointSettings(dir=tmp_path),
        container=ContainerSettings(allocation_dir=tmp_path / "vm"),
        cri=CriSettings(socket=tmp_path / "none.sock"),
        enforcement=EnforcementSettings(backend="none", run_dir=tmp_path / "run"),
    )
    made = NodeEnforcement(
        settings,
        nvml=Nvml(timeout_seconds=1.0, sysfs_root=tmp_path),
        processes=HostProcesses(),
        proc_root=Path("/proc"),
        pods=world.pods,
        publisher=None,
        simulated=True,
    )
    await made.open(world.agent_state, lost=False)
    yield made
    await made.close()


async def test_an_installed_library_is_given_to_new_containers_without_a_restart(
    world: World, enforcement: NodeEnforcement, tmp_path: Path
) -> None:
    card = world.ledger.gpu_registry.gpus[0]
    tenant = GpuShare(
        allocation="a", gpus=(SharedGpu(name=card.name, uuid=card.uuid, cores=30),), pod=("team", "web"), container="main"
    )
    hami_core = enforcement.limits.backends["hami-core"]

    def mounted() -> str:
        (found,) = (
            each.host_path for each in hami_core.prepare(tenant, "core").mounts if each.container_path.endswith("libvgpu.so")
        )
        return found

    (tmp_path / "lib").mkdir()
    for digit in "ab":
        (tmp_path / "lib" / "libvgpu.so").unlink(missing_ok=True)
        (tmp_path / "lib" / "libvgpu.so").symlink_to(f"{digit * 64}/libvgpu.so")
        await enforcement._choose()
        assert mounted() == str(tmp_path / "lib" / (digit * 64) / "libvgpu.so")
        assert f"can't read the library {mounted()}" in (await hami_core.unavailable() or "")


async def test_a_container_without_limits_is_reported_once_for_all_its_starts(world: World, enforcement: NodeEnforcement) -> None:
    world.pods.views["team", "web"] = PodView(namespace="team", name="web", uid="uid-7")
    card = world.ledger.gpu_registry.gpus[0]
    tenant = GpuShare(
        allocation="a", gpus=(SharedGpu(name=card.name, uuid=card.uuid, cores=30),), pod=("team", "web"), container="main"
    )
    for _ in range(3):
        await enforcement.limits.backends["none"].start(tenant)
    (told,) = world.agent_state.history.entries()
    assert (told.what, told.code, told.id, told.gpus) == ("event", "GpuLimitNotEnforced", "a", ("00000000",))
    assert (told.pod, told.pod_uid, told.container) == (("team", "web"), "uid-7", "main")
    assert told.why.startswith("nothing on this node keeps container main within its 30 cores")
