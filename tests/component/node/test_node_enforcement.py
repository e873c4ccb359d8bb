"""The choice of the backends on a node with an old driver, and the reports for a container that runs without limits."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock, call

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.driver import Hardware
from gpumgr.enforcement.backend import MechanismChoice
from gpumgr.enforcement.driver_memory import DriverMemory
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.enforcement.mps.grace_periods import ClientsOfPods
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.gpu_share import GpuLimits, GpuShare, SharedGpu
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import ClaimRequest, Ledger
from gpumgr.ledger.node_use import Container
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.placement.pods import ClaimUse, PodView
from gpumgr.settings import Settings
from gpumgr.settings.profile import hami_core_library
from gpumgr.settings.schema import CheckpointSettings, ContainerSettings, CriSettings, EnforcementSettings, HamiCoreSettings
from tests.allocations import allocated
from tests.component.runtime.accounting.node import MemoryRuntime
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World


@pytest.fixture
async def world() -> World:
    return await World.made(snapshot(1, 16))


def tenant_on(world: World) -> GpuShare:
    card = world.ledger.gpu_registry.gpus[0]
    shared = SharedGpu(name=card.name, uuid=card.uuid, cores=30)
    return GpuShare(allocation="a", gpus=(shared,), pod=("team", "web"), container="main")


@pytest.fixture
def publisher() -> Mock:
    return Mock(spec=Publisher)


@pytest.fixture
async def enforcement(world: World, publisher: Mock, tmp_path: Path) -> AsyncIterator[NodeEnforcement]:
    settings = Settings(
        checkpoint=CheckpointSettings(dir=tmp_path),
        container=ContainerSettings(allocation_dir=tmp_path / "vm"),
        cri=CriSettings(socket=tmp_path / "none.sock"),
        enforcement=EnforcementSettings(backend="none", run_dir=tmp_path / "run"),
    )
    hardware = Hardware(sysfs_root=tmp_path, simulated=True)
    made = NodeEnforcement(settings, hardware, world.pods, publisher)
    await made.open(world.agent_state, lost=False)
    yield made
    await made.close()


async def test_an_installed_library_is_given_to_new_containers_without_a_restart(
    world: World, enforcement: NodeEnforcement, tmp_path: Path
) -> None:
    tenant = tenant_on(world)
    hami_core = enforcement.limits.backends["hami-core"]

    def mounted() -> str:
        (found,) = (
            each.host_path for each in hami_core.prepare(tenant, "core").mounts if each.container_path.endswith("libvgpu.so")
        )
        return found

    for digit in "ab":
        install(tmp_path, f"{digit * 64}/libvgpu.so")
        await enforcement._choose()
        assert mounted() == str(tmp_path / "lib" / (digit * 64) / "libvgpu.so")
        assert f"can't read the library {mounted()}" in (await hami_core.unavailable() or "")


async def test_a_container_without_limits_is_reported_once_for_all_its_starts(world: World, enforcement: NodeEnforcement) -> None:
    world.pods.views["team", "web"] = PodView(namespace="team", name="web", uid="uid-7")
    tenant = tenant_on(world)
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
    for _ in range(2):
        enforcement._on_start(tenant_on(world), ("mps",))
    told = world.agent_state.history.entries()
    assert [(each.code, f"mps can't limit GPU {model}" in each.why) for each in told] == [("GpuLimitNotEnforced", True)] * events


async def test_the_limits_of_each_gpu_are_reported_and_the_node_is_annotated(
    enforcement: NodeEnforcement, publisher: Mock
) -> None:
    assert enforcement.limits.gpu_limits == {}
    node = snapshot(2, 16)
    await enforcement.choose(node)
    publisher.annotate.assert_called_once_with("gpumgr.io/enforcement", "GPU 0-1: memory none, cores none")
    assert enforcement.limits.gpu_limits == {gpu.uuid: GpuLimits() for gpu in node.gpus}
    await enforcement.choose(snapshot(1, 16))
    assert publisher.annotate.call_args_list[1:] == [call("gpumgr.io/enforcement", "GPU 0: memory none, cores none")]
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
    """Only the daemons of its GPUs are asked."""
    runtime, ledger = MemoryRuntime(), Ledger(gpu_registry=GpuRegistry().register("GPU-a", 4096).register("GPU-b", 4096))
    gpu = {each.uuid: each.name for each in ledger.gpu_registry.gpus}
    for n, (uid, name, uuid, pids) in enumerate(
        (
            ("u", "main", "GPU-a", (11, 12)),
            ("u", "side", "GPU-b", (21,)),
            ("u", "plain", None, (41,)),
            ("other", "main", "GPU-b", (31,)),
            ("cpu", "main", None, (51,)),
        )
    ):
        runtime.containers.append(Container(id=uid + name, pod=("team", "web"), pod_uid=uid, name=name))
        runtime.inside[uid + name] = pids
        if uuid is not None:
            ledger = ledger.occupy(allocated(id=f"{n:016x}", uid=uid, container=name, cores={gpu[uuid]: 1 << n}))
    monkeypatch.setattr(enforcement.mps, "end_clients", ended := AsyncMock())
    clients = ClientsOfPods(enforcement.mps, runtime, lambda: ledger)  # type: ignore[arg-type]
    pod, other, cpu = (PodView(namespace="team", name="web", uid=uid) for uid in ("u", "other", "cpu"))
    daemons: list[str] = []
    monkeypatch.setattr(enforcement.mps, "daemons", lambda: [SimpleNamespace(uuid=uuid) for uuid in daemons])
    await clients.end([pod])
    ended.assert_not_awaited()  # no daemon runs
    daemons.append("GPU-a")
    await clients.end([pod, other])
    ended.assert_awaited_once_with({"GPU-a": {11, 12}})
    daemons.append("GPU-b")
    await clients.end([pod, other])
    ended.assert_awaited_with({"GPU-a": {11, 12}, "GPU-b": {21, 31}})
    await clients.end([cpu])
    assert ended.await_count == 2
    claim = ClaimRequest(namespace="team", name="c", uid="c", request="main")
    ledger = ledger.occupy(allocated(id="c", claim=claim, cores={gpu["GPU-a"]: 1 << 9}))
    await clients.end([replace(cpu, claims=(ClaimUse(container="main", claim="c"),))])
    ended.assert_awaited_with({"GPU-a": {51}})
    runtime.cgroups_broken = True
    with capture_logs() as logs:
        await clients.end([other])
    assert [line["event"] for line in logs] == ["mps_clients_not_ended"]


def library(folder: Path, path: Path | None = None, sha256: str | None = None) -> tuple[Path | None, str | None]:
    """The library of the backend hami-core and its hash, with these settings."""
    given = HamiCoreSettings(library_path=path, library_sha256=sha256)
    return hami_core_library(Settings(checkpoint=CheckpointSettings(dir=folder), hami_core=given))


def install(folder: Path, target: str) -> None:
    """The link selects the installed library."""
    (folder / "lib").mkdir(exist_ok=True)
    (folder / "lib" / ".new").symlink_to(target)
    (folder / "lib" / ".new").replace(folder / "lib" / "libvgpu.so")


@pytest.mark.parametrize(("path", "sha256"), [(Path("/opt/l.so"), "0" * 64), (Path("/opt/l.so"), None), (None, "0" * 64)])
def test_a_library_that_the_settings_name_takes_precedence(path: Path | None, sha256: str | None, tmp_path: Path) -> None:
    install(tmp_path, f"{'a' * 64}/libvgpu.so")
    assert library(tmp_path, path, sha256) == (path, sha256)


@pytest.mark.parametrize(
    "target", ["libvgpu.so", f"{'a' * 63}/libvgpu.so", f"{'a' * 64}/other.so", f"../{'a' * 64}/libvgpu.so", "/lib/libvgpu.so"]
)
def test_another_link_selects_no_library(target: str, tmp_path: Path) -> None:
    install(tmp_path, target)
    assert library(tmp_path) == (None, None)


def test_without_a_link_there_is_no_library(tmp_path: Path) -> None:
    assert library(tmp_path) == (None, None)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libvgpu.so").touch()  # a file of the operator's
    assert library(tmp_path) == (None, None)
