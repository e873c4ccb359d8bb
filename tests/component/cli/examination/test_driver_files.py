"""Doctor says which way containers see the driver and why, and finds the obstacles."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from msgspec.structs import replace

from gpumgr.cli.examination import CheckResult, ok
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.cli.examination.peers import look_at_driver_files
from gpumgr.common.errors import NvmlError
from gpumgr.settings import Settings
from gpumgr.settings.schema import ContainerSettings, CriSettings, VcudaSettings
from tests.component.compat.gpu_manager.driver_files.host import DRIVER, Driver
from tests.component.runtime.cri.node import Runtime, serving
from tests.cri_api import recorded_runtime

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


@pytest.fixture
def runc(runtime: Runtime) -> None:
    """The default runtime is not NVIDIA's."""
    runtime.runtimes = recorded_runtime("containerd", containerd=RUNC)


async def look(
    settings: Settings,
    way: Literal["auto", "toolkit", "mounts"] = "auto",
    driver: str | None = DRIVER,
    *,
    simulated: bool = False,
) -> CheckResult:
    asked = replace(settings, container=replace(settings.container, driver_files=way))
    return await look_at_driver_files(asked, cast(SharedNvml, Loaded(driver)), simulated=simulated, timeout_seconds=30)


@pytest.mark.usefixtures("runtime")
async def test_the_toolkit_as_the_default_runtime(settings: Settings) -> None:
    why = "the default runtime, nvidia (/usr/bin/nvidia-container-runtime), is NVIDIA's container toolkit"
    assert await look(settings) == ok(f"toolkit: {why}")
    assert (await look(settings, "toolkit")).state == "ok"


@pytest.mark.usefixtures("runc")
async def test_mounts_name_the_driver_that_is_copied(settings: Settings, tmp_path: Path) -> None:
    why = "mounts: the default runtime, runc, is not NVIDIA's container toolkit"
    folder = settings.container.driver_whole_dir
    copied = f"{folder} has a copy of the files of driver {DRIVER} below {tmp_path}/root"
    assert await look(settings) == ok(f"{why}; {copied}")
    assert await look(settings, driver=None) == ok(f"{why}; {folder} has a copy once the driver answers")
    folder.mkdir(parents=True)
    assert await look(settings) == ok(f"{why}; containers get {folder} as it is")


@pytest.mark.usefixtures("runc")
async def test_containers_that_do_not_see_the_driver(settings: Settings) -> None:
    found = await look(settings, driver="999.1")
    assert (found.state, "but containers don't see the driver: libcuda.so.999.1 for " in found.message) == ("error", True)
    assert "driver.root" in str(found.remedy)
    found = await look(settings, "toolkit")
    message = "the default runtime, runc, is not NVIDIA's: its containers don't see the driver"
    assert (found.state, message in found.message) == ("warning", True)


async def test_a_runtime_that_does_not_answer(settings: Settings) -> None:
    found = await look(settings)
    message = "can't ask the container runtime for its default runtime"
    assert (found.state, message in found.message) == ("error", True)
    assert (await look(settings, "toolkit")).state == "ok"
    assert (await look(settings, "mounts")).state == "ok"


async def test_a_simulated_node_has_no_drivers_files(settings: Settings) -> None:
    assert (await look(settings, simulated=True)).state == "skipped"
    assert (await look(settings, "mounts", simulated=True)).state == "ok"
