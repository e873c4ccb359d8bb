"""Ten minutes without an API server, with pods that come and go. The publisher's pauses advance the clock."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumgr.agent.ports import Eviction
from gpumgr.kube.pod_annotations import ALLOCATIONS
from gpumgr.kube.publisher.decisions import MAX_LATE
from gpumgr.sim.kubelet_pods import SimContainer, SimPod
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World

from .cluster import Cluster, announced

AWAY_SECONDS = 600.0


class Outage:
    """What happens on the node while the API server can't be reached. It has the pods: the kubelet gets them from there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self.staying: list[SimPod] = []
        self.gone: list[SimPod] = []
        self.rounds = 0

    async def happens(self) -> None:
        """A pod comes and stays, another comes and ends; a GPU is lost and back; a pod that is never seen is refused."""
        self.rounds += 1
        self.staying.append(await self.comes(f"staying-{self.rounds}"))
        short = await self.comes(f"short-{self.rounds}")
        await self.ends(short)
        add = self._cluster.add
        add(what="gpu", code="lost", gpus=("00000001",), why=f"XID 79 for the {self.rounds}. time")
        add(what="gpu", code="back", gpus=("00000001",), why="it is well again")
        add(what="refused", id=f"r{self.rounds}", pod=("team", f"never-{self.rounds}"), code="no_fit", why="no room")

    async def comes(self, name: str) -> SimPod:
        pod = self._world.pod(name, SimContainer(name="main", cores=2, memory_blocks=1))
        self._cluster.api.put(pod)
        return await self._world.run(pod)

    async def ends(self, pod: SimPod) -> None:
        self._world.end(pod)
        await self._world.sweep(2)
        await self._world.sweep(2)
        self._cluster.api.remove(pod.uid)
        self.gone.append(pod)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    world = await World.made(snapshot(2, 64))
    began = world.clock.now

    async def sleep(seconds: float) -> None:
        world.clock.now += seconds
        await asyncio.sleep(0)

    timing = {
        "clock": world.clock,
        "wall": lambda: 1_800_000_000 + world.clock.now - began,
        "sleep": sleep,
        "jitter": lambda: 0.5,
    }
    async with announced(world, tmp_path, timing=timing) as made:
        yield made


async def test_after_ten_minutes_without_an_api_server_every_pod_that_exists_is_reported_and_no_other(cluster: Cluster) -> None:
    away, world = Outage(cluster), cluster.world
    before = [await away.comes(f"before-{number}") for number in range(3)]
    await cluster.until(lambda: all(cluster.cache.by_uid(pod.uid) for pod in before))
    await cluster.look()
    assert sorted(cluster.writes) == ["event"] * 3 + ["pod"] * 3
    await cluster.api.stop()
    back_at = world.clock.now + AWAY_SECONDS
    await away.ends(before[0])
    cluster.add(what="event", pod=("team", "before-0"), pod_uid=before[0].uid, code="GpuMemoryOverLimit", why="too much")
    cluster.publisher.evict("a drain", [Eviction(uid=before[1].uid, pod=("team", "before-1"), reason="GPU0 is drained")])
    while world.clock.now < back_at:
        await away.happens()
        world.clock.now += 1
        cluster.decisions.report()
        state, now = cluster.publisher.state(), world.clock.now
        assert state.waiting <= away.rounds * 2 + 3
        assert len(cluster.decisions._late) <= min(away.rounds, MAX_LATE)
        await cluster.until(lambda now=now: world.clock.now > now)  # type: ignore[misc]
    state = cluster.publisher.state()
    assert state.away
    assert state.oldest_seconds > AWAY_SECONDS / 2
    assert state.dropped > 0  # refusals of pods that were never seen
    written = len(cluster.writes)

    await cluster.api.start()
    await cluster.until(lambda: all(cluster.cache.by_uid(pod.uid) for pod in away.staying))
    await cluster.until(lambda: not any(cluster.cache.by_uid(pod.uid) for pod in (before[0], before[1])))
    await cluster.look()
    await cluster.look()
    state = cluster.publisher.state()
    assert (state.away, state.waiting, state.oldest_seconds) == (False, 0, 0.0)
    for pod in away.staying:
        (one,) = cluster.allocations(pod)
        assert one["allocation"] in world.ledger.allocations
    placed = [event["involvedObject"]["name"] for event in cluster.events if event["reason"] == "GpuPlaced"]
    assert sorted(placed) == sorted(pod.name for pod in (*before, *away.staying))
    assert sum(event["count"] for event in cluster.events if event["reason"] == "GpuLost") == away.rounds
    assert cluster.writes[written:].count("pod") == len(away.staying)
    assert cluster.writes[written:].count("evict") == 1
    kept = {*cluster.decisions._published, *cluster.decisions._due}
    assert not kept & {pod.uid for pod in away.gone}
    assert ALLOCATIONS in cluster.annotations(before[2])
