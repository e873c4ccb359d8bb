"""Input that no healthy kubelet, disk or host gives: the agent answers each with a sentence, and the ledger does not change.

More ids are in tests/unit/ledger/test_ids.py and test_grant.py.

What people write wrongly is tested with the part that reads it: settings in tests/unit/settings/test_load_settings.py and
test_gpu_manager_flags.py (and, for the exit code, tests/agent/test_start_and_stop.py), topology text in
tests/unit/placement/test_matrix.py and tests/component/cli/test_topology.py, state files and lines of requests in
tests/unit/cli/test_place.py, descriptions of simulated nodes in tests/unit/driver/test_sim_nodes.py. Damaged checkpoints are in
tests/component/ledger/test_store.py, malformed messages in tests/unit/kubelet/test_messages.py, kubelets
that refuse a registration in tests/component/kubelet/deviceplugin/test_registration.py. A full disk is in
tests/agent/test_recovery.py, a clock that is set back in tests/unit/agent/test_history.py, a second agent
in tests/component/kubelet/deviceplugin/test_other_plugins.py.
"""

from pathlib import Path

import pytest

from gpumgr.common.errors import Refusal

from .stage import app, stage


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
        await node.run_all(node.pod("after", app(20, 4)))
        with pytest.raises(Refusal, match="the kubelet's request before a container's start has no core ids"):
            await node.agent.pre_start("core", [])


async def test_held_ids_are_not_allocated_again(folder: Path) -> None:
    async with stage(folder) as node:
        await node.run_all(node.pod("holder", app(100, 16)))
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
