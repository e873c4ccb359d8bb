"""PreStartContainer: the last look before a container runs, at every start."""

import os

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.inventory import EMPTY, HardwareHealth
from gpumgr.common.errors import Refusal
from gpumgr.common.units import RESOURCES
from gpumgr.placement.devices import GpuFailure
from gpumgr.sim.kubelet_pods import SimContainer, SimKubeletError
from tests.component.stage.stage import app
from tests.unit.agent.world import World


@pytest.fixture
async def world() -> World:
    return await World.made()


async def test_the_folders_of_all_containers_that_share_ids_are_created(world: World) -> None:
    """The init container and the app container have the same ids, and each mounts a folder of its own."""
    containers = [SimContainer(name=f"init-{n}", cores=20, memory_blocks=2, kind="init") for n in range(2)]
    pod = world.pod("a", *containers, app(20, 2))
    await world.admit(pod)
    world.clock.now += 2
    await world.kubelet.pre_start(pod, containers[0])
    assert {os.path.basename(folder) for folder in world.folders} == set(world.ledger.allocations)
    assert len(world.ledger.allocations) == 3


async def test_an_unknown_container_is_looked_up_and_recorded() -> None:
    world = await World.made(known=False)
    pod = await world.run(world.pod("a", app(20, 2)))
    world.check_names()
    assert [(a.pod, a.container) for a in world.checkpoint.allocations.values()] == [(("team", "a"), "main")]
    looks = world.lists
    await world.start(pod)
    assert world.lists == looks


async def test_ids_missing_in_the_ledger_are_adopted_if_the_kubelet_lists_them(world: World) -> None:
    pod = await world.run(world.pod("a", app(20, 2)))
    await world.agent_state.commit(world.ledger.free(world.ledger.allocations))
    await world.start(pod)
    world.check_names()


@pytest.mark.parametrize(("cores", "blocks", "sentence"), [(30, 0, "without memory"), (0, 3, "without cores")])
async def test_a_request_without_a_spec_at_admission_is_checked_at_the_start(cores: int, blocks: int, sentence: str) -> None:
    world = await World.made(known=False)
    pod = world.pod("a", app(cores, blocks))
    await world.admit(pod)
    with pytest.raises(SimKubeletError, match=sentence):
        await world.start(pod)


async def test_a_folder_that_can_not_be_created_is_reported(world: World) -> None:
    pod = world.pod("a", app(20, 2))
    await world.admit(pod)
    world.host_error = OSError(28, "No space left on device")
    with pytest.raises(SimKubeletError, match=r"the container's folder /nonexistent/.* can't be made: No space left on device"):
        await world.start(pod)


async def test_a_name_that_can_not_be_saved_does_not_refuse_the_start() -> None:
    world = await World.made(known=False)
    pod = world.pod("a", app(100, 0))
    await world.admit(pod)
    world.clock.now += 2
    world.checkpoint.full = True
    with capture_logs() as logs:
        await world.start(pod)
    assert "name_not_remembered" in {line["event"] for line in logs}


async def test_a_share_is_refused_with_share_mode_off() -> None:
    world = await World.made(share_mode=False, resource_order="core_first")
    pod = world.pod("a", app(20, 2))
    with pytest.raises(Exception, match="this node does not share GPUs"):
        await world.admit(pod)
    await world.run(world.pod("b", replace(app(100, 16))))


# -- GPUs that are gone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [20, 100])
@pytest.mark.parametrize("how", ["lost", "missing"])
async def test_a_container_does_not_restart_on_a_gpu_that_is_gone(world: World, how: str, cores: int) -> None:
    pod, other = await world.run(world.pod("a", app(cores, 2))), await world.run(world.pod("b", app(200, 4)))
    (mine,) = world.ledger.of(("team", "a"))
    gpu = world.ledger.gpu_registry.by_name[next(iter(mine.gpus))]
    if how == "lost":
        await world.agent_state.set_health(HardwareHealth(failed={gpu.uuid: "XID 79"}, cordoned={}, lost={gpu.uuid}))
    else:
        left = tuple(each for each in world.node.gpus if each.uuid != gpu.uuid)
        await world.agent_state.set_snapshot(replace(world.node, gpus=left))
    reason = "XID 79" if how == "lost" else "the driver does not list it"
    for _ in range(3):
        with pytest.raises(SimKubeletError, match=rf"the container's GPU.*{gpu.name}.* is gone: {reason}; delete the pod"):
            await world.start(pod)
    entries = [each for each in world.agent_state.history.entries() if each.what == "refused"]
    found = {(each.pod, each.pod_uid, each.container, each.code) for each in entries}
    assert found == {(("team", "a"), pod.uid, "main", "gpu_unhealthy")}
    assert len(entries) <= len(RESOURCES)
    await world.start(other)
    await world.agent_state.set_snapshot(world.node)
    await world.agent_state.set_health(HardwareHealth(failed={}, cordoned={}))
    await world.start(pod)


async def test_a_container_restarts_on_a_gpu_that_may_still_be_there(world: World) -> None:
    """It has another fault, the driver can't describe it, or does not answer (since the agent's start, or any more)."""
    pod = await world.run(world.pod("a", app(400, 4)))
    uuids = [gpu.uuid for gpu in world.node.gpus]
    await world.agent_state.set_health(
        HardwareHealth(failed=dict.fromkeys(uuids, "the driver does not answer"), cordoned={uuids[0]: "fan"})
    )
    await world.start(pod)
    failure = GpuFailure(index=3, uuid=uuids[3], reason="no answer in 5 s")
    await world.agent_state.set_snapshot(replace(world.node, gpus=world.node.gpus[:3], failures=(failure,)))
    await world.start(pod)
    world.agent_state.inventory = replace(world.agent_state.inventory, snapshot=EMPTY)
    await world.start(pod)
    world.agent_state.inventory = replace(world.agent_state.inventory, snapshot=replace(EMPTY, driver_version="580.1"))
    with pytest.raises(SimKubeletError, match="is gone: the driver does not"):
        await world.start(pod)


async def test_a_share_starts_only_once_its_memory_is_free(world: World) -> None:
    pod = world.pod("a", app(20, 2))
    await world.admit(pod)
    world.no_room = Refusal("conflict", "another container holds its memory")
    with pytest.raises(SimKubeletError, match="another container holds its memory"):
        await world.start(pod)
    world.no_room = None
    await world.start(pod)
    assert set(world.room_for) == set(world.ledger.allocations)
