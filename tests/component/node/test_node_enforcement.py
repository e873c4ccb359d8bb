"""The choice of the backends on a node with an old driver, and the reports for a container that runs without limits."""

from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs

from gpumgr.common.proc import HostProcesses
from gpumgr.driver.driver import Nvml
from gpumgr.enforcement.driver_memory import DriverMemory
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.enforcement.mechanism_choice import MechanismChoice
from gpumgr.enforcement.mps.grace_periods import ClientsOfPods
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.gpu_limits import GpuLimits
from gpumgr.ledger.gpu_share import GpuShare, SharedGpu
from gpumgr.ledger.pods import PodView
from gpumgr.ledger.usage.node_use import Container
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.settings import Settings
from gpumgr.settings.schema import CheckpointSettings, ContainerSettings, CriSettings, EnforcementSettings
from tests.component.runtime.accounting.node import MemoryRuntime
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World


@pytest.fixture
async def world() -> World:
    return await World.made(snapshot(1, 16))


class RecordedNode:
    """In the place of the publisher and its node."""

    def __init__(self) -> None:
        self.node = self
        self.written: list[tuple[str, str]] = []

    def annotate(self, key: str, value: str) -> None:
        self.written.append((key, value))


@pytest.fixture
def published() -> RecordedNode:
    return RecordedNode()


@pytest.fixture
async def enforcement(world: World, published: RecordedNode, tmp_path: Path) -> AsyncIterator[NodeEnforcement]:
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
        publisher=cast(Publisher, published),
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


@pytest.mark.parametrize(("model", "events"), [("Tesla P40", 1), ("Tesla V100", 0)])
async def test_a_share_of_mps_on_a_gpu_older_than_volta_is_reported(
    world: World, enforcement: NodeEnforcement, model: str, events: int
) -> None:
    node = snapshot(1, 16)
    (gpu,) = node.gpus
    await enforcement.choose(replace(node, gpus=(replace(gpu, model=model),)))
    card = world.ledger.gpu_registry.gpus[0]
    shared = SharedGpu(name=card.name, uuid=gpu.uuid, cores=30)
    for _ in range(2):
        enforcement._on_start(GpuShare(allocation="a", gpus=(shared,), container="main"), ("mps",))
    told = world.agent_state.history.entries()
    assert [(each.code, f"mps can't limit GPU {model}" in each.why) for each in told] == [("GpuLimitNotEnforced", True)] * events


async def test_the_limits_of_each_gpu_are_reported_and_the_node_is_annotated_once(
    enforcement: NodeEnforcement, published: RecordedNode
) -> None:
    assert enforcement.gpu_limits() == {}
    node = snapshot(2, 16)
    for _ in range(2):
        await enforcement.choose(node)
    assert published.written == [("gpumgr.io/enforcement", "GPU 0-1: memory none, cores none")]
    assert enforcement.gpu_limits() == {gpu.uuid: GpuLimits() for gpu in node.gpus}
    await enforcement.choose(snapshot(1, 16))
    assert published.written[1:] == [("gpumgr.io/enforcement", "GPU 0: memory none, cores none")]
    assert enforcement.limits.choice.obstacles["hami-core"].startswith("no libvgpu.so is installed")


async def test_the_drivers_limits_are_tried_again_after_a_restart_of_the_driver(
    enforcement: NodeEnforcement, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    async def choose(_self: Enforcer, _gpus: object) -> MechanismChoice:
        calls.append("chosen")
        return MechanismChoice()

    monkeypatch.setattr(DriverMemory, "driver_restarted", lambda _: calls.append("restarted"))
    monkeypatch.setattr(Enforcer, "choose", choose)
    await enforcement.choose(snapshot(1, 16))
    assert calls == ["restarted", "chosen"]


async def test_the_mps_clients_of_a_pod_that_is_about_to_end_are_those_in_its_cgroups(
    enforcement: NodeEnforcement, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Collection[int]] = []

    async def end_clients(pids: Collection[int]) -> None:
        ended.append(pids)

    runtime = MemoryRuntime()
    for uid, name, pids in (("u", "main", (11, 12)), ("u", "side", (21,)), ("other", "main", (31,))):
        runtime.containers.append(Container(id=uid + name, pod=("team", "web"), pod_uid=uid, name=name))
        runtime.inside[uid + name] = pids
    monkeypatch.setattr(enforcement.mps, "end_clients", end_clients)
    clients, pod = ClientsOfPods(enforcement.mps, runtime), PodView(namespace="team", name="web", uid="u")  # type: ignore[arg-type]
    await clients.end([pod])
    assert ended == [], "no daemon runs"
    monkeypatch.setattr(enforcement.mps, "daemons", lambda: ["a daemon"])
    await clients.end([pod])
    assert ended == [{11, 12, 21}]
    await clients.end([pod, PodView(namespace="team", name="api", uid="other")])
    assert ended.pop() == {11, 12, 21, 31}
    await clients.end([PodView(namespace="team", name="none", uid="none")])
    assert ended == [{11, 12, 21}], "without processes nothing is to be done"
    runtime.cgroups_broken = True
    with capture_logs() as logs:
        await clients.end([pod])
    assert [line["event"] for line in logs] == ["mps_clients_not_ended"]
