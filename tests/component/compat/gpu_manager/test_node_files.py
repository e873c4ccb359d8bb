"""Which way containers see the driver, while the container runtime answers, restarts and is silent; and what is mirrored for it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpumgr.compat.gpu_manager.driver_files.node_files import NodeDriverFiles
from gpumgr.ledger.answer import CONTROL_NODES
from gpumgr.runtime.cri import CriClient
from gpumgr.settings import Settings
from gpumgr.settings.schema import ContainerSettings, VcudaSettings
from gpumgr.sim.library import SimProcesses
from gpumgr.sim.runtime import SimRuntime
from tests.component.compat.gpu_manager.driver_files.host import CUDA, DRIVER, NEXT_CUDA, NEXT_DRIVER, Driver, call_who

TOOLKIT = "/usr/bin/nvidia-container-runtime"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(tmp_path_factory.mktemp("driver"))


class Host:
    """A host's folders, its container runtime, and agents one after another."""

    def __init__(self, folder: Path, driver: Driver) -> None:
        self.root, self.whole = folder / "root", folder / "vdriver" / "origin"
        driver.install(self.root)
        self.devices = folder / "dev"
        self.devices.mkdir()
        for name in CONTROL_NODES:
            (self.devices / name).touch()
        self.runtime = SimRuntime(folder / "cri.sock", SimProcesses(folder))
        self._client = CriClient(self.runtime.socket)

    def agent(self, way: str = "auto", *, simulated: bool = False) -> NodeDriverFiles:
        container = ContainerSettings(
            driver_files=way,  # type: ignore[arg-type]
            driver_share_dir=self.whole.parent / "nvidia",
            driver_whole_dir=self.whole,
            device_root=self.devices,
        )
        vcuda = VcudaSettings(driver_roots=(self.root,), volume_conf=self.root / "volume.conf")
        return NodeDriverFiles(Settings(container=container, vcuda=vcuda), self._client.runtimes, simulated=simulated)

    async def updated(self, way: str = "auto", *, simulated: bool = False) -> NodeDriverFiles:
        """An agent that has seen the driver."""
        agent = self.agent(way, simulated=simulated)
        await agent.update(DRIVER)
        return agent

    def mounted(self) -> int:
        """What a container's libcuda.so.1 is."""
        return call_who(self.whole / "lib64", "libcuda.so.1")[0]

    def close(self) -> None:
        self._client.close()


@pytest.fixture
async def host(tmp_path: Path, driver: Driver) -> AsyncIterator[Host]:
    made = Host(tmp_path, driver)
    await made.runtime.start()
    yield made
    await made.runtime.stop()
    made.close()


async def test_without_a_toolkit_the_driver_is_mirrored_and_mounted(host: Host) -> None:
    agent = host.agent()
    with capture_logs() as logs:
        await agent.update(DRIVER)
        await agent.update(DRIVER)
    assert (agent.access.mounted, agent.access.toolkit, agent.trouble()) == (True, False, None)
    assert host.mounted() == CUDA
    said = [each for each in logs if each["event"].startswith("driver_files")]
    assert [(each["event"], each.get("way")) for each in said] == [("driver_files", "mounts"), ("driver_files_mirrored", None)]
    assert not (host.whole.parent / "nvidia").exists()
    host.whole.unlink()
    await agent.update(DRIVER)
    assert host.mounted() == CUDA, "a mirror that was removed is made again"


async def test_with_the_toolkit_as_default_runtime_nothing_is_copied(host: Host) -> None:
    host.runtime.default_program = TOOLKIT
    agent = await host.updated()
    assert (agent.access.mounted, agent.trouble()) == (False, None)
    assert TOOLKIT in agent.access.why
    assert not host.whole.exists()


async def test_a_runtime_that_restarts_with_the_toolkit_changes_the_way(host: Host) -> None:
    agent = await host.updated()
    await host.runtime.stop()
    await agent.update(DRIVER)
    assert agent.access.mounted, "its last answer counts while it is away"
    assert agent.trouble() is None
    host.runtime.default_program = TOOLKIT
    await host.runtime.start()
    await agent.update(DRIVER)
    assert not agent.access.mounted


async def test_before_the_first_answer_the_former_mirror_shows_the_way(host: Host) -> None:
    await host.runtime.stop()
    first = host.agent()
    with capture_logs() as logs:
        await first.update(DRIVER)
        await first.update(DRIVER)
    assert [each["event"] for each in logs] == ["driver_files_undecided"]
    assert not first.access.mounted
    assert not host.whole.exists()
    assert "it is not known whether containers need mounts" in str(first.trouble())
    await host.runtime.start()
    await first.update(DRIVER)
    assert (first.access.mounted, first.trouble()) == (True, None)
    await host.runtime.stop()
    second = await host.updated()
    assert second.access.mounted
    assert second.access.toolkit


async def test_a_driver_without_files_is_reported_until_they_are_there(host: Host, driver: Driver) -> None:
    agent = host.agent()
    with capture_logs() as logs:
        await agent.update(NEXT_DRIVER)
        await agent.update(NEXT_DRIVER)
    failed = [each for each in logs if each["event"] == "driver_files_not_mirrored"]
    assert len(failed) == 1
    assert f"libcuda.so.{NEXT_DRIVER}" in str(agent.trouble())
    driver.install(host.root, NEXT_DRIVER)
    await agent.update(NEXT_DRIVER)
    assert (host.mounted(), agent.trouble()) == (NEXT_CUDA, None)


async def test_the_operators_folder_is_mounted_as_it_is(host: Host) -> None:
    host.whole.mkdir(parents=True)
    agent = await host.updated()
    assert (agent.access.mounted, agent.trouble()) == (True, None)
    assert not host.whole.is_symlink()
    assert [*host.whole.iterdir()] == []


async def test_a_list_of_files_without_the_volume_of_whole_gpus(host: Host) -> None:
    volume = '{"volume": [{"name": "nvidia", "components": {"libraries": ["libcuda.so"], "binaries": []}}]}'
    (host.root / "volume.conf").write_text(volume)
    agent = await host.updated()
    assert "has no volume 'origin'" in str(agent.trouble())


async def test_device_nodes_that_no_toolkit_creates_are_missed(host: Host) -> None:
    agent = host.agent()
    (host.devices / "nvidia-uvm").unlink()
    with capture_logs() as logs:
        await agent.update(DRIVER)
        await agent.update(DRIVER)
    assert [each["event"] for each in logs].count("device_nodes_missing") == 1
    assert str(agent.trouble()).startswith(
        f"CUDA can't start in containers: {host.devices}/nvidia-uvm missing; run `nvidia-modprobe"
    )
    (host.devices / "nvidia-uvm").touch()
    await agent.update(DRIVER)
    assert agent.trouble() is None
    host.runtime.default_program = TOOLKIT
    (host.devices / "nvidia-uvm").unlink()
    await agent.update(DRIVER)
    assert agent.trouble() is None


@pytest.mark.parametrize("simulated", [False, True])
async def test_mounts_needs_no_answer_of_the_runtime(host: Host, simulated: bool) -> None:
    await host.runtime.stop()
    agent = await host.updated("mounts", simulated=simulated)
    assert (agent.access.mounted, agent.access.toolkit, agent.trouble()) == (True, True, None)
    assert host.mounted() == CUDA


@pytest.mark.parametrize(("way", "simulated"), [("toolkit", False), ("auto", True)])
async def test_the_toolkits_way_and_a_simulated_node_ask_and_copy_nothing(host: Host, way: str, simulated: bool) -> None:
    agent = await host.updated(way, simulated=simulated)
    assert (agent.access.mounted, agent.trouble()) == (False, None)
    assert host.runtime.asked == []
    assert not host.whole.exists()
