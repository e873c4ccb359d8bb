"""The ledger between driver, disk and kubelet: new GPUs, memory calls of whole GPUs, quarantine."""

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.state import OPEN_SECONDS, QUARANTINE_NOTE
from gpumgr.common.errors import CheckpointError, LedgerError
from gpumgr.common.units import BLOCK_BYTES, MEMORY_RESOURCE, Amounts
from gpumgr.ledger.quarantine import EXPECTED_SECONDS
from gpumgr.placement.devices import GpuProcess, GpuSample, NodeSample, NodeSnapshot
from tests.component.stage.stage import app, snapshot
from tests.unit.agent.world import Refused, World


def healthy_blocks(world: World) -> int:
    return len(world.kubelet.healthy[MEMORY_RESOURCE])


def with_memory(node: NodeSnapshot, index: int, blocks: int) -> NodeSnapshot:
    gpus = tuple(replace(gpu, memory_bytes=blocks * BLOCK_BYTES) if gpu.index == index else gpu for gpu in node.gpus)
    return replace(node, gpus=gpus)


# -- GPUs that come and change -------------------------------------------------------------------------------------------


@pytest.fixture
async def world() -> World:
    return await World.made(snapshot(1, 16))


async def test_new_gpus_on_a_full_disk_are_offered_once_they_can_be_saved() -> None:
    world = await World.made(snapshot(2, 16))
    await world.run(world.pod("first", app(50, 8)))
    world.checkpoint.full = True
    await world.agent_state.set_snapshot(snapshot(4, 16))
    assert len(world.ledger.gpu_registry.gpus) == 2
    assert len(world.agent.view().node.rows) == 2
    with pytest.raises(CheckpointError):
        await world.reconciler.sweep()
    world.checkpoint.full = False
    await world.sweep()
    assert len(world.ledger.gpu_registry.gpus) == len(world.checkpoint.gpu_registry.gpus) == 4
    assert healthy_blocks(world) == 64
    world.check_names()


async def test_a_gpu_that_has_less_memory_now_keeps_its_ids_and_offers_what_it_has(world: World) -> None:
    """ECC was turned on. Blocks in use stay Healthy: the kubelet would fail their pod's restart."""
    pod = await world.run(world.pod("first", app(50, 4)))
    await world.agent_state.set_snapshot(with_memory(snapshot(1, 16), 0, 2))
    await world.sweep(2, times=2)
    assert len(world.kubelet.devices[MEMORY_RESOURCE]) == 16
    assert healthy_blocks(world) == 4
    assert world.kubelet.healthy[MEMORY_RESOURCE] == world.held(pod, "main", "memory")


async def test_a_gpu_that_has_more_memory_now_offers_more_ids(world: World) -> None:
    await world.run(world.pod("first", app(50, 4)))
    await world.agent_state.set_snapshot(snapshot(1, 20))
    world.clock.now += 2
    assert healthy_blocks(world) == 20
    await world.run(world.pod("second", app(50, 16)))
    world.check_names()


async def test_a_gpu_that_vanishes_keeps_its_allocations_and_their_ids() -> None:
    world = await World.made(snapshot(2, 16))
    pods = [await world.run(world.pod(f"p{n}", app(100, 16))) for n in range(2)]
    await world.agent_state.set_snapshot(snapshot(1, 16))
    assert out_of_service(world) == ["the driver does not list it"]
    assert healthy_blocks(world) == 16
    assert len(world.kubelet.devices[MEMORY_RESOURCE]) == 32
    await world.sweep(2)
    world.check_names()
    with pytest.raises(Refused):
        await world.admit(world.pod("third", app(10, 1)))
    world.end(pods[0])
    await world.run(world.pod("fourth", app(10, 1)))
    await world.agent_state.set_snapshot(snapshot(2, 16))
    assert not out_of_service(world)


# -- a whole GPU's memory ------------------------------------------------------------------------------------------------


async def opened(*, known: bool) -> World:
    world = await World.made(snapshot(2, 16), known=known, resource_order="core_first")
    world.clock.now += 2
    await world.admit(world.pod("whole", app(100)))
    world.clock.now += 2
    return world


async def test_blocks_of_a_whole_gpu_without_memory_are_withdrawn_at_once_where_the_spec_is_known() -> None:
    world = await opened(known=True)
    world.agent_state.publish()
    assert healthy_blocks(world) == 16


@pytest.mark.parametrize("starts", [False, True])
async def test_without_a_spec_blocks_are_withdrawn_when_no_memory_call_follows_or_the_container_starts(starts: bool) -> None:
    world = await opened(known=False)
    world.agent_state.publish()
    assert healthy_blocks(world) == 32
    if starts:
        await world.start(next(iter(world.active.values())))
    else:
        world.clock.now += OPEN_SECONDS
        await world.sweep()
    assert healthy_blocks(world) == 16


HELD = "in quarantine: processes of an ended pod still run there (pid 7)"

# -- quarantine ----------------------------------------------------------------------------------------------------------


async def sample(world: World, *pids: int, gpu: int = 0) -> None:
    """These processes run on one GPU now, each started at a hundred times its pid."""
    world.processes = {(pid, 100 * pid) for pid in pids}
    running = tuple(GpuProcess(pid=pid, memory_bytes=None) for pid in pids)
    uuid = world.node.gpus[gpu].uuid
    what = NodeSample(gpus={uuid: GpuSample(uuid=uuid, processes=running)})
    await world.agent_state.set_sample(what, {pid: 100 * pid for pid in pids})


def out_of_service(world: World) -> list[str]:
    """The reasons."""
    return list(world.agent.view().node.unschedulable.values())


async def restarted(world: World) -> None:
    """The agent has noted the quarantine, and starts again with it."""
    await world.agent_state.note_quarantine()
    await world.restart()
    world.agent_state.restore_quarantine(world.checkpoint.notes)


async def left_behind(world: World) -> None:
    """A pod that was on GPU 0 ends; its process 7 stays. Process 3 was there before it."""
    await sample(world, 3)
    pod = await world.run(world.pod("tenant", app(100, 16)))
    await sample(world, 3, 7)
    world.end(pod, None)
    await world.sweep(2, times=6)
    assert not world.ledger.allocations


async def test_a_sample_without_news_keeps_what_was_computed_of_the_inventory(world: World) -> None:
    await sample(world, 3)
    before = world.agent_state.inventory
    await sample(world, 3)
    assert world.agent_state.inventory is before
    await sample(world, 3, 7)
    assert world.agent_state.inventory is not before


@pytest.mark.peer_bug("B1: it resets a GPU after its pod, and loses it if that fails")
async def test_a_gpu_with_an_ended_pods_process_waits_for_its_end(world: World) -> None:
    await left_behind(world)
    assert out_of_service(world) == [HELD]
    with pytest.raises(Refused):
        await world.admit(world.pod("next", app(10, 1)))
    await sample(world, 3)
    world.clock.now += 2
    await world.run(world.pod("next", app(10, 1)))


async def test_an_ordinary_end_holds_the_gpu_back_without_a_warning(world: World) -> None:
    """On an H200 a container with 35 GiB leaves the driver's list half a second after its pod's end."""
    with capture_logs() as logs:
        await left_behind(world)
        assert out_of_service(world)
        world.clock.now += 0.5
        await sample(world, 3)
        assert not out_of_service(world)
    assert not [entry for entry in logs if entry["event"] in ("gpu_quarantined", "gpu_released")]


async def test_a_process_that_stays_is_reported_once_and_so_is_its_end(world: World) -> None:
    with capture_logs() as logs:
        await left_behind(world)
        for _ in range(3):
            world.clock.now += EXPECTED_SECONDS / 2
            await sample(world, 3, 7)
        await sample(world, 3)
    quarantine = [(entry["event"], entry["log_level"]) for entry in logs if entry["event"].startswith("gpu_")]
    assert quarantine == [("gpu_quarantined", "warning"), ("gpu_released", "info")]


async def test_the_next_quarantine_of_a_gpu_is_expected_again(world: World) -> None:
    await left_behind(world)
    world.clock.now += EXPECTED_SECONDS / 2
    await sample(world, 3)
    world.clock.now += EXPECTED_SECONDS
    with capture_logs() as logs:
        await left_behind(world)
        await sample(world, 3, 7)
    assert out_of_service(world)
    assert not [entry for entry in logs if entry["event"] == "gpu_quarantined"]


async def test_the_quarantine_survives_a_restart(world: World) -> None:
    await left_behind(world)
    await restarted(world)
    assert out_of_service(world)
    world.processes = set()
    await sample(world)
    await world.agent_state.note_quarantine()
    assert not out_of_service(world)
    assert '"held":{}' in world.checkpoint.notes[QUARANTINE_NOTE]


async def test_an_unattributed_process_is_still_unattributed_after_a_restart(world: World) -> None:
    """A display server runs on the GPU for ever. It must not look like a tenant to an agent that starts beside a running pod."""
    await sample(world, 3)
    await world.agent_state.note_quarantine()
    pod = await world.run(world.pod("tenant", app(100, 16)))
    await world.restart()
    world.agent_state.restore_quarantine(world.checkpoint.notes)
    await sample(world, 3)
    world.end(pod, None)
    await world.sweep(2, times=6)
    assert not world.ledger.allocations
    assert not out_of_service(world)


async def test_two_halves_of_a_share_that_become_one_allocation_are_not_freed() -> None:
    world = await World.made()
    await world.run(world.pod("first", app(50, 4)))
    joined = world.ledger
    (whole,) = joined.allocations.values()
    (gpu,) = whole.gpus
    cores = replace(whole, device_ids={"core": whole.held("core")}, gpus={gpu: Amounts(50, 0)})
    memory = replace(whole, id="half", device_ids={"memory": whole.held("memory")}, gpus={gpu: Amounts(0, 1024)})
    await world.agent_state.commit(joined.occupy(cores).occupy(memory))
    await world.agent_state.commit(joined)
    assert world.checkpoint.allocations == joined.allocations
    assert "freed" not in {entry.what for entry in world.agent_state.history.entries()}


# -- a ledger that contradicts itself ---------------------------------------------------------------------------------------


async def test_a_ledger_with_violations_is_neither_written_nor_applied() -> None:
    world = await World.made()
    await world.run(world.pod("first", app(50, 4)))
    sound = world.ledger
    (first,) = sound.allocations.values()
    broken = sound.occupy(replace(first, id="other", pod=("team", "other"), uid="uid-other"))
    with pytest.raises(LedgerError, match="hold the same core ids"):
        await world.agent_state.commit(broken)
    with pytest.raises(LedgerError, match="hold the same core ids"):
        world.agent_state.put(broken)
    assert world.agent_state.ledger is sound
    assert world.checkpoint.allocations.keys() == sound.allocations.keys()


async def test_a_sample_before_the_notes_are_read_is_judged_again(world: World) -> None:
    """The next one may come after the pod's allocation is freed."""
    await sample(world, 3)
    await world.agent_state.note_quarantine()
    pod = await world.run(world.pod("tenant", app(100, 16)))
    await world.restart()
    await sample(world, 3, 7)
    world.agent_state.restore_quarantine(world.checkpoint.notes)
    world.end(pod, None)
    await world.sweep(2, times=6)
    assert not world.ledger.allocations
    assert out_of_service(world) == [HELD]
