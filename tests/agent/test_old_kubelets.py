"""The agent against kubelets of 1.20 to 1.25, as the stand-in implements them (gpumgr.sim.kubelet_pods)."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.common.units import RESOURCE_NAMES, RESOURCES
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from gpumgr.sim.kubelet_pods import SUPPORTED, V1_20, V1_25, V1_35, KubeletVersion

from .stage import BLOCKS, PATIENT, app, essence, init, lose_ledger, run, running

OLD = [shape for shape in SUPPORTED.values() if shape is not V1_35]

old_kubelets = pytest.mark.parametrize("shape", OLD, ids=[shape.version for shape in OLD])


async def run_three(node: SimulatedNode) -> list[SimPod]:
    """An init container with two apps, two whole GPUs, and a share; a GPU has room left."""
    pods = {"a": (init(40, 8), app(30, 4), app(20, 2, "side")), "b": (app(200),), "c": (app(5, 1),)}
    return [await run(node, name, *containers) for name, containers in pods.items()]


def end(node: SimulatedNode, pod: SimPod) -> None:
    """The pod has succeeded. The API server still has it, and so has an old kubelet's List."""
    node.runtime.remove(pod.uid)
    node.kubelet.end(pod.uid)
    node.set_status(pod, node.kubelet.statuses[pod.uid])


def complaints(node: SimulatedNode) -> set[str]:
    """What the log warns of, but for the settings' own choice of no enforcement."""
    quiet = ("debug", "info")
    return {line["event"] for line in node.agent_log.lines if line.get("level") not in quiet} - {"enforcement"}


async def restart(node: SimulatedNode, shape: KubeletVersion) -> None:
    """The kubelet starts anew, as this one, and has both resources from the agent again."""
    await node.kubelet.restart(sources_ready=False, shape=shape)
    await node.until_offered()
    node.kubelet.finish_sources()


@old_kubelets
async def test_pods_come_and_go_as_on_a_new_one(folder: Path, shape: KubeletVersion) -> None:
    async with running(folder, command=PATIENT, shape=shape) as node:
        a, b, c = await run_three(node)
        assert node.disagreements() == []
        assert "GetPreferredAllocation" in {call.rpc for call in node.kubelet.calls}
        await node.agent.kill()
        before = node.ledger()
        await node.start_agent()
        assert node.ledger() == before
        for pod in (a, b, c):
            await node.kubelet.start_container(pod, "main")

        end(node, b)
        await run(node, "heir", app(200))
        await node.agent_log.until("allocation_freed", holder="demo/b (main)")
        node.delete(b)
        await run(node, "last", app(100, BLOCKS))
        assert complaints(node) == set()

        before = node.ledger()
        await restart(node, shape)
        assert node.ledger() == before
        await run(node, "late", app(10, 1))
        assert node.disagreements() == []
        # The sweep after the end of `b` may meet the restart.
        assert complaints(node) - {"pod_resources_unavailable"} == {"registration_lost"}


@old_kubelets
async def test_a_lost_ledger_comes_from_the_kubelet(folder: Path, shape: KubeletVersion) -> None:
    async with running(folder, command=PATIENT, shape=shape) as node:
        pods = await run_three(node)
        before = node.ledger()
        ended = await run(node, "ended", app(20, 2))
        await lose_ledger(node)
        end(node, ended)
        await node.start_agent()
        assert essence(node.ledger()) == essence(before)
        for pod in pods:
            await node.kubelet.start_container(pod, "main")
        await run(node, "heir", app(100, BLOCKS))
        assert node.disagreements() == []
        assert complaints(node) == {"allocation_adopted"}


@pytest.mark.parametrize("shape", [V1_20, V1_25], ids=["1.20", "1.25"])
async def test_nothing_is_lost_without_an_api_server(folder: Path, shape: KubeletVersion) -> None:
    async with running(folder, command=PATIENT, shape=shape, api_server=False) as node:
        pods = await run_three(node)
        await lose_ledger(node)
        await node.start_agent()
        ledger = node.ledger()
        for kind in RESOURCES:
            resource = RESOURCE_NAMES[kind]
            theirs = {each for pod in pods for one in pod.containers for each in node.kubelet.held(pod.uid, one.name, resource)}
            assert theirs == set(ledger.gpu_registry.format(kind, ledger.held(kind)))
        for pod in pods:
            await node.kubelet.start_container(pod, "main")
        assert complaints(node) == {"allocation_adopted"}


async def test_a_kubelet_is_upgraded_under_its_pods(folder: Path) -> None:
    async with running(folder, command=PATIENT, shape=V1_20) as node:
        pods = await run_three(node)
        before = node.ledger()
        await restart(node, V1_35)
        for pod in pods:
            await node.kubelet.start_container(pod, "main")
        assert node.ledger() == before
        end(node, pods[1])
        await run(node, "heir", app(300))
        assert node.disagreements() == []


async def test_a_kubelet_that_is_too_old_is_reported_once(folder: Path) -> None:
    """Before 1.20: placement goes by the order of calls, and the API server alone reports ends of pods."""
    async with running(folder, command=PATIENT, shape=replace(V1_20, calls=frozenset())) as node:
        await run_three(node)
        before = node.ledger()
        assert node.disagreements() == []
        (line,) = node.agent_log.find("pod_resources_unavailable")
        assert "unknown service v1.PodResourcesLister" in line["error"]
        assert complaints(node) == {"pod_resources_unavailable"}
        await lose_ledger(node)
        await node.start_agent()
        assert essence(node.ledger()) == essence(before)
