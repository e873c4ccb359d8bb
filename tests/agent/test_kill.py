"""`kill -9` at every named step of an allocation: what was committed is there again, what the kubelet lacks is freed, nothing is lost."""

import signal
from pathlib import Path

import pytest

from gpumgr.common.units import RESOURCES
from gpumgr.sim.demo.node import NAMESPACE, SimulatedNode
from gpumgr.sim.kubelet import SimKubeletError, SimPod

from .stage import RUNNER, app, introduce, run, running

#: The step, the how manieth time, and which resources of the dying pod's container are committed by then. Cores come first here.
FIRST_RESOURCE = {
    ("at_preference", 1): [],
    ("before_preference_answer", 1): [],
    ("at_allocate", 1): [],
    ("before_commit", 1): [],
    ("after_commit_before_answer", 1): ["core"],
}
SECOND_RESOURCE_AND_START = {
    ("at_preference", 2): ["core"],  # the first answer has reached the kubelet
    ("before_commit", 2): ["core"],
    ("after_commit_before_answer", 2): ["core", "memory"],
    ("before_prestart", 1): ["core", "memory"],
    ("after_prestart", 2): ["core", "memory"],
}
#: A pod of both resources passes every step so often. In each of the agent's lives one does so before the next dies.
A_POD = 2


@pytest.mark.parametrize(
    "steps", [FIRST_RESOURCE, SECOND_RESOURCE_AND_START], ids=["first_resource", "second_resource_and_start"]
)
async def test_a_restart_loads_what_was_committed_and_frees_what_the_kubelet_lacks(
    folder: Path, steps: dict[tuple[str, int], list[str]]
) -> None:
    deaths = [{"DIE_AT": f"{step}:{A_POD + number}"} for step, number in steps]
    async with running(folder, environ=deaths[0], command=RUNNER, resource_order="core_first") as node:
        await run(node, "bystander", app(20, 2))
        for number, (step, committed) in enumerate(steps.items()):
            victim = node.pod(f"victim-{number}", app(30, 4))
            admitted = await _run_until_killed(node, victim)
            before = node.ledger()
            assert [kind for kind in RESOURCES for a in before.of(None, victim.uid) if a.held(kind)] == committed, step

            began = len(node.agent_log.lines)
            await node.start_agent(deaths[number + 1] if number + 1 < len(deaths) else None)
            shown = {holder["allocation"] for gpu in await node.graph() for holder in gpu["holders"]}
            assert shown == set(before.allocations), step
            assert node.ledger() == before, step
            if admitted:
                await node.kubelet.start_container(victim, "main")
            else:
                await _replace(node, victim, holds=bool(committed), began=began)
            assert node.disagreements() == [], step
            assert len(node.ledger().allocations) == number + 2, step


async def _replace(node: SimulatedNode, victim: SimPod, *, holds: bool, began: int) -> None:
    """The kubelet has failed the pod: what it holds in the ledger is freed, and the pod that comes in its place runs."""
    node.set_status(victim, node.kubelet.statuses[victim.uid])
    if holds:
        await node.agent_log.until("allocation_freed", since=began, holder=f"{NAMESPACE}/{victim.name} (main)")
    node.delete(victim)
    await run(node, victim.name, *victim.containers)


async def _run_until_killed(node: SimulatedNode, pod: SimPod) -> bool:
    """The agent is killed while it handles the pod, which the API server does not list yet. Returns whether the pod was admitted."""
    await introduce(node, pod)
    try:
        status = await node.kubelet.run(pod)
    except SimKubeletError:
        status = node.kubelet.statuses[pod.uid]
    assert await node.agent.ended() == -signal.SIGKILL
    return status.phase != "Failed"
