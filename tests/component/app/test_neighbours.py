"""Another plugin for the same GPUs comes, stays and goes while the agent runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpumgr.app.neighbours import Neighbours
from tests.component.deviceplugin.harness import short_folder
from tests.component.doctor.conftest import listening


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for unix sockets."""
    with short_folder() as made:
        yield made


async def test_it_is_told_once_while_it_is_there_and_once_when_it_is_gone(folder: Path) -> None:
    neighbours = Neighbours(folder)
    with capture_logs() as logs:
        await neighbours.look()
        assert not logs
        with listening(folder / "nvidia-gpu.sock"), listening(folder / "gpumgr-core.sock"):
            await neighbours.look()
            await neighbours.look()
        await neighbours.look()  # its socket is still there, and nobody answers
        await neighbours.look()
    came, went = logs
    assert (came["event"], came["log_level"]) == ("gpus_given_out_twice", "warning")
    assert f"answers at {folder}/nvidia-gpu.sock: it gives these GPUs out as nvidia.com/gpu" in came["problem"]
    assert came["remedy"].startswith("keep it off this node")
    assert (went["event"], went["log_level"]) == ("gpus_given_out_once", "info")


async def test_a_second_one_is_news(folder: Path) -> None:
    neighbours = Neighbours(folder)
    with capture_logs() as logs, listening(folder / "nvidia-gpu.sock"):
        await neighbours.look()
        with listening(folder / "vcore.sock"):
            await neighbours.look()
    assert [line["problem"].partition(" answers")[0] for line in logs] == ["NVIDIA's device plugin, or HAMi's,", "gpu-manager"]


async def test_only_gpu_manager_is_in_our_place(folder: Path) -> None:
    neighbours = Neighbours(folder)
    with listening(folder / "nvidia-gpu.sock"):
        assert await neighbours.gpu_manager() is None
        with listening(folder / "vmemory.sock"):
            reason = str(await neighbours.gpu_manager())
        assert reason.startswith(f"gpu-manager answers at {folder}/vmemory.sock: ")
        assert "; stop it first; " in reason
        assert await neighbours.gpu_manager() is None
