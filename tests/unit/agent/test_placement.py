"""Pods that the scheduler placed (annotation gpumgr.io/placement), from the kubelet's calls to the ledger."""

from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.component.stage.stage import app, snapshot

from .world import Refused, World, played


async def made(**options: Any) -> World:
    return await World.made(snapshot(4, 16), **options)


def gpus(world: World) -> dict[str, set[int]]:
    """Pod -> its GPUs."""
    names = [gpu.name for gpu in world.ledger.gpu_registry.gpus]
    result: dict[str, set[int]] = {}
    for a in world.ledger.allocations.values():
        result.setdefault(a.pod[1] if a.pod else "", set()).update(names.index(gpu) for gpu in a.places)
    return result


async def test_a_restart_between_the_preference_and_allocate_does_not_move_the_pod() -> None:
    world = await made()
    world.placed = {"a": 3}

    plugin_allocate = world.kubelet.clients["tencent.com/vcuda-core"].allocate
    restarted: list[bool] = []

    async def allocate(ids: object) -> object:
        if not restarted:
            restarted.append(True)
            await world.restart()
        return await plugin_allocate(ids)  # type: ignore[arg-type]

    world.kubelet.clients["tencent.com/vcuda-core"].allocate = allocate  # type: ignore[method-assign, assignment]
    await world.run(world.pod("a", app(30, 4)))
    assert restarted
    assert gpus(world) == {"a": {3}}


async def test_an_ignored_placement_is_an_event_once_and_the_agent_chooses() -> None:
    world = await made(known=False)
    reason = "the annotation gpumgr.io/placement is ignored: it is about node other"
    pod = world.pod("a", app(30, 4), app(5, 1, "side"))
    world.pods.views["team", "a"] = replace(world.view(pod), placement_ignored=reason)
    with capture_logs() as logs:
        await world.run(pod)
    (entry,) = [entry for entry in world.agent_state.history.entries() if entry.what == "event"]
    assert (entry.code, entry.pod, entry.why) == ("GpuPlacementIgnored", ("team", "a"), reason)
    assert [log["event"] for log in logs].count("placement_ignored") == 1
    assert gpus(world) == {"a": {0}}


def test_a_placed_pod_is_identified_by_list_alone() -> None:
    """Without PodResources, a pod that is not known yet could be the caller, too."""

    async def scenario(world: World) -> None:
        world.away = True
        world.placed = {"a": 3}
        other = world.pod("b", app(30, 4))
        with pytest.raises(Refused, match=r"did not answer for 5 s .* \(team/a\); the pod's controller must replace the pod"):
            await world.run(world.pod("a", app(30, 4)))
        await world.run(other)
        assert set(gpus(world)) == {"b"}

    played(scenario, node=snapshot(4, 16))
