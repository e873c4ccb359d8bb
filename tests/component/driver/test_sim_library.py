"""The simulated library: how it is compiled, and that any process can use it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpumgr.cli.topology import read_snapshot
from gpumgr.common.errors import InputError, SettingsError
from gpumgr.sim import library
from gpumgr.sim.control import SimProcess
from gpumgr.sim.library import compile_library, prepare

from .conftest import Prepare


def run_python(source: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(source)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=30, check=False)


def test_a_node_that_exists_is_not_made_again(tmp_path: Path) -> None:
    """The agents of an update may start at the same time, and read the files of one node."""

    def inodes() -> dict[Path, int]:
        return {path: path.lstat().st_ino for path in tmp_path.rglob("*")}

    def stamps() -> dict[Path, int]:
        return {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}

    prepare("hgx-h100-8", tmp_path)
    before = inodes(), stamps()
    prepare("hgx-h100-8", tmp_path)
    assert (inodes(), stamps()) == before
    prepare("dgx1-v100-8", tmp_path)
    assert inodes() != before[0]


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_FLAGS", ("--no-such-flag",))
    with pytest.raises(InputError, match=r"can't be compiled .*no-such-flag"):
        compile_library()
    assert list((tmp_path / "gpumgr").iterdir()) == []


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"can't be created in .*file/node: Not a directory"):
        prepare("mixed-2", tmp_path / "file" / "node")


def test_commands_see_a_simulated_node_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(read_snapshot("hgx-h100-8").gpus) == 8
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SettingsError, match="give a file or one of"):
        read_snapshot("dgx-9")


def test_another_process_finds_it_by_the_search_path(node: Prepare) -> None:
    sim = node("hgx-h100-8")
    sim.control.set_processes(2, [SimProcess(pid=77, memory_bytes=5, sm_percent=40)])
    seen = run_python(
        """
        import pynvml
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(2)))
        same = pynvml.nvmlDeviceGetHandleByPciBusId("0000:3a:00.0")
        print(pynvml.nvmlDeviceGetCount(), pynvml.nvmlDeviceGetIndex is not None, pynvml.nvmlDeviceGetMinorNumber(same))
        print([(p.pid, p.smUtil) for p in pynvml.nvmlDeviceGetProcessUtilization(gpu, 0)])
        print(pynvml.nvmlDeviceGetP2PStatus(gpu, pynvml.nvmlDeviceGetHandleByIndex(3), 0))
        print(pynvml.nvmlDeviceGetFieldValues(gpu, [4, 230])[0].value.ullVal)
        try:
            pynvml.nvmlDeviceGetProcessUtilization(same, 2**63)
        except pynvml.NVMLError as error:
            print(error.value, error)
        pynvml.nvmlShutdown()
        """,
        LD_LIBRARY_PATH=str(Path(sim.library_path).parent),
    )
    assert (seen.stderr, seen.stdout) == ("", "8 True 2\n[(77, 40)]\n0\n0\n6 Not Found\n")


def test_a_hung_call_does_not_hold_up_the_end_of_the_process(node: Prepare) -> None:
    sim = node("mixed-2")
    ended = run_python(
        f"""
        import asyncio
        from pathlib import Path
        from gpumgr.common.errors import NvmlError
        from gpumgr.driver.driver import Nvml
        from gpumgr.sim.control import SimControl

        async def main():
            nvml = Nvml(library_path={sim.library_path!r}, timeout_seconds=20)
            await nvml.open()
            await nvml.snapshot()
            await nvml.watch_events(lambda uuid, event: None)
            SimControl(Path({str(sim.control.path)!r})).hang()
            nvml._timeout_seconds = 0.2  # from now on
            try:
                await nvml.read()
            except NvmlError as error:
                print(error)
            await nvml.close()

        asyncio.run(main())
        """
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "NVML gave no answer within 0.2 s: the driver hangs\n")
