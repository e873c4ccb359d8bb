"""Doctor says which way containers see the driver and why, and finds the obstacles."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from gpumgr.cli.examination import CheckResult
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.cli.examination.peers import look_at_driver_files
from gpumgr.common.errors import NvmlError
from gpumgr.settings import Settings
from gpumgr.settings.schema import ContainerSettings, CriSettings, VcudaSettings
from tests.component.compat.gpu_manager.driver_files.host import DRIVER, Driver
from tests.component.runtime.cri.node import Runtime, serving
from tests.cri_api import recorded_runtime

Way = Literal["auto", "toolkit", "mounts"]
RUNC = {"defaultRuntimeName": "runc", "runtimes": {"runc": {"options": {"BinaryName": ""}}}}


class Loaded:
    """In place of SharedNvml, with this driver; None: it does not answer."""

    def __init__(self, driver_version: str | None) -> None:
        self.driver_version = driver_version

    async def snapshot(self) -> Any:
        if self.driver_version is None:
            raise NvmlError("no driver")
        return self


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    Driver(tmp_path).install(tmp_path / "root")
    return Settings(
        cri=CriSettings(socket=tmp_path / "cri.sock"),
        container=ContainerSettings(driver_whole_dir=tmp_path / "vdriver" / "origin"),
        vcuda=VcudaSettings(driver_roots=(tmp_path / "root",), volume_conf=tmp_path / "volume.conf"),
    )


@pytest.fixture
async def runtime(settings: Settings) -> AsyncIterator[Runtime]:
    made = Runtime(runtimes=recorded_runtime("containerd"))
    async with serving(made, settings.cri.socket):
        yield made


async def look(settings: Settings, way: Way = "auto", driver: str | None = DRIVER, *, simulated: bool = False) -> CheckResult:
    container = ContainerSettings(driver_files=way, driver_whole_dir=settings.container.driver_whole_dir)
    asked = Settings(cri=settings.cri, container=container, vcuda=settings.vcuda)
    return await look_at_driver_files(asked, cast(SharedNvml, Loaded(driver)), simulated=simulated, timeout_seconds=30)


@pytest.mark.usefixtures("runtime")
async def test_the_toolkit_as_the_default_runtime(settings: Settings) -> None:
    found = await look(settings)
    why = "the default runtime, nvidia (/usr/bin/nvidia-container-runtime), is NVIDIA's container toolkit"
    assert (found.state, found.message) == ("ok", f"toolkit: {why}")
    assert (await look(settings, "toolkit")).state == "ok"


async def test_mounts_name_the_driver_that_is_copied(settings: Settings, runtime: Runtime, tmp_path: Path) -> None:
    runtime.runtimes = recorded_runtime("containerd", containerd=RUNC)
    found = await look(settings)
    why = "mounts: the default runtime, runc, is not NVIDIA's container toolkit"
    folder = settings.container.driver_whole_dir
    copied = f"{folder} has a copy of the files of driver {DRIVER} below {tmp_path}/root"
    assert (found.state, found.message) == ("ok", f"{why}; {copied}")
    found = await look(settings, driver=None)
    assert (found.state, found.message) == ("ok", f"{why}; {folder} has a copy once the driver answers")
    folder.mkdir(parents=True)
    found = await look(settings)
    assert (found.state, found.message) == ("ok", f"{why}; containers get {folder} as it is")


async def test_a_driver_without_files_is_an_error(settings: Settings, runtime: Runtime) -> None:
    runtime.runtimes = recorded_runtime("containerd", containerd=RUNC)
    found = await look(settings, driver="999.1")
    assert found.state == "error"
    assert "but containers don't see the driver: libcuda.so.999.1 for " in found.message
    assert "driver.root" in str(found.remedy)


async def test_the_toolkits_way_without_a_toolkit_is_a_warning(settings: Settings, runtime: Runtime) -> None:
    runtime.runtimes = recorded_runtime("containerd", containerd=RUNC)
    found = await look(settings, "toolkit")
    assert found.state == "warning"
    assert "the default runtime, runc, is not NVIDIA's: its containers don't see the driver" in found.message


async def test_a_runtime_that_does_not_answer(settings: Settings) -> None:
    found = await look(settings)
    assert found.state == "error"
    assert "can't ask the container runtime for its default runtime" in found.message
    assert (await look(settings, "toolkit")).state == "ok"
    assert (await look(settings, "mounts")).state == "ok"


async def test_a_simulated_node_has_no_drivers_files(settings: Settings) -> None:
    assert (await look(settings, simulated=True)).state == "skipped"
    assert (await look(settings, "mounts", simulated=True)).state == "ok"
