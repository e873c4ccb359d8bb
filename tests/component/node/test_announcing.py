"""From the kubelet's calls to what `kubectl describe` shows: one patch and one event for a pod, for the right incarnation."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.agent.ports import Eviction
from gpumgr.agent.state import OPEN_SECONDS
from gpumgr.kube.cache import PodCache, _Known
from gpumgr.kube.publisher.decisions import CHECK_SECONDS, SETTLE_SECONDS
from gpumgr.ledger.history import NOT_ENFORCED
from gpumgr.placement.pods import PodKey, PodView
from gpumgr.sim.kubelet_pods import PodStatus, SimContainer
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import Refused, World

from .cluster import Cluster, announced


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with announced(await World.made(snapshot(2, 16)), tmp_path) as made:
        yield made


def app(name: str = "main", cores: int = 30, blocks: int = 4) -> SimContainer:
    return SimContainer(name=name, cores=cores, memory_blocks=blocks)


# -- placed ------------------------------------------------------------------------------------------------------------------


async def test_a_pod_of_three_containers_is_one_patch_and_one_event(cluster: Cluster) -> None:
    containers = (app("fetch"), SimContainer(name="log"), app("main", 20), app("side", 10, 1))
    pod = await cluster.run(cluster.world.pod("web", replace(containers[0], kind="init"), *containers[1:]))
    await cluster.look()
    assert cluster.writes == ["pod", "event"]
    listed = cluster.allocations(pod)
    assert [(each["container"], each["cores"], each["memory_mebibytes"]) for each in listed] == [
        ("fetch", 30, 1024),
        ("main", 20, 1024),
        ("side", 10, 256),
    ]
    assert {each["allocation"] for each in listed} == set(cluster.world.ledger.allocations)
    assert [each.get("evaluator") for each in listed] == ["share", None, "share"]  # the second has the first one's ids
    annotations = cluster.annotations(pod)
    assert annotations["tencent.com/predicate-gpu-idx-1"] == annotations["tencent.com/predicate-gpu-idx-2"] == "0"
    assert "tencent.com/predicate-gpu-idx-0" not in annotations
    assert (annotations["tencent.com/gpu-assigned"], annotations["tencent.com/predicate-node"]) == ("true", "node-1")
    (event,) = cluster.events
    names = [each["allocation"] for each in listed]
    assert (event["type"], event["reason"], event["involvedObject"]["uid"]) == ("Normal", "GpuPlaced", pod.uid)
    assert set(event["metadata"]["annotations"]["gpumgr.io/allocation"].split(",")) == set(names)
    assert "main: GPU0 (00000000), 20 cores, 1024 MiB" in event["message"]
    await cluster.look(60)
    assert cluster.writes == ["pod", "event"]


async def test_a_container_without_limits_costs_the_api_server_no_event_of_its_own(cluster: Cluster) -> None:
    pod = await cluster.run(cluster.world.pod("web", app()))
    await cluster.world.start(pod)
    (held,) = cluster.world.ledger.allocations.values()
    cluster.add(
        what="event", code=NOT_ENFORCED, id=held.id, pod=held.pod, pod_uid=pod.uid, container="main", why="nothing limits it"
    )
    await cluster.look()
    (event,) = cluster.events
    said = f"{NOT_ENFORCED}: nothing on this node keeps container main within its share (enforcement backend none)"
    assert (event["reason"], said in event["message"]) == ("GpuPlaced", True)


async def test_nothing_is_published_before_the_pods_calls_are_answered(cluster: Cluster) -> None:
    await cluster.run(cluster.world.pod("web", app()))
    await cluster.look(SETTLE_SECONDS / 2)
    assert cluster.writes == []
    await cluster.look(SETTLE_SECONDS)
    assert cluster.writes == ["pod", "event"]


async def test_a_pod_with_slow_calls_is_one_patch_and_one_event(cluster: Cluster) -> None:
    def between_calls() -> None:
        cluster.decisions.report()
        cluster.world.clock.now += 2 * SETTLE_SECONDS
        cluster.decisions.report()

    cluster.world.in_flight = between_calls
    pod = await cluster.run(cluster.world.pod("web", replace(app("first"), kind="init"), app("main"), app("side")))
    await cluster.look()
    assert cluster.writes == ["pod", "event"]
    assert [each["memory_mebibytes"] for each in cluster.allocations(pod)] == [1024] * 3


async def test_a_pod_that_never_gets_its_other_devices_is_reported_late(cluster: Cluster) -> None:
    pod = await cluster.shown(cluster.world.pod("web", app("main"), app("side")))
    await cluster.world.run(replace(pod, containers=pod.containers[:1]))
    await cluster.look(SETTLE_SECONDS)
    await cluster.look(OPEN_SECONDS - 0.1)
    assert cluster.writes == []
    await cluster.look(0.1)
    assert cluster.writes == ["pod", "event"]
    assert [each["container"] for each in cluster.allocations(pod)] == ["main"]


async def test_a_refused_pod_is_not_reported_as_placed(cluster: Cluster) -> None:
    pod = await cluster.shown(cluster.world.pod("web", app("main"), app("side")))
    await cluster.world.run(replace(pod, containers=pod.containers[:1]))
    await cluster.look(SETTLE_SECONDS)
    await cluster.shown(pod, PodStatus(phase="Failed", reason="UnexpectedAdmissionError"))
    await cluster.look(OPEN_SECONDS)
    assert "GpuPlaced" not in [event["reason"] for event in cluster.events]


async def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    world = await World.made(snapshot(2, 16))
    async with announced(world, tmp_path, written=False) as cluster:
        await cluster.run(cluster.world.pod("web", app()))
        cluster.add(what="gpu", code="lost", gpus=("00000000",))
        await cluster.look()
        assert cluster.writes == []


# -- the right pod -----------------------------------------------------------------------------------------------------------


async def test_a_pod_that_the_api_server_shows_late_is_reported_late(cluster: Cluster) -> None:
    pod = await cluster.world.run(cluster.world.pod("web", app()))
    await cluster.look(30)
    assert cluster.writes == []
    await cluster.shown(pod)
    await cluster.look()
    assert cluster.writes == ["pod", "event"]
    assert cluster.allocations(pod)[0]["container"] == "main"


async def test_the_annotations_of_a_deleted_pod_are_dropped(cluster: Cluster) -> None:
    await cluster.api.stop()
    pod = await cluster.world.run(cluster.world.pod("web", app()))
    known = _Known(cluster.world.view(pod), {})
    cluster.cache._follow(None, known)
    cluster.decisions.report()
    cluster.world.clock.now += 1
    cluster.decisions.report()
    assert cluster.publisher.state().waiting == 2
    cluster.cache._follow(known, None)
    assert cluster.publisher.state().waiting == 1


async def test_the_annotations_follow_an_allocation_that_is_moved_to_another_pod(cluster: Cluster) -> None:
    world = cluster.world
    one, other = await cluster.shown(world.pod("one", app())), await cluster.shown(world.pod("other", app()))
    await world.run(one)
    await cluster.look()
    assert "gpumgr.io/allocations" in cluster.annotations(one)
    (held,) = world.ledger.allocations.values()
    world.agent_state.put(world.ledger.occupy(replace(held, pod=("team", "other"), uid=other.uid)))
    await cluster.look()
    await cluster.look()
    assert cluster.annotations(one) == {}
    assert cluster.allocations(other)[0]["allocation"] == held.id
    assert cluster.writes.count("event") == 1


# -- restarts and repairs ----------------------------------------------------------------------------------------------------


async def test_after_a_restart_only_what_is_missing_is_written(cluster: Cluster) -> None:
    written = await cluster.run(cluster.world.pod("written", app()))
    await cluster.look()
    await cluster.until(lambda: bool(cluster.cache.annotations(written.uid)))
    unwritten = await cluster.run(cluster.world.pod("unwritten", app()))
    cluster.decisions = cluster.reporter()
    await cluster.look()
    await cluster.look()
    assert cluster.writes == ["pod", "event", "pod"]
    assert cluster.allocations(unwritten)[0]["container"] == "main"


async def test_annotations_that_were_removed_are_written_again(cluster: Cluster) -> None:
    pod = await cluster.run(cluster.world.pod("web", app()))
    await cluster.look()
    await cluster.until(lambda: bool(cluster.cache.annotations(pod.uid)))
    before = dict(cluster.annotations(pod))
    cluster.publisher.annotate_pod(("team", "web"), pod.uid, dict.fromkeys(before))
    await cluster.until(lambda: not cluster.cache.annotations(pod.uid))
    await cluster.look(CHECK_SECONDS)
    await cluster.look()
    assert cluster.annotations(pod) == before


# -- bugs --------------------------------------------------------------------------------------------------------------------


class BuggyPods(PodCache):
    """Raises an error for one pod."""

    def get(self, pod: PodKey) -> PodView | None:
        if pod == ("team", "odd"):
            raise LookupError("a bug")
        return super().get(pod)


async def test_a_bug_does_not_fail_the_caller(cluster: Cluster) -> None:
    cluster.cache.__class__ = BuggyPods
    cluster.add(what="event", pod=("team", "odd"), code="GpuLimitBroken", why="a")
    cluster.add(what="gpu", code="lost", gpus=("00000001",), why="XID 79")
    with pytest.raises(LookupError):
        cluster.decisions.report()
    await cluster.look()
    assert [event["reason"] for event in cluster.events] == ["GpuLost"]


# -- refusals and other events------------------------------------------------------------------------------------------------


async def test_a_refused_pod_gets_the_reason_and_no_event_of_a_placement(cluster: Cluster) -> None:
    pod = await cluster.shown(cluster.world.pod("web", app("one"), app("two", 40, 0)))
    with pytest.raises(Refused):
        await cluster.world.run(pod)
    await cluster.shown(pod, PodStatus(phase="Failed", reason="UnexpectedAdmissionError"))
    await cluster.look()
    assert cluster.writes == ["event"]
    (event,) = cluster.events
    assert (event["type"], event["reason"]) == ("Warning", "GpuRefused")
    assert event["message"].startswith("container two: 40 cores requested without memory")
    refused = cluster.history.entries()[-1]
    assert event["metadata"]["annotations"] == {"gpumgr.io/allocation": refused.id}
    assert event["message"].endswith(f"[allocation {refused.id}]")


async def test_other_events_of_pods(cluster: Cluster) -> None:
    pod = await cluster.run(cluster.world.pod("web", app()))
    (held,) = cluster.world.ledger.allocations.values()
    await cluster.look()
    cluster.add(what="event", id=held.id, pod=held.pod, pod_uid=pod.uid, code="GpuMemoryOverLimit", why="too much")
    cluster.add(what="event", id=held.id, code="GpuLimitBroken", why="without a name, but of its allocation")
    await cluster.look()
    assert [(event["reason"], event["type"], event["involvedObject"]["uid"]) for event in cluster.events[1:]] == [
        ("GpuMemoryOverLimit", "Warning", pod.uid),
        ("GpuLimitBroken", "Warning", pod.uid),
    ]


async def test_an_eviction_that_is_refused_is_in_the_history_and_the_pods_events(cluster: Cluster) -> None:
    pod = await cluster.shown(cluster.world.pod("web", app()))
    cluster.api.forbidden.add(("create", "pods/eviction"))
    for number in range(2):
        cluster.publisher.evict(f"drain {number}", [Eviction(uid=pod.uid, pod=("team", "web"), reason="GPU0 is drained")])
        await cluster.written()
        await cluster.look()
    (entry,) = cluster.history.entries()
    assert (entry.what, entry.code, entry.pod, entry.pod_uid) == ("event", "GpuPodNotEvicted", ("team", "web"), pod.uid)
    assert entry.why.startswith("the pod is not evicted (GPU0 is drained): HTTP 403: ")
    assert entry.why.endswith("create on pods/eviction")
    assert [(event["reason"], event["type"]) for event in cluster.events] == [("GpuPodNotEvicted", "Warning")]


async def test_events_of_a_static_pod_refer_to_its_mirror_pod(cluster: Cluster) -> None:
    view = replace(cluster.world.view(cluster.world.pod("web", app())), runtime_uid="of-the-kubelet")
    cluster.cache._follow(None, _Known(view, {}))
    cluster.add(what="event", pod=view.key, pod_uid="of-the-kubelet", code="GpuLimitBroken", why="a")
    cluster.add(what="event", pod=view.key, pod_uid=view.uid, code="GpuLimitBroken", why="b")
    await cluster.look()
    assert [event["involvedObject"]["uid"] for event in cluster.events] == ["of-the-kubelet"] * 2


async def test_an_event_whose_pod_is_not_known_is_left_to_the_kubelet(cluster: Cluster) -> None:
    cluster.add(what="refused", id="r1", pod=("team", "web"), code="no_fit", why="no room")
    cluster.add(what="refused", id="r2", pod=("team", "gone"), pod_uid="uid-gone", code="no_fit", why="no room")
    await cluster.look()
    assert [event["involvedObject"]["uid"] for event in cluster.events] == ["uid-gone"]
