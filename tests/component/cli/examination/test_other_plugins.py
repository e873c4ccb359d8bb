"""Other plugins and other agents on the node."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from gpumgr.cli.examination import ok
from gpumgr.cli.examination.peers import look_at_agent, look_at_plugins
from gpumgr.kubelet.other_plugins import lock_folder, lock_node

from .conftest import brief, listening


@pytest.mark.parametrize(
    ("names", "who"),
    [
        (("nvidia-gpu.sock",), "NVIDIA's device plugin, or HAMi's, answers at DIR/nvidia-gpu.sock: "),
        (("nvidia.sock",), "NVIDIA's device plugin, or HAMi's, answers at DIR/nvidia.sock: "),
        (("nvidiaGPU-1700000000.sock",), "NVIDIA's device plugin, or HAMi's, answers at DIR/nvidiaGPU-1700000000.sock: "),
        (("vcore.sock", "vmemory.sock", "nvidia.sock"), "gpu-manager answers at DIR/vcore.sock and DIR/vmemory.sock: "),
    ],
)
async def test_who_gives_out_the_same_gpus_is_an_error(names: tuple[str, ...], who: str, folder: Path) -> None:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(listening(folder / name))
        found = look_at_plugins(folder)
    assert (found.state, found.message.replace(str(folder), "DIR").startswith(who)) == ("error", True)
    assert "gpumgr migrate" in str(found.remedy)


async def test_others_and_what_was_left_behind_are_no_error(folder: Path) -> None:
    with listening(folder / "nvidia-gpu.sock"):
        pass
    with listening(folder / "kubelet.sock"), listening(folder / "gpumgr-core.sock"), listening(folder / "rdma.sock"):
        assert look_at_plugins(folder) == ok(f"no other plugin for NVIDIA's GPUs answers in {folder}")


async def test_a_running_agent_is_ok_unless_another_one_is_to_start(folder: Path) -> None:
    lock = folder / "agent.lock"
    for _ in range(2):
        for before_start in (False, True):
            assert look_at_agent(lock, folder, before_start=before_start) == ok("none runs on this node")
        with lock_node(lock), lock_folder(folder):
            place = f"runs on this node (pid {lock.read_text().strip()}, holds {lock})"
            assert look_at_agent(lock, folder, before_start=False) == ok(f"it {place}")
            found = look_at_agent(lock, folder, before_start=True)
        assert brief(found) == ("error", f"another gpumgr {place}")
        assert "systemctl disable --now gpumgr" in str(found.remedy)


async def test_an_agent_with_a_lock_file_of_its_own(folder: Path) -> None:
    message = f"another gpumgr with another process.lock_path than {folder}/agent.lock serves {folder}"
    with lock_folder(folder):
        assert brief(look_at_agent(folder / "agent.lock", folder, before_start=False)) == ("warning", message)
        assert brief(look_at_agent(folder / "agent.lock", folder, before_start=True)) == ("error", message)
