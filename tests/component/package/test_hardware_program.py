"""The program that measures limits on a GPU, where it ends before it measures anything."""

import asyncio
import ctypes
import os
import signal
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.hardware.__main__ import main, measured, options_of
from tests.hardware.bare import main as run_bare
from tests.hardware.bare import unpack
from tests.hardware.node import TenantProcesses
from tests.hardware.tenant import BLOCKS, Tenant


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mig",), "'mig' is none of limiter, mps, hami-core, nvml-memory, none"),
        (("--hami-core", "/nonexistent/libvgpu.so"), "/nonexistent/libvgpu.so is no file"),
        (("--seconds", "0"), "must be at least 1"),
        (("--minutes", "0"), "must be at least 1"),
        (("--environ", "NAME"), "'NAME' is not NAME=VALUE"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


async def test_a_mechanism_whose_agent_does_not_start_has_the_reason_and_does_not_end_the_others(tmp_path: Path) -> None:
    options = options_of(["--sim", str(tmp_path / "none.yaml")])
    result = await measured("none", options, rates={"work": 1.0}, deadline=time.monotonic() + 60)
    assert result.mechanism == "none"
    assert "none.yaml" in (result.obstacle or "")


async def test_what_the_time_of_the_whole_run_does_not_allow_is_not_measured() -> None:
    options = options_of(["--sim", "hgx-h100-8", "--minutes", "3"])
    result = await measured("none", options, rates={"work": 1.0}, deadline=time.monotonic())
    assert result.obstacle == "the 3 minutes of the whole run were over (--minutes)"


class RecordingCuda:
    """The driver's library, which does nothing: `grids` of the launches. It shows `multiprocessors`."""

    def __init__(self, multiprocessors: int) -> None:
        self.grids: list[tuple[object, ...]] = []
        self._multiprocessors = multiprocessors

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self._called(name, arguments)

    def _called(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name == "cuDeviceGetAttribute":
            arguments[0]._obj.value = self._multiprocessors
        if name == "cuLaunchKernel":
            self.grids.append(arguments[1:7])
        return 0


@pytest.mark.parametrize("multiprocessors", [32, 132])
def test_a_launch_is_the_same_work_for_every_share(multiprocessors: int) -> None:
    """Under MPS, CUDA shows a tenant only the multiprocessors of its share."""
    cuda = RecordingCuda(multiprocessors)
    tenant = Tenant(cast("ctypes.CDLL", cuda))
    assert tenant.init()["multiprocessors"] == multiprocessors
    assert tenant.work(0)["launches"] == 1
    assert cuda.grids == [(BLOCKS, 1, 1, 256, 1, 1)]


def test_a_machine_with_nothing_but_python_gets_the_packages_out_of_wheels(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "part-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("part/__init__.py", "")
        wheel.writestr("part-1.data/purelib/other.py", "")
        wheel.writestr("part-1.data/scripts/part", "")
    packages = tmp_path / "packages"
    unpack(tmp_path / "part-1-py3-none-any.whl", packages)
    found = {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}
    assert found == {"part/__init__.py", "other.py"}


def test_a_folder_without_wheels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bare([str(tmp_path), "none"]) == 2
    assert f"there is no wheel in {tmp_path}" in capsys.readouterr().err


def test_a_tenant_that_ended_is_an_obstacle_with_its_status(tmp_path: Path) -> None:
    tenants = TenantProcesses(tmp_path)
    tenants.program = tmp_path / "waits.py"  # the usual one ends by itself where there is no driver
    tenants.program.write_text("import signal; signal.pause()")
    pid = tenants.start()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match="a tenant ended with status -9 at 'init'"):
        asyncio.run(tenants.ask(pid, "init"))
    tenants.close()
