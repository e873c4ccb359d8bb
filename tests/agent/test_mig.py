"""The whole agent with GPUs in MIG mode, behind the real binding of NVML: both strategies, changes while it runs, a lost ledger."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.common.units import REPLICA_RESOURCE
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.demo.process import COMMAND
from gpumgr.sim.kubelet import SimContainer
from gpumgr.sim.nodes import load_node

from .stage import app, essence, lose_ledger, run, stage

PREFIX = "nvidia.com/mig-"
MIXED = {"GPUMGR_NODE_MIG_STRATEGY": "mixed"}
SINGLE = {"GPUMGR_NODE_MIG_STRATEGY": "single"}
NODE = load_node("mig-4")


def mig(profile: str, number: int = 1) -> SimContainer:
    return SimContainer(name="main", others=((PREFIX + profile, number),))


def offered(node: SimulatedNode) -> Mapping[str, int]:
    return {name: each.allocatable for name, each in node.kubelet.node_status().items() if name.startswith("nvidia.com/")}


async def until_offered(node: SimulatedNode, wanted: Mapping[str, int]) -> None:
    await node.agent.while_running(node.kubelet.until(lambda: offered(node) == wanted))


@contextlib.asynccontextmanager
async def started(
    folder: Path, environ: Mapping[str, str], sim: str = "mig-4", command: Sequence[str] = COMMAND
) -> AsyncIterator[SimulatedNode]:
    async with stage(folder, sim=sim, command=command) as node:
        await node.agent.start(environ)
        yield node


@pytest.mark.hami_bug("B25: static MIG needs a pod of HAMi's scheduler, and its resources overwrite one annotation")
async def test_each_profile_is_a_resource_and_each_mig_device_has_one_holder(folder: Path) -> None:
    async with started(folder, MIXED) as node:
        await until_offered(
            node,
            {PREFIX + name: 2 if name == "1g.5gb" else 1 for name in ("3g.20gb", "2g.10gb", "1g.5gb", "1c.3g.20gb", "1g.5gb.me")},
        )
        small = [await run(node, f"small-{number}", mig("1g.5gb")) for number in range(2)]
        part = await run(node, "part", mig("1c.3g.20gb"))
        for name, container in (("media", mig("1g.5gb.me")), ("vcuda", app(100))):
            await run(node, name, container)
        expected = {each.uuid for each in NODE.mig_instances_of(2) if each.profile == "1g.5gb"}
        ids = [node.kubelet.held(pod.uid, "main", PREFIX + "1g.5gb") for pod in small]
        assert (set().union(*ids), [len(each) for each in ids]) == (expected, [1, 1])
        response = await node.kubelet.start_container(small[0], "main")
        assert {response.envs["NVIDIA_VISIBLE_DEVICES"]} == ids[0]
        before = node.ledger()
        (held,) = before.of(None, part.uid)
        assert [(each.cores, each.memory_mebibytes) for each in held.gpus.values()] == [(0, 20 * 1024 // 3)]
        for lost in (False, True):
            await (lose_ledger(node) if lost else node.agent.kill())
            await node.start_agent(MIXED)
            await node.kubelet.until_allocatable(PREFIX + "1g.5gb")
            assert essence(node.ledger()) == essence(before)
            await node.kubelet.start_container(small[0], "main")


async def test_mig_devices_that_come_and_go_are_followed_and_a_held_one_is_not_forgotten(folder: Path) -> None:
    instances = NODE.mig_instances_of(2)
    async with started(folder, MIXED) as node:
        await node.kubelet.until_allocatable(PREFIX + "3g.20gb")
        pod = await run(node, "holder", mig("3g.20gb"))
        new = replace(instances[1], uuid="MIG-ffffffff-1111-2222-3333-444444444444", profile="4g.20gb")
        node.control.set_mig_instances(2, {0: new, 2: instances[2]})
        await until_offered(
            node,
            {PREFIX + name: 1 for name in ("1g.5gb", "1c.3g.20gb", "1g.5gb.me", "4g.20gb")}
            | dict.fromkeys((PREFIX + "3g.20gb", PREFIX + "2g.10gb"), 0),
        )
        await node.agent.while_running(node.agent_log.until("mig_device_gone"))
        (line,) = node.agent_log.find("mig_device_gone")
        assert line["reason"] == f"MIG device 3g.20gb ({instances[0].uuid}) no longer exists, and demo/holder (main) holds it"
        assert node.ledger().of(None, pod.uid)
        node.control.set_mig_instances(2, dict(enumerate(instances)))
        again = {PREFIX + "3g.20gb": 1, PREFIX + "1g.5gb": 2}  # each resource has a stream of its own
        await node.agent.while_running(node.kubelet.until(lambda: again.items() <= offered(node).items()))
        await run(node, "more", mig("1g.5gb", 2))


def write_node(folder: Path, models: Mapping[str, Mapping[str, str | int]], *gpus: Mapping[str, object]) -> str:
    """The file of a node with these GPUs. A model is an A100 with 40 GB, except for what `models` says of it."""
    usual = {"model": "NVIDIA A100-SXM4-40GB", "memory_mib": 40960, "reserved_mib": 571, "idle_celsius": 31, "idle_watts": 34}
    places = ({"bus_id": f"0000:0{n}:00.0", "numa_node": 0, "pcie": ["pci0000:00"]} for n in range(len(gpus)))
    node = {"about": "MIG", "driver_version": "535.183.01", "cuda_version": "12.2"}
    node_models = {name: {**usual, **model} for name, model in models.items()}
    path = folder / "node.yaml"
    path.write_text(json.dumps({**node, "models": node_models, "gpus": [{**a, **b} for a, b in zip(places, gpus, strict=True)]}))
    return str(path)


def node_of(folder: Path, profiles: Sequence[str]) -> str:
    """A GPU in MIG mode for each profile, with two of these MIG devices."""
    gpus = [{"model": "a100", "mig_instances": [profile] * 2} for profile in profiles]
    return write_node(folder, {"a100": {"mig": "enabled"}}, *gpus)


async def test_with_single_all_mig_devices_are_one_resource(folder: Path) -> None:
    async with started(folder, SINGLE, node_of(folder, ["3g.20gb", "3g.20gb"])) as node:
        await until_offered(node, {REPLICA_RESOURCE: 4})
        pair = SimContainer(name="main", others=((REPLICA_RESOURCE, 2),))
        pods = [await run(node, f"pod-{number}", pair) for number in range(2)]
        assert len(set().union(*(node.kubelet.held(pod.uid, "main", REPLICA_RESOURCE) for pod in pods))) == 4
        node.control.lose_gpu(0)
        await until_offered(node, {REPLICA_RESOURCE: 2})


async def test_with_single_unequal_mig_devices_are_not_offered(folder: Path) -> None:
    async with started(folder, SINGLE, node_of(folder, ["3g.20gb", "2g.10gb"])) as node:
        await node.agent.while_running(node.agent_log.until("mig_devices_not_offered"))
        await node.agent.while_running(node.agent_log.until("registered"))
        (line,) = node.agent_log.find("mig_devices_not_offered")
        assert "have 2g.10gb, 3g.20gb: set node.mig_strategy to mixed" in str(line["reason"])
        assert offered(node) == {}
