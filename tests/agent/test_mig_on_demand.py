"""The whole agent creates MIG devices for containers, behind the real binding of NVML: restarts, kills, a lost ledger, processes."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from gpumgr.common.units import CORE_RESOURCE, REPLICA_RESOURCE
from gpumgr.sim.control import SimProcess
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.demo.process import COMMAND
from gpumgr.sim.kubelet import SimContainer
from tests.background import until

from .stage import RUNNER, essence, introduce, lose_ledger, run
from .test_mig import started, write_node

ON_DEMAND = {"GPUMGR_NODE_PROFILE": "both", "GPUMGR_HAMI_OPERATING_MODE": "mig"}


def node_of(folder: Path) -> str:
    """An A100 without MIG mode, and a small GPU that does not support it."""
    small: dict[str, str | int] = {"model": "NVIDIA A10", "memory_mib": 2048, "mig": "unsupported"}
    return write_node(folder, {"a100": {"mig": "disabled"}, "other": small}, {"model": "a100"}, {"model": "other"})


@contextlib.asynccontextmanager
async def on_demand(
    folder: Path, environ: Mapping[str, str] = ON_DEMAND, command: Sequence[str] = COMMAND
) -> AsyncIterator[SimulatedNode]:
    async with started(folder, environ, node_of(folder), command) as node:
        await node.agent.while_running(node.kubelet.until(lambda: allocatable(node) == 17))
        yield node


def allocatable(node: SimulatedNode) -> int:
    """7 MIG devices and 10 shares of the other GPU at most."""
    status = node.kubelet.node_status().get(REPLICA_RESOURCE)
    return status.allocatable if status else 0


def share(memory: int, gpus: int = 1) -> SimContainer:
    return SimContainer(name="main", others=((REPLICA_RESOURCE, gpus), ("nvidia.com/gpumem", memory)))


def profiles(node: SimulatedNode) -> list[str]:
    return sorted(each.profile for each in node.control.mig_instances(0).values())


async def test_devices_come_and_go_with_their_pods_over_restarts_and_a_lost_ledger(folder: Path) -> None:
    async with on_demand(folder) as node:
        assert node.agent_log.find("mig_mode_enabled")
        large = await run(node, "large", share(9000))
        small = [await run(node, f"small-{number}", share(4000)) for number in range(6)]
        before = node.ledger()
        (held,) = before.of(None, large.uid)
        assert [each.profile for each in held.mig_devices] == ["1g.10gb"]
        created = node.control.mig_instances(0)
        for lost in (False, True):
            await (lose_ledger(node) if lost else node.agent.kill())
            await node.start_agent(ON_DEMAND)
            await node.kubelet.until_allocatable(REPLICA_RESOURCE)
            await node.kubelet.start_container(large, "main")
            assert essence(node.ledger()) == essence(before)
            assert node.control.mig_instances(0) == created
        (uuid,) = (each.uuid for each in held.mig_devices)
        node.control.set_processes(0, [SimProcess(pid=4711, mig_uuid=uuid)])
        for pod in (large, *small):
            node.delete(pod)
        await node.agent.while_running(node.agent_log.until("mig_device_not_destroyed"))
        await node.agent.while_running(until(lambda: profiles(node) == ["1g.10gb"]))
        assert "4711" in str(node.agent_log.find("mig_device_not_destroyed")[-1]["reason"])
        node.control.set_processes(0, [])
        await node.agent.while_running(until(lambda: profiles(node) == []))
        assert len(node.agent_log.find("mig_device_not_destroyed")) == 1
        # Neither cores nor blocks of the GPU in MIG mode are offered.
        assert node.kubelet.node_status()[CORE_RESOURCE].allocatable == 100


async def test_a_kill_during_allocate_leaves_no_device(folder: Path) -> None:
    async with on_demand(folder, ON_DEMAND | {"DIE_AT": "after_commit_before_answer"}, command=RUNNER) as node:
        victim = node.pod("victim", share(38000))
        await introduce(node, victim)
        assert (await node.kubelet.admit(victim)).phase == "Failed"
        assert await node.agent.ended() == -signal.SIGKILL  # its sockets close before it gives up its lock
        assert profiles(node) == ["7g.40gb"]
        await node.start_agent(ON_DEMAND)
        node.set_status(victim, node.kubelet.statuses[victim.uid])
        await node.agent.while_running(until(lambda: profiles(node) == []))
        await node.agent.while_running(node.kubelet.until(lambda: allocatable(node) == 17))
        await run(node, "next", share(38000))
        assert profiles(node) == ["7g.40gb"]


async def test_devices_of_containers_that_a_rebuilt_ledger_lacks_are_kept(folder: Path) -> None:
    """The ledger is lost, and the driver can't describe the GPU at that start."""
    async with on_demand(folder) as node:
        pod = await run(node, "large", share(9000))
        (held,) = node.ledger().of(None, pod.uid)
        await lose_ledger(node)
        node.control.set_result("nvmlDeviceGetMemoryInfo_v2", 999, gpu=0)
        node.control.set_result("nvmlDeviceGetMemoryInfo", 999, gpu=0)
        for back in (False, True):
            await node.start_agent(ON_DEMAND)
            await node.agent.while_running(node.kubelet.until(lambda: allocatable(node) == 10))
            if not back:
                await node.agent.kill()
        node.control.set_result("nvmlDeviceGetMemoryInfo_v2", 0, gpu=0)
        node.control.set_result("nvmlDeviceGetMemoryInfo", 0, gpu=0)
        await node.agent.while_running(node.kubelet.until(lambda: allocatable(node) > 10))
        await asyncio.sleep(2.5)  # two rounds of the destruction of devices without containers
        assert [each.uuid for each in node.control.mig_instances(0).values()] == [each.uuid for each in held.mig_devices]
        assert not node.agent_log.find("mig_device_destroyed")


async def test_a_mode_that_needs_a_reset_is_reported_and_used_after_it(folder: Path) -> None:
    async with started(folder, {}, node_of(folder)) as node:
        node.control.require_reset_for_mig(0)
        await node.agent.kill()
        await node.start_agent(ON_DEMAND)
        await node.agent.while_running(node.agent_log.until("mig_mode_not_enabled"))
        assert "gpumgr gpu reset" in str(node.agent_log.find("mig_mode_not_enabled")[0]["reason"])
        await node.agent.while_running(node.kubelet.until(lambda: allocatable(node) == 10))
        node.control.restore_gpu(0)
        await node.agent.while_running(node.kubelet.until(lambda: allocatable(node) == 17))
