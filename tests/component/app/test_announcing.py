"""From the kubelet's calls to what `kubectl describe` shows: one patch and one event for a pod, each for the right life of it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpumgr.allocator.annotations import pod_annotations
from gpumgr.allocator.history import HISTORY_ENTRIES
from gpumgr.allocator.pods import PodKey, PodView
from gpumgr.app import announcing
from gpumgr.app.announcing import CHECK_SECONDS, LATE_SECONDS, MAX_LATE, SETTLE_SECONDS
from gpumgr.app.podside import tell_refused_eviction
from gpumgr.kubeapi.cache import PodCache
from gpumgr.sim.kubelet_pods import PodStatus, SimContainer
from gpumgr.topology.devices import NodeSnapshot, Topology
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import Refused, World

from .cluster import Cluster, announced

UUIDS = [gpu.uuid for gpu in snapshot(2, 16).gpus]


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


async def test_nothing_is_said_before_the_pods_calls_are_answered(cluster: Cluster) -> None:
    await cluster.run(cluster.world.pod("web", app()))
    cluster.world.clock.now -= 2  # its containers took that long to start
    await cluster.look(SETTLE_SECONDS / 2)
    assert cluster.writes == []
    await cluster.look(SETTLE_SECONDS)
    assert cluster.writes == ["pod", "event"]


async def test_the_daemon_tells_of_a_pod_well_within_a_second(cluster: Cluster) -> None:
    cluster.announcing._clock = asyncio.get_running_loop().time
    daemon = asyncio.create_task(cluster.announcing.run())
    await asyncio.sleep(0.01)
    await cluster.run(cluster.world.pod("web", app()))
    async with asyncio.timeout(5):
        await cluster.until(lambda: bool(cluster.events))
    daemon.cancel()
    await asyncio.wait([daemon])
    assert cluster.writes == ["pod", "event"]
    assert cluster.described >= 1


async def test_a_crowd_is_told_each_once(cluster: Cluster) -> None:
    pods = [await cluster.run(cluster.world.pod(f"web-{number}", app(cores=5, blocks=1))) for number in range(20)]
    await cluster.look()
    assert sorted(cluster.writes) == ["event"] * 20 + ["pod"] * 20
    for pod in pods:
        (one,) = cluster.allocations(pod)
        assert one["gpus"][0] in UUIDS


async def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    world = await World.made(snapshot(2, 16))
    async with announced(world, tmp_path, annotate_pods=False, write_events=False) as cluster:
        await cluster.run(cluster.world.pod("web", app()))
        cluster.tell(what="gpu", code="lost", gpus=("00000000",))
        await cluster.look()
        assert cluster.writes == []


# -- the right pod -----------------------------------------------------------------------------------------------------------


async def test_a_pod_that_the_api_server_shows_late_is_told_late(cluster: Cluster) -> None:
    pod = await cluster.world.run(cluster.world.pod("web", app()))
    await cluster.look(30)
    assert cluster.writes == []
    await cluster.shown(pod)
    await cluster.look()
    assert cluster.writes == ["pod", "event"]
    assert cluster.allocations(pod)[0]["container"] == "main"


async def test_another_life_of_the_name_gets_nothing(cluster: Cluster) -> None:
    first = await cluster.run(cluster.world.pod("web-0", app()))
    second = replace(first, uid="uid-99")
    cluster.api.remove(first.uid)
    await cluster.shown(second)
    await cluster.look()
    assert cluster.writes == []
    assert cluster.annotations(second) == {}


async def test_a_pod_that_ended_meanwhile_is_forgotten(cluster: Cluster) -> None:
    await cluster.api.stop()
    pod = await cluster.world.run(cluster.world.pod("web", app()))
    view = cluster.world.view(pod)
    cluster.cache._change(None, view)
    cluster.world.clock.now += 1
    cluster.announcing.look()
    assert cluster.announcer.state().waiting == 2
    cluster.cache._change(view, None)
    assert cluster.announcer.state().waiting == 1


async def test_an_allocation_that_turns_out_to_be_anothers_is_moved(cluster: Cluster) -> None:
    world = cluster.world
    one, other = await cluster.shown(world.pod("one", app())), await cluster.shown(world.pod("other", app()))
    await world.run(one)
    await cluster.look()
    assert "gpumgr.io/allocations" in cluster.annotations(one)
    (held,) = world.ledger.allocations.values()
    world.books.put(world.ledger.occupy(replace(held, pod=("team", "other"), uid=other.uid)))
    await cluster.look()
    await cluster.look()
    assert cluster.annotations(one) == {}
    assert cluster.allocations(other)[0]["allocation"] == held.id
    assert cluster.writes.count("event") == 1


async def test_a_schedulers_own_keys_stay_where_we_wrote_nothing(cluster: Cluster) -> None:
    pod = await cluster.shown(cluster.world.pod("web", app()))
    theirs = {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/predicate-gpu-idx-7": "1", "tencent.com/gpu-assigned": "false"}
    cluster.announcer.annotate_pod(("team", "web"), pod.uid, theirs)
    await cluster.until(lambda: cluster.cache.annotations(pod.uid) == theirs)
    await cluster.world.run(pod)
    await cluster.look()
    annotations = cluster.annotations(pod)
    assert annotations["tencent.com/gpu-assigned"] == "true"
    assert (annotations["tencent.com/predicate-gpu-idx-0"], annotations["tencent.com/predicate-gpu-idx-7"]) == ("0", "1")


# -- restarts and repairs ----------------------------------------------------------------------------------------------------


async def test_after_a_restart_only_what_is_missing_is_written(cluster: Cluster) -> None:
    told = await cluster.run(cluster.world.pod("told", app()))
    await cluster.look()
    await cluster.until(lambda: bool(cluster.cache.annotations(told.uid)))
    untold = await cluster.run(cluster.world.pod("untold", app()))
    cluster.announcing = cluster.announce()
    await cluster.look()
    await cluster.look()
    assert cluster.writes == ["pod", "event", "pod"]
    assert cluster.allocations(untold)[0]["evaluator"] == "share"


async def test_annotations_that_somebody_removed_are_written_again(cluster: Cluster) -> None:
    pod = await cluster.run(cluster.world.pod("web", app()))
    await cluster.look()
    await cluster.until(lambda: bool(cluster.cache.annotations(pod.uid)))
    before = dict(cluster.annotations(pod))
    cluster.announcer.annotate_pod(("team", "web"), pod.uid, dict.fromkeys(before))
    await cluster.until(lambda: not cluster.cache.annotations(pod.uid))
    await cluster.look(CHECK_SECONDS)
    await cluster.look()
    assert cluster.annotations(pod) == before


async def test_a_container_on_a_gpu_that_the_driver_does_not_show_waits(cluster: Cluster) -> None:
    pod = await cluster.run(cluster.world.pod("web", app()))
    await cluster.world.books.set_snapshot(NodeSnapshot(gpus=(), topology=Topology((), ())))
    await cluster.look()
    assert cluster.writes == []
    await cluster.world.books.set_snapshot(cluster.world.node)
    await cluster.look()
    assert cluster.allocations(pod)[0]["indices"] == [0]


async def test_nothing_is_kept_of_pods_that_are_gone(cluster: Cluster) -> None:
    world, told = cluster.world, cluster.announcing
    for number in range(5):
        pod = await cluster.run(world.pod(f"web-{number}", app()))
        await cluster.look()
        world.end(pod)
        await world.sweep(2)
        await world.sweep(2)
        cluster.api.remove(pod.uid)
        await cluster.until(lambda uid=pod.uid: cluster.cache.by_uid(uid) is None)  # type: ignore[misc]
    await cluster.look()
    assert not world.ledger.allocations
    kept = (
        told._due,
        told._untold,
        told._evaluators,
        told._written,
        told._late,
        told._renamed,
    )
    assert [len(each) for each in kept] == [0] * 6
    assert cluster.writes.count("pod") == cluster.writes.count("event") == 5


async def test_a_pod_that_runs_on_keeps_its_evaluator_however_much_happens(cluster: Cluster) -> None:
    pod = await cluster.run(cluster.world.pod("web", app()))
    await cluster.look()
    await cluster.until(lambda: bool(cluster.cache.annotations(pod.uid)))
    for number in range(2 * HISTORY_ENTRIES):
        cluster.tell(what="freed", id=f"other-{number}")
    cluster.announcing = cluster.announce()
    await cluster.look()
    await cluster.look()
    assert cluster.writes == ["pod", "event"]
    assert cluster.allocations(pod)[0]["evaluator"] == "share"


# -- bugs --------------------------------------------------------------------------------------------------------------------


class BuggyPods(PodCache):
    """Stumbles over one pod."""

    def get(self, pod: PodKey) -> PodView | None:
        if pod == ("team", "odd"):
            raise LookupError("a bug")
        return super().get(pod)


async def test_a_bug_fails_nobody_who_tells_us_something(cluster: Cluster) -> None:
    cluster.cache.__class__ = BuggyPods
    with capture_logs() as logs:
        cluster.tell(what="event", pod=("team", "odd"), code="GpuLimitBroken", why="a")
        cluster.tell(what="event", pod=("team", "odd"), code="GpuLimitBroken", why="b")
    assert [(line["event"], line["daemon"]) for line in logs] == [("daemon_failed", "announcing")]
    cluster.tell(what="gpu", code="lost", gpus=("00000001",), why="XID 79")
    await cluster.written()
    assert [event["reason"] for event in cluster.events] == ["GpuLost"]


async def test_a_bug_over_one_pod_keeps_nothing_from_the_others(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(view: PodView, *arguments: Any, **named: Any) -> dict[str, str]:
        if view.name == "odd":
            raise LookupError("a bug")
        return pod_annotations(view, *arguments, **named)

    monkeypatch.setattr(announcing, "pod_annotations", odd)
    await cluster.run(cluster.world.pod("odd", app()))
    web = await cluster.run(cluster.world.pod("web", app()))
    with pytest.raises(LookupError):
        await cluster.look()
    assert cluster.described == 1
    await cluster.look()
    assert cluster.allocations(web)[0]["container"] == "main"
    assert cluster.described == 2


# -- refused and other news --------------------------------------------------------------------------------------------------


async def test_a_refused_pod_is_told_why_and_not_that_a_part_of_it_was_placed(cluster: Cluster) -> None:
    pod = await cluster.shown(cluster.world.pod("web", app("one"), app("two", 40, 0)))
    with pytest.raises(Refused):
        await cluster.world.run(pod)
    await cluster.shown(pod, PodStatus(phase="Failed", reason="UnexpectedAdmissionError"))
    await cluster.look()
    assert cluster.writes == ["event"]
    (event,) = cluster.events
    assert (event["type"], event["reason"]) == ("Warning", "GpuRefused")
    assert event["message"].startswith("container two: 40 cores asked without memory")
    refused = cluster.history.entries()[-1]
    assert event["metadata"]["annotations"] == {"gpumgr.io/allocation": refused.id}
    assert event["message"].endswith(f"[allocation {refused.id}]")


async def test_what_a_pod_is_told_besides(cluster: Cluster) -> None:
    pod = await cluster.run(cluster.world.pod("web", app()))
    (held,) = cluster.world.ledger.allocations.values()
    await cluster.look()
    cluster.tell(what="event", id=held.id, pod=held.pod, pod_uid=pod.uid, code="GpuMemoryOverLimit", why="too much")
    cluster.tell(what="event", id=held.id, code="GpuLimitBroken", why="without a name, but of its allocation")
    await cluster.written()
    assert [(event["reason"], event["type"], event["involvedObject"]["uid"]) for event in cluster.events[1:]] == [
        ("GpuMemoryOverLimit", "Warning", pod.uid),
        ("GpuLimitBroken", "Warning", pod.uid),
    ]


async def test_that_nothing_keeps_a_container_is_said_where_it_was_placed_and_costs_nothing_more(cluster: Cluster) -> None:
    pod = await cluster.run(cluster.world.pod("web", app()))
    (held,) = cluster.world.ledger.allocations.values()
    assert held.mechanisms == ("none",)
    cluster.tell(what="event", id=held.id, pod=held.pod, pod_uid=pod.uid, code="GpuLimitNotEnforced", why="nothing keeps it")
    await cluster.look()
    assert cluster.writes == ["pod", "event"]
    (event,) = cluster.events
    assert (event["reason"], event["type"]) == ("GpuPlaced", "Normal")
    assert "; GpuLimitNotEnforced: nothing on this node keeps container main within its share" in event["message"]


async def test_an_eviction_that_is_refused_is_in_the_history_and_the_pods_events(cluster: Cluster) -> None:
    pod = await cluster.shown(cluster.world.pod("web", app()))
    cluster.api.forbidden.add(("create", "pods/eviction"))
    cluster.announcer.on_refused_eviction = partial(tell_refused_eviction, cluster.history)
    for _ in range(2):
        cluster.announcer.evict(("team", "web"), pod.uid, reason="GPU0 is drained")
        await cluster.written()
    (told,) = cluster.history.entries()
    assert (told.what, told.code, told.pod, told.pod_uid) == ("event", "GpuPodNotEvicted", ("team", "web"), pod.uid)
    assert told.why.startswith("the pod is not evicted (GPU0 is drained): HTTP 403: ")
    assert told.why.endswith("create on pods/eviction")
    assert [(event["reason"], event["type"]) for event in cluster.events] == [("GpuPodNotEvicted", "Warning")]


async def test_a_static_pods_events_are_where_kubectl_looks_for_them(cluster: Cluster) -> None:
    view = replace(cluster.world.view(cluster.world.pod("web", app())), runtime_uid="of-the-kubelet")
    cluster.cache._change(None, view)
    cluster.tell(what="event", pod=view.key, pod_uid="of-the-kubelet", code="GpuLimitBroken", why="a")
    cluster.tell(what="event", pod=view.key, pod_uid=view.uid, code="GpuLimitBroken", why="b")
    await cluster.written()
    assert [event["involvedObject"]["uid"] for event in cluster.events] == ["of-the-kubelet"] * 2


async def test_news_of_a_pod_that_is_not_known_yet_wait_for_a_while(cluster: Cluster) -> None:
    pod = cluster.world.pod("web", app())
    cluster.tell(what="refused", id="r1", pod=("team", "web"), code="no_fit", why="no room")
    cluster.tell(what="refused", id="r2", pod=("team", "never"), code="no_fit", why="no room")
    cluster.tell(what="refused", id="r3", code="no_fit", why="nobody knows whose it is")
    await cluster.look()
    assert cluster.writes == []
    await cluster.shown(pod)
    await cluster.look()
    assert [event["involvedObject"]["uid"] for event in cluster.events] == [pod.uid]
    await cluster.look(LATE_SECONDS)
    assert cluster.announcer.state().dropped == 1
    for number in range(MAX_LATE + 3):
        cluster.tell(what="refused", id=f"r{number}", pod=("team", f"never-{number}"), code="no_fit", why="no room")
    assert cluster.announcer.state().dropped == 4


async def test_what_becomes_of_gpus_is_told_to_the_node(cluster: Cluster) -> None:
    for code, why in (("lost", "XID 79: the GPU has fallen off the bus"), ("back", "it is well again"), ("cordoned", "")):
        cluster.tell(what="gpu", code=code, gpus=("00000001",), why=why)
    await cluster.written()
    assert [(event["type"], event["reason"], event["message"]) for event in cluster.events] == [
        ("Warning", "GpuLost", "GPU1 (00000001): XID 79: the GPU has fallen off the bus"),
        ("Normal", "GpuBack", "GPU1 (00000001): it is well again"),
        ("Normal", "GpuCordoned", "GPU1 (00000001): cordoned"),
    ]
    assert {(namespace, event["involvedObject"]["uid"]) for (namespace, _), event in cluster.api.written.events.items()} == {
        ("default", "node-1")
    }
