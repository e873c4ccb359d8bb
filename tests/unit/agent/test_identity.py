"""Identification of the caller: the cases in which a cache that is late, aligned NUMA nodes or a recurring name could mislead the agent."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.inventory import HardwareHealth
from gpumgr.agent.reconciler import INCOMPLETE_SECONDS, PATIENCE, PATIENCE_WHILE_INCOMPLETE
from gpumgr.common.errors import Refusal
from gpumgr.common.units import RESOURCE_NAMES, RESOURCES
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Request
from gpumgr.ledger.ledger import Allocation
from gpumgr.placement.pods import ContainerSpec
from gpumgr.placement.requests import ReplicaRequest
from gpumgr.sim.kubelet_pods import SimPod
from tests.allocations import block_count
from tests.component.stage.stage import app, init, snapshot
from tests.topology_manager import best_effort
from tests.unit.agent.world import Plugin, Refused, World, played

ORDERS = ["core_first", "memory_first"]


def gpus_of(world: World, pod: SimPod, container: str = "main") -> set[str]:
    found = {gpu for a in world.ledger.of(("team", pod.name), pod.uid) if a.container == container for gpu in a.places}
    assert found
    return found


@pytest.mark.parametrize("order", ORDERS)
async def test_memory_follows_cores_that_the_topology_manager_chose(order: str) -> None:
    """One GPU on each NUMA node. Half of GPU 0 is left and wanted: aligned ids are all taken, no preference is asked for them."""
    world = await World.made(snapshot(2, 16, numa=True), align=best_effort, resource_order=order)
    await world.run(world.pod("first", app(50, 8)))
    second = await world.run(world.pod("second", app(50, 8)))
    await world.sweep(2)
    world.check_names()
    world.check_places()
    assert gpus_of(world, second) == {"00000000"}


async def test_ids_of_an_ended_pods_init_container_are_not_reused() -> None:
    """The kubelet hands a dead pod's ids to another without asking: they are that other pod's, not the dead one's heir's."""
    world = await World.made(snapshot(2, 16, numa=True), align=best_effort, seed=1)
    dead = await world.run(world.pod("dead", init(100, 16), app(100, 16)))
    await world.run(world.pod("other", app(100, 16)))
    world.end(dead, None)
    heir = await world.run(world.pod("new", app(100, 16)))
    await world.sweep(2)
    world.check_names()
    assert gpus_of(world, heir) == {"00000000"}
    assert not world.ledger.of(("team", "dead"))


async def test_an_earlier_incarnation_in_the_cache_does_not_affect_the_present_one() -> None:
    """The cache still says Failed of the name's earlier life while the new one is admitted and runs."""
    world = await World.made(known=False)
    old = world.pod("web-0", app(20, 2))
    world.tell(old, "Failed")
    new = await world.run(world.pod("web-0", app(50, 4)))
    await world.sweep(2, times=4)
    world.check_ids()
    world.check_places()
    world.tell(new, "Running")
    await world.sweep()
    assert {a.uid for a in world.ledger.allocations.values()} == {new.uid}


@pytest.mark.parametrize("order", ORDERS)
async def test_half_a_share_of_an_earlier_incarnation_is_not_continued(order: str) -> None:
    """web-0 failed after one of its two calls. The next web-0 starts anew, though no spec distinguishes them."""
    world = await World.made(snapshot(1, 16), known=False, resource_order=order)
    await world.run(world.pod("first", app(60, 10)))
    with pytest.raises(Refused):
        await world.admit(world.pod("web-0", app(40, 7) if order == "core_first" else app(41, 6)))
    world.clock.now += 1.5
    second = await world.run(world.pod("web-0", app(30, 5)))
    world.check_names()
    assert [(a.cores, block_count(a)) for a in world.ledger.of(("team", "web-0"), second.uid)] == [(30, 5)]


@pytest.mark.parametrize("order", ORDERS)
async def test_a_name_that_recurs_after_a_kubelet_restart_is_the_newest(order: str) -> None:
    """A missing name may be one that the restarted kubelet does not list yet, but not if it lists a newer pod."""
    world = await World.made(known=False, resource_order=order)
    first = await world.run(world.pod("web-0", app(20, 2)))
    world.reconciler.kubelet_restarted()
    world.end(first)
    await world.sweep(2, times=7)
    assert not world.ledger.allocations
    await world.admit(world.pod("other", app(60, 8)))
    second = world.pod("web-0", app(20, 3))
    await world.admit(second)
    world.check_places()
    await world.start(second)
    world.check_names()


@pytest.mark.parametrize("order", ORDERS)
async def test_a_name_that_recurs_before_anything_shows_its_earlier_end_is_the_newest(order: str) -> None:
    """Neither an API server nor the runtime shows that the earlier web-0 has ended. The new one gets other ids, of one GPU."""
    world = await World.made(snapshot(4, 16), known=False, resource_order=order)
    earlier = await world.run(world.pod("web-0", app(100, 16)))
    await world.run(world.pod("other", app(10, 2)))
    world.runtime.error = "no socket"
    world.end(earlier)
    await world.admit(world.pod("web-0", app(20, 2, "a"), app(50, 1, "b")))
    world.check_ids()
    world.check_places()


@pytest.mark.parametrize("order", ORDERS)
async def test_a_refused_name_that_recurs_is_the_newest(order: str) -> None:
    """No look misses it between its lives, and a pod that the cache does not know has joined before this one."""
    world = await World.made(resource_order=order)
    with pytest.raises(Refused):
        await world.admit(world.pod("web-0", app(150, 4)))
    unknown = world.pod("static", app(0))
    world.active[unknown.uid] = unknown
    for _ in range(2):
        world.clock.now += 30
        assert await world.reconciler.sweep()
        with pytest.raises(Refused):
            await world.admit(world.pod("web-0", app(150, 4)))
        assert [entry.pod for entry in world.agent_state.history.entries() if entry.what == "refused"][-1] == ("team", "web-0")
    await world.admit(world.pod("web-0", app(30, 4)))
    assert [(a.pod, a.container, a.cores, block_count(a)) for a in world.ledger.allocations.values()] == [
        (("team", "web-0"), "main", 30, 4)
    ]


@pytest.mark.parametrize("seed", range(8))
async def test_a_name_that_recurs_is_not_the_newest_once_another_pod_is_admitted(seed: int) -> None:
    """The cache has its new UID only after its admission. `List` does not show what its init container has."""
    world = await World.made(known="late", seed=seed)
    first = world.pod("web-0", init(5, 1))
    await world.admit(first)
    world.end(first)
    await world.admit(world.pod("web-0", init(5, 1)))
    other = world.pod("other", init(5, 2))
    await world.admit(other)
    await world.start(other)
    (held,) = world.ledger.of(("team", "other"), other.uid)
    assert (held.cores, block_count(held)) == (5, 2)


async def test_ids_without_a_preference_belong_to_the_pod_that_list_shows() -> None:
    """Two equal pods are bound at once and the younger is admitted first; aligned ids are handed out without a preference."""
    world = await World.made(snapshot(2, 16, numa=True), align=best_effort)
    await world.run(world.pod("first", app(50, 8)))
    older, younger = world.pod("older", app(50, 8)), world.pod("younger", app(50, 8))
    world.tell(older)
    await world.admit(younger)
    world.check_names()
    await world.admit(older)
    await world.sweep(2)
    world.check_names()


@pytest.mark.parametrize("order", ORDERS)
async def test_a_pod_is_not_new_when_ids_of_its_earlier_incarnation_are_offered(order: str) -> None:
    """Their GPU was not offered while the new pod of this name was admitted. No spec and no UID is known."""
    world = await World.made(snapshot(2, 16), known=False, resource_order=order)
    earlier = await world.run(world.pod("web-0", app(60, 2)))
    (gpu,) = gpus_of(world, earlier)
    world.clock.now += 2
    await world.agent_state.set_health(HardwareHealth(failed={world.ledger.gpu_registry.by_name[gpu].uuid: "fails"}, cordoned={}))
    world.end(earlier)
    await world.admit(world.pod("web-0", app(10, 2)))
    world.clock.now += 2
    await world.agent_state.set_health(HardwareHealth(failed={}, cordoned={}))
    with capture_logs() as logs:
        await world.admit(world.pod("after", app(30, 3)))
    assert {entry["pod"] for entry in logs if entry["event"] == "allocation_granted"} == {"team/after"}


@pytest.mark.parametrize("order", ORDERS)
async def test_a_new_pod_is_awaited_while_the_cache_has_the_ended_pod_of_its_name(order: str) -> None:
    """Without its spec, the scheduler's placement is not known."""
    world = await World.made(known="late", resource_order=order)
    world.end(await world.run(world.pod("web-0", app(20, 2))), "Failed")
    world.placed["web-0"] = 3
    again = await world.run(world.pod("web-0", app(20, 2)))
    assert gpus_of(world, again) == {world.ledger.gpu_registry.gpus[3].name}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("was_listed", [True, False])
async def test_a_pod_is_not_new_when_the_cache_replaces_its_earlier_incarnation(order: str, was_listed: bool) -> None:
    """The cache has the ended incarnation while the name's new pod is admitted, and the new one at the next pod's admission."""
    world = await World.made(known="late", resource_order=order)
    world.pods.too_late = True
    earlier = world.pod("web-0", app(20, 2))
    if was_listed:
        await world.admit(earlier)
        assert await world.admission.listings.list()
    world.end(earlier)
    world.tell(earlier, "Succeeded")
    await world.admit(world.pod("web-0", init(30, 4)))
    await world.admit(world.pod("after", app(10, 4)))
    found = [(a.pod, a.cores, block_count(a)) for a in world.ledger.allocations.values()]
    assert found == [(("team", "web-0"), 30, 4), (("team", "after"), 10, 4)]


async def test_a_call_that_fits_no_listed_pod_has_no_caller() -> None:
    """Every listed pod is known and has what it wants. The ids are held all the same until a sweep finds them with no pod."""
    world = await World.made()
    await world.run(world.pod("a", app(20, 2)))
    world.clock.now += 2
    ids = await world.agent.prefer("core", sorted(world.kubelet.healthy["tencent.com/vcuda-core"]), [], 7)
    await world.agent.allocate("core", ids)
    assert [(a.pod, a.container, a.cores) for a in world.ledger.allocations.values()][1:] == [(None, None, 7)]
    world.clock.now += 2
    await world.run(world.pod("b", app(95, 2)))
    await world.run(world.pod("c", app(95, 2)))
    world.check_names()
    assert len(world.ledger.allocations) == 4
    await world.sweep(2, times=PATIENCE_WHILE_INCOMPLETE)
    assert len(world.ledger.allocations) == 4, "the kubelet's list may be incomplete"
    world.clock.now += INCOMPLETE_SECONDS
    await world.sweep(2, times=PATIENCE)
    assert len(world.ledger.allocations) == 3


async def test_without_podresources_the_only_pod_that_waits_is_the_caller() -> None:
    world = await World.made()
    world.away = True
    other = world.pod("other", app(30, 5))
    world.tell(other)
    pods = [await world.run(world.pod(f"p{number}", app(20, 3))) for number in range(3)]
    world.check_names()
    assert len(pods) == len(world.ledger.allocations)


@pytest.mark.peer_bug("B3, B4: it guesses a pod by its number of cores and its age")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("numa", [False, True], ids=["preferred", "aligned"])
def test_of_several_pods_that_wait_none_is_guessed(order: str, numa: bool) -> None:
    """Without PodResources the agent refuses; with it, the next pod has its ids."""

    async def scenario(world: World) -> None:
        await world.run(world.pod("first", app(50, 8)))
        world.clock.now += 2
        older, younger = world.pod("web-0", app(50, 8)), world.pod("web-1", app(50, 8))
        world.tell(older)
        world.away = True
        before = world.clock.now
        with pytest.raises(
            Refused, match=r"did not answer for 5 s \(no PodResources socket\); 2 of the known pods wait .*web-0.*web-1"
        ):
            await world.admit(younger)
        assert world.clock.now == before + 5
        assert len(world.ledger.allocations) == 1
        world.away = False
        await world.run(older)
        world.check_names()

    played(scenario, node=snapshot(2, 16, numa=numa), align=best_effort if numa else None, resource_order=order)


@pytest.mark.parametrize("numa", [True, False], ids=["allocate", "prefer"])
def test_a_call_that_waits_for_the_list_delays_nothing_else(numa: bool) -> None:
    """A snapshot is in force at once, and the call is then decided on it. With aligned ids no preference is asked."""

    async def scenario(world: World) -> None:
        await world.run(world.pod("first", app(50, 8)))
        world.clock.now += 2
        older, younger = world.pod("web-0", app(50, 8)), world.pod("web-1", app(50, 8))
        world.tell(older)
        world.away = True
        waiting = asyncio.create_task(world.admit(younger))
        await asyncio.sleep(1)
        looks = world.lists
        await world.agent_state.set_snapshot(world.node)
        assert world.lists == looks, "the snapshot has not waited for further tries"
        assert not waiting.done()
        world.away = False
        await waiting
        await world.run(older)
        world.check_names()
        world.check_places()

    played(scenario, node=snapshot(2, 16, numa=numa), align=best_effort if numa else None, resource_order="core_first")


def test_a_pod_that_waits_for_the_list_remains_the_one_of_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long `List` fails, another pod that requests as much memory is not taken for a pod that the cache does not have yet."""

    async def scenario(world: World) -> None:
        await world.run(world.pod("first", app(50, 8)))
        world.clock.now += 2
        world.tell(world.pod("other", app(30, 8)))
        granted = world.admission.granted

        def then_fails(caller: Caller, allocation: Allocation) -> None:
            granted(caller, allocation)
            world.away = True

        monkeypatch.setattr(world.admission, "granted", then_fails)
        world.known = False
        waiting = asyncio.create_task(world.admit(world.pod("web-0", app(50, 8))))
        await asyncio.sleep(3)
        assert not waiting.done()
        world.away = False
        await waiting
        world.check_names()
        world.check_places()
        assert [(a.cores, block_count(a)) for a in world.ledger.of(("team", "web-0"))] == [(50, 8)]

    played(scenario, resource_order="core_first")


def test_a_call_that_a_restarted_kubelet_has_given_up_is_not_decided() -> None:
    """It must change nothing between the calls of the new kubelet, which are for another pod."""

    async def scenario(world: World) -> None:
        pods = [world.pod(name, app(50, 8)) for name in ("web-0", "web-1")]
        for pod in pods:
            world.tell(pod)
        world.away = True
        available = world.ledger.gpu_registry.ids["core"]["00000000"]
        given_up = asyncio.create_task(world.agent.prefer("core", available, (), 50))
        await asyncio.sleep(1)
        world.active[pods[0].uid], world.away = pods[0], False
        chosen = await world.agent.prefer("core", available, (), 50)
        world.active[pods[1].uid] = pods[1]
        with pytest.raises(Refusal, match="2 of the known pods wait"):
            await given_up
        await world.agent.allocate("core", chosen)
        world.away = True
        blocks = world.ledger.gpu_registry.ids["memory"]["00000000"]
        await world.agent.allocate("memory", await world.agent.prefer("memory", blocks, (), 8))
        assert [(a.pod, a.cores, block_count(a)) for a in world.ledger.allocations.values()] == [(("team", "web-0"), 50, 8)]

    played(scenario, node=snapshot(1, 16), resource_order="core_first")


@pytest.mark.parametrize("away", [True, False], ids=["no list", "no spare look"])
@pytest.mark.parametrize("granted", range(4))
async def test_a_refused_pod_is_not_the_next_caller(granted: int, away: bool) -> None:
    """The cache shows it as Pending after its refusal, and does not have the next pod, which requests the same."""
    world = await World.made(known=False)
    first, second = (world.pod(name, app(20, 3, "one"), app(20, 3, "two")) for name in ("first", "second"))
    world.tell(first)
    calls = iter(range(4))

    def fill() -> None:
        world.checkpoint.full = next(calls) == granted

    world.in_flight = fill
    with pytest.raises(Refused, match="no space left"):
        await world.admit(first)
    world.in_flight, world.checkpoint.full, world.away = None, False, away
    world.admission._spare_look_at = float("inf")
    before = {a.id for a in world.ledger.of(("team", "first"), first.uid)}
    await world.admit(second)
    assert {a.id for a in world.ledger.of(("team", "first"), first.uid)} <= before
    world.away = False
    await world.sweep(2, times=PATIENCE_WHILE_INCOMPLETE)
    world.check_names()


def test_the_only_pod_with_replicas_is_confirmed_by_list() -> None:
    """Its amounts are only in the pod, and a pod that the cache lacks could be the caller, too."""

    async def scenario(world: World) -> None:
        pod = world.pod("a", app(0))
        wanted = ReplicaRequest(count=1, cores=10, memory_mebibytes=1000)
        spec = ContainerSpec(name="main", kind="app", cores=0, memory_blocks=0, replicas=wanted)
        world.pods.views["team", "a"] = replace(world.view(pod), containers=(spec,))
        world.active[pod.uid] = pod
        request = Request(resource="replica", available={}, must={}, size=1)
        world.away = True
        with pytest.raises(Refusal, match=r"did not answer for 5 s .* \(team/a\)"):
            await world.admission.identify(world.ledger, request)
        world.away = False
        _, caller = await world.admission.identify(world.ledger, request)
        assert (caller.pod, caller.container, caller.unconfirmed) == (("team", "a"), "main", False)

    played(scenario)


async def test_whole_gpus_that_were_just_freed_are_granted_to_a_memory_call() -> None:
    """Their free blocks are still Unhealthy, so this call does not offer them; the API server and `List` show the end."""
    world = await World.made(snapshot(2, 16), resource_order="memory_first")
    old = [await world.run(world.pod(f"old-{n}", app(100, 0 if n else 8))) for n in range(2)]
    world.clock.now += 2
    for pod in old:
        world.end(pod, None)
    pair = await world.run(world.pod("pair", app(200, 4)))
    world.check_names()
    assert gpus_of(world, pair) == {"00000000", "00000001"}


async def test_ids_of_an_init_container_are_not_passed_on_to_another_pod() -> None:
    """The kubelet dropped them during the Allocate, and the Topology Manager leaves it no choice but these."""
    world = await World.made(snapshot(2, 16, numa=True), align=best_effort)
    gone = await world.run(world.pod("gone", app(100)))
    world.clock.now += 2

    def strike() -> None:
        world.end(gone)
        world.free_ended()

    world.in_flight = strike
    await world.admit(world.pod("first", init(100)))
    world.in_flight = None
    (uuid,) = {world.ledger.gpu_registry.by_name[gpu].uuid for gpu in gpus_of(world, gone)}
    await world.agent_state.set_health(HardwareHealth(failed={uuid: "fails"}, cordoned={}))
    with pytest.raises(Refused, match="team/first \\(prepare\\) still holds"):
        await world.admit(world.pod("second", init(100)))
    world.check_ids()


async def test_a_share_gets_the_blocks_of_a_whole_gpu_that_was_just_freed() -> None:
    """The kubelet has not received yet that the blocks are free again; no other GPU fits, so the list is sent at once."""
    world = await World.made(snapshot(1, 16), resource_order="core_first")
    whole = await world.run(world.pod("whole", app(100, 0)))
    await world.sweep(2)
    assert world.device_lists.visible_blocks() == {"00000000": 0}
    world.end(whole, None)
    share = await world.run(world.pod("share", app(30, 8)))
    assert gpus_of(world, share) == {"00000000"}
    world.check_ids()


class SlowPlugin(Plugin):
    """Answers, after which the kubelet takes three seconds until its next call."""

    async def allocate(self, ids: Sequence[str]) -> bytes:
        answer = await super().allocate(ids)
        self._world.clock.now += 3
        return answer


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("gpus", [1, 2])
async def test_the_two_calls_of_a_share_are_joined_without_its_spec_however_late_the_second_comes(order: str, gpus: int) -> None:
    world = await World.made(snapshot(gpus, 16), known=False, resource_order=order)
    world.kubelet.clients = {RESOURCE_NAMES[each]: SlowPlugin(world, each) for each in RESOURCES}  # type: ignore[misc]
    for name in ("first", "second"):
        pod = await world.run(world.pod(name, app(30, 4)))
        assert [(a.cores, block_count(a)) for a in world.ledger.of(("team", name), pod.uid)] == [(30, 4)]
    world.check_ids()
    world.check_names()
    world.check_places()


# -- pods that the scheduler placed ----------------------------------------------------------------------------------------


async def test_a_restart_between_the_preference_and_allocate_does_not_move_a_placed_pod() -> None:
    world = await World.made(snapshot(4, 16))
    world.placed = {"a": 3}
    plugin = world.kubelet.clients["tencent.com/vcuda-core"]
    restarted, allocate = list[bool](), plugin.allocate

    async def after_a_restart(ids: Sequence[str]) -> bytes:
        if not restarted:
            restarted.append(True)
            await world.restart()
        return await allocate(ids)

    plugin.allocate = after_a_restart  # type: ignore[method-assign]
    pod = await world.run(world.pod("a", app(30, 4)))
    assert restarted
    assert gpus_of(world, pod) == {"00000003"}


async def test_an_ignored_placement_is_an_event_once_and_the_agent_chooses() -> None:
    world = await World.made(snapshot(4, 16), known=False)
    reason = "the annotation gpumgr.io/placement is ignored: it is about node other"
    pod = world.pod("a", app(30, 4), app(5, 1, "side"))
    world.pods.views["team", "a"] = replace(world.view(pod), placement_ignored=reason)
    with capture_logs() as logs:
        await world.run(pod)
    (entry,) = [entry for entry in world.agent_state.history.entries() if entry.what == "event"]
    assert (entry.code, entry.pod, entry.why) == ("GpuPlacementIgnored", ("team", "a"), reason)
    assert [log["event"] for log in logs].count("placement_ignored") == 1
    assert {gpu for a in world.ledger.allocations.values() for gpu in a.places} == {"00000000"}


def test_a_placed_pod_is_identified_by_list_alone() -> None:
    """Without PodResources, a pod that is not known yet could be the caller, too."""

    async def scenario(world: World) -> None:
        world.away = True
        world.placed = {"a": 3}
        other = world.pod("b", app(30, 4))
        with pytest.raises(Refused, match=r"did not answer for 5 s .* \(team/a\); the pod's controller must replace the pod"):
            await world.run(world.pod("a", app(30, 4)))
        await world.run(other)
        assert {a.pod for a in world.ledger.allocations.values()} == {("team", "b")}

    played(scenario, node=snapshot(4, 16))
