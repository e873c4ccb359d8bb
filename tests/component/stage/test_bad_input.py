"""Input that no healthy kubelet, disk or host gives: the agent answers each with a sentence, and the ledger does not change.

More ids are in tests/unit/ledger/test_ids.py and test_grant.py.

What people write wrongly is tested with the part that reads it: settings in tests/unit/settings/test_load_settings.py and
test_gpu_manager_flags.py (and, for the exit code, tests/agent/test_start_and_stop.py), topology text in
tests/unit/placement/test_matrix.py and tests/unit/cli/test_topology.py, state files and lines of requests in
tests/unit/cli/test_place.py, descriptions of simulated nodes in tests/unit/driver/test_sim_nodes.py. Damaged checkpoints are in
tests/component/ledger/test_store.py, malformed messages in tests/unit/kubelet/deviceplugin/test_plugin_messages.py, kubelets
that refuse a registration in tests/component/kubelet/deviceplugin/test_registration.py. A full disk is in
tests/agent/test_recovery.py, a clock that is set back in tests/unit/agent/test_history.py, a second agent
in tests/unit/kubelet/deviceplugin/test_node_lock.py.
"""

from pathlib import Path

import pytest

from gpumgr.common.errors import Refusal
from gpumgr.common.proc import HostProcesses
from gpumgr.common.units import CORE_RESOURCE
from gpumgr.driver.hardware_events import HardwareEvents
from gpumgr.placement.devices import NodeSample

from .stage import app, snapshot, stage


def cores(gpu: int, number: int) -> list[str]:
    return [f"{gpu:08x}-c{n:02}" for n in range(number)]


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (["5f3a9c01-c00"], "device id '5f3a9c01-c00' is none of this node's core ids"),
        ([], "the kubelet's request to allocate has no core ids"),
        (["00000000-c00", "00000001-c00"], r"a share must lie on one GPU .* GPU0 \(00000000\), GPU1 \(00000001\)"),
    ],
    ids=["unknown", "none", "two GPUs"],
)
async def test_ids_that_can_not_be_granted(folder: Path, ids: list[str], sentence: str) -> None:
    async with stage(folder) as node:
        with pytest.raises(Refusal, match=sentence):
            await node.agent.allocate("core", ids)
        assert not node.ledger.allocations
        assert not node.checkpoint.allocations
        assert (await node.run(node.pod("after", app(20, 4)))).phase == "Running"


async def test_a_start_without_ids_is_refused_with_a_sentence(folder: Path) -> None:
    async with stage(folder) as node:
        assert (await node.run(node.pod("holder", app(20, 4)))).phase == "Running"
        with pytest.raises(Refusal, match="the kubelet's request before a container's start has no core ids"):
            await node.agent.pre_start("core", [])


async def test_held_ids_are_not_allocated_again(folder: Path) -> None:
    async with stage(folder) as node:
        holder = node.pod("holder", app(100, 16))
        assert (await node.run(holder)).phase == "Running"
        before = node.ledger
        with pytest.raises(
            Refusal, match=r"handed out 5 core ids \(00000000-c00 \.\.\.\) that .*team/holder.* still holds; nothing was"
        ):
            await node.agent.allocate("core", cores(0, 5))
        assert node.ledger == before


async def test_a_preference_among_unknown_ids_takes_known_ones(folder: Path) -> None:
    strange = [f"none-{n}" for n in range(100_000)]
    async with stage(folder) as node:
        assert sorted(await node.agent.prefer("core", [*strange, *cores(2, 100)], [], 3)) == cores(2, 3)
        with pytest.raises(Refusal, match="device id 'none-0' is none of this node's core ids"):
            await node.agent.prefer("core", strange, strange[:1], 3)
        with pytest.raises(Refusal, match="no GPU has 3 cores"):
            await node.agent.prefer("core", strange, [], 3)


async def ignore(*_: object) -> None:
    """Somebody whom the news do not concern."""


async def test_a_gpu_without_its_device_node_is_not_offered(folder: Path) -> None:
    dev = folder / "dev"
    dev.mkdir()
    for minor in (0, 2):
        (dev / f"nvidia{minor}").touch()
    async with stage(folder, node=snapshot(3)) as node:
        news = HardwareEvents(
            node.agent.agent_state,
            HostProcesses(folder),
            device_root=str(dev),
            simulated=False,
            before_snapshot=ignore,
            on_sample=ignore,
        )
        await news.snapshot_taken(snapshot(3))
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == 200)
        sick = {text for text, (healthy, _) in node.kubelet.devices(CORE_RESOURCE).items() if not healthy}
        assert sick == set(cores(1, 100))
        status = await node.run(node.pod("refused", app(20, 17)))
        why = f"its device node {dev}/nvidia1 is missing: run `nvidia-modprobe -c 1` or restart nvidia-persistenced"
        assert f"GPU1 (00000001) not offered ({why})" in (status.message or "")
        (dev / "nvidia1").touch()
        await news.sample_taken(NodeSample())
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == 300)
        node.clock.now += 5
        assert (await node.run(node.pod("all", app(300)))).phase == "Running"
