"""Between the kubelet's calls: when to look, whom to free, what to learn."""

import asyncio

import pytest
from structlog.testing import capture_logs

from gpumgr.agent.reconciler import GAP_SECONDS, INCOMPLETE_SECONDS, PATIENCE, PATIENCE_WHILE_INCOMPLETE, UNDER_WAY_SECONDS
from gpumgr.ledger.rebuild import AnonymousRecord, KubeletEntry, migrate
from gpumgr.sim.kubelet_pods import SimPod
from tests.component.stage.stage import app, snapshot
from tests.unit.agent.world import World

LONG = 60.0


async def settled(**options: object) -> World:
    """A node that started long ago: `List` is complete."""
    world = await World.made(**options)  # type: ignore[arg-type]
    world.clock.now += LONG
    return world


async def deleted(world: World) -> SimPod:
    """A pod that ran and is gone."""
    pod = await world.run(world.pod("gone", app(20, 2)))
    world.end(pod, None)
    return pod


@pytest.fixture
async def world() -> World:
    return await settled()


async def test_no_list_call_is_made_during_an_allocate(world: World) -> None:
    ids = list(world.kubelet.healthy["tencent.com/vcuda-core"])
    pod = world.pod("a", app(20, 2))
    world.tell(pod)
    world.active[pod.uid] = pod
    await world.agent.prefer("core", ids, [], 20)
    looks = world.lists
    world.clock.now += UNDER_WAY_SECONDS - 0.1
    assert not await world.reconciler.sweep()
    assert world.lists == looks
    world.clock.now += 0.2
    assert await world.reconciler.sweep()


async def test_a_start_waits_for_an_allocate_that_began_while_it_waited_for_the_lock(world: World) -> None:
    async with world.agent_state.lock:
        learning = asyncio.create_task(world.reconciler.learn())
        await asyncio.sleep(0.01)
        world.reconciler.preferred()
        world.clock.now += UNDER_WAY_SECONDS - 0.01
    await asyncio.sleep(0)
    assert world.lists == 0
    world.clock.now += 0.01
    await learning
    assert world.lists == 1


async def test_no_list_call_is_made_right_after_an_allocate(world: World) -> None:
    await world.admit(world.pod("a", app(20, 2)))
    looks = world.lists
    assert not await world.reconciler.sweep()
    world.clock.now += GAP_SECONDS
    assert await world.reconciler.sweep()
    assert world.lists == looks + 1


async def test_one_list_call_proves_no_absence(world: World) -> None:
    await deleted(world)
    for _ in range(PATIENCE - 1):
        await world.sweep()
        assert world.ledger.allocations
    await world.sweep()
    assert not world.ledger.allocations
    assert world.drift.seen["freed"] == 1


async def test_absence_of_a_pod_that_the_api_server_has_proves_nothing(world: World) -> None:
    pod = await world.run(world.pod("a", app(20, 2)))
    del world.active[pod.uid]
    await world.sweep(times=10)
    assert world.ledger.allocations


async def test_a_pod_that_ends_while_the_list_stays_the_same_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list may show ended pods until they are deleted."""
    world = await settled()
    first, second = [await world.run(world.pod(name, app(20, 2))) for name in ("a", "b")]
    listing = world.listing()
    monkeypatch.setattr(world, "listing", lambda: listing)
    await world.sweep()
    world.tell(first, "Succeeded")
    await world.sweep()
    assert {a.uid for a in world.ledger.allocations.values()} == {second.uid}


async def test_a_pod_that_is_listed_again_is_counted_anew() -> None:
    world = await settled(known=False)
    await world.run(world.pod("a", app(20, 2)))
    for _ in range(2 * PATIENCE):
        world.sources_ready = False
        await world.sweep()
        world.sources_ready = True
        await world.sweep()
    world.check_names()


@pytest.mark.parametrize("known", [True, False])
async def test_after_a_kubelet_restart_absence_takes_longer_unless_the_api_server_agrees(known: bool) -> None:
    world = await settled(known=known)
    pod = await deleted(world)
    world.reconciler.kubelet_restarted()
    for _ in range(2 if known else PATIENCE_WHILE_INCOMPLETE):
        assert world.ledger.allocations
        await world.sweep()
    assert not world.ledger.allocations
    assert pod.uid not in world.active


async def test_what_only_an_incomplete_list_lacks_is_kept(world: World) -> None:
    """Neither the API server nor the container runtime answers, and the kubelet's sources take long to be ready."""
    pods = [await world.run(world.pod(f"p{n}", app(20, 2))) for n in range(3)]
    world.pods.down, world.runtime.error, world.sources_ready = True, "no socket", False
    world.reconciler.kubelet_restarted()
    await world.sweep(times=2 * PATIENCE_WHILE_INCOMPLETE)
    assert len(world.ledger.allocations) == len(pods)
    world.end(pods[0])
    world.sources_ready = True
    world.clock.now += INCOMPLETE_SECONDS
    await world.sweep(times=PATIENCE)
    assert {a.uid for a in world.ledger.allocations.values()} == {pod.uid for pod in pods[1:]}


async def test_unavailable_podresources_free_nothing(world: World) -> None:
    await deleted(world)
    world.away = True
    await world.sweep(times=10)
    assert world.ledger.allocations


async def test_the_daemon_sweeps_on_request_and_survives_a_full_disk(world: World) -> None:
    pod = await world.run(world.pod("a", app(20, 2)))
    world.clock.now += LONG
    world.end(pod)
    world.checkpoint.full = True
    world.checkpoint.tried.clear()
    with capture_logs() as logs:
        daemon = asyncio.create_task(world.reconciler.run())
        world.reconciler.soon()
        await world.checkpoint.tried.wait()
        world.checkpoint.tried.clear()
        world.checkpoint.full = False
        world.reconciler.soon()
        await world.checkpoint.tried.wait()
        daemon.cancel()
        await asyncio.gather(daemon, return_exceptions=True)
    assert "sweep_not_remembered" in {line["event"] for line in logs}
    assert not world.checkpoint.allocations


# -- what the kubelet remembers and the ledger does not --------------------------------------------------------------------


async def test_a_start_with_a_complete_ledger_offers_without_waiting_for_the_kubelets_list(world: World) -> None:
    await world.run(world.pod("a", app(20, 2)))
    before = world.ledger
    world.away = True
    with capture_logs() as logs:
        rebuilt = await world.restart()
    assert not [line for line in logs if line["event"] == "pod_resources_unavailable"]
    assert not rebuilt.added
    assert world.ledger == before


async def test_what_contradicts_the_ledger_is_logged_and_skipped(world: World) -> None:
    await world.run(world.pod("a", app(20, 2)))
    (held,) = world.ledger.allocations.values()
    ids = tuple(world.ledger.gpu_registry.format("core", held.held("core")))
    with capture_logs() as logs:
        rebuilt = await world.reconciler.adopt([KubeletEntry(uid="uid-x", container="other", resource="core", device_ids=ids)])
    assert rebuilt.problems
    assert "hold the same core ids" in rebuilt.problems[0]
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["allocation_not_adopted"]
    assert world.drift.seen["rejected"] == 1
    assert list(world.ledger.allocations) == [held.id]


# -- gpu-manager's pods ----------------------------------------------------------------------------------------------------


async def migrated(record: AnonymousRecord) -> World:
    world = await settled(node=snapshot(2, 16))
    async with world.agent_state.lock:
        await world.reconciler.migrate(
            lambda ledger, minors: migrate(ledger, [record], minors, new_id=world.reconciler.new_id, now=1.0)
        )
    return world


SHARE = AnonymousRecord(uid="uid-900", container="main", minors=(0,), cores=60, memory_blocks=10)


async def test_pods_of_gpu_manager_keep_their_gpus_until_they_end() -> None:
    world = await migrated(SHARE)
    old = SimPod(namespace="team", name="old", uid="uid-900", containers=(app(60, 10),))
    world.active[old.uid] = old
    world.tell(old)
    async with world.agent_state.lock:
        await world.reconciler.name({"uid-900": ("team", "old")})
    for number in range(2):
        await world.run(world.pod(f"p{number}", app(50, 8)))
    assert {gpu for a in world.ledger.allocations.values() if not a.anonymous for gpu in a.gpus} == {"00000001"}
    await world.agent.pre_start("core", ["gpu-manager-7"])
    await world.sweep(2)
    assert any(a.anonymous for a in world.ledger.allocations.values())
    world.end(old, None)
    await world.sweep(2, times=2)
    assert not any(a.anonymous for a in world.ledger.allocations.values())
    await world.run(world.pod("next", app(60, 10)))


async def test_a_record_without_a_name_stays_without_an_api_server() -> None:
    world = await migrated(SHARE)
    world.pods.synced = False
    await world.sweep(2, times=20)
    assert world.ledger.allocations
