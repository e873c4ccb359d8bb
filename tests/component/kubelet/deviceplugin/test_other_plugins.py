"""Another plugin for the same GPUs comes, stays and goes while the agent runs; one agent on a node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpumgr.common.errors import GpumgrError
from gpumgr.kubelet.other_plugins import OtherDevicePlugins, lock_folder, lock_node
from tests.component.cli.examination.conftest import listening


async def test_another_plugin_is_reported_once_when_present_and_once_when_gone(folder: Path) -> None:
    plugins = OtherDevicePlugins(folder)
    with capture_logs() as logs:
        await plugins.check()
        assert not logs
        with listening(folder / "nvidia-gpu.sock"), listening(folder / "gpumgr-core.sock"):
            await plugins.check()
            await plugins.check()
        await plugins.check()  # its socket still exists, and no server answers
        await plugins.check()
    came, went = logs
    assert (came["event"], came["log_level"]) == ("gpus_given_out_twice", "warning")
    assert f"answers at {folder}/nvidia-gpu.sock: it allocates these GPUs as nvidia.com/gpu" in came["problem"]
    assert came["remedy"].startswith("keep it off this node")
    assert (went["event"], went["log_level"]) == ("gpus_given_out_once", "info")


async def test_a_second_plugin_is_reported(folder: Path) -> None:
    plugins = OtherDevicePlugins(folder)
    with capture_logs() as logs, listening(folder / "nvidia-gpu.sock"):
        await plugins.check()
        with listening(folder / "vcore.sock"):
            await plugins.check()
    assert [line["problem"].partition(" answers")[0] for line in logs] == ["NVIDIA's device plugin, or HAMi's,", "gpu-manager"]


async def test_plugins_with_the_same_names_hold_a_registration_back(folder: Path) -> None:
    plugins = OtherDevicePlugins(folder)
    with listening(folder / "nvidia-gpu.sock"):
        assert await plugins.with_same_names(nvidia=False) is None
        assert str(await plugins.with_same_names(nvidia=True)).startswith("NVIDIA's device plugin, or HAMi's, answers at")
        with listening(folder / "vmemory.sock"):
            reason = str(await plugins.with_same_names(nvidia=False))
        assert reason.startswith(f"gpu-manager answers at {folder}/vmemory.sock: ")
        assert "; stop it first; " in reason
        assert await plugins.with_same_names(nvidia=False) is None


def test_death_releases(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import os, sys; from pathlib import Path; from gpumgr.kubelet.other_plugins import lock_node\n"
        "with lock_node(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    with lock_node(path):
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GpumgrError, match="No such file or directory"), lock_node(tmp_path / "none" / "lock"):
        raise AssertionError("a lock without a file")


def test_a_missing_plugin_folder_is_not_locked(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "missing"), lock_folder(tmp_path / "missing"):
        pass
