"""Two replicas with one Lease: who answers, which pod has the label, and what the new leader has read."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpumgr.cluster.scheduler.leader import LEADER_LABEL, Replica
from gpumgr.cluster.scheduler.lease import LeaseTimes
from tests.background import until
from tests.cluster_api import ClusterApiServer

from .conftest import Clock, Stage, inventory, node, pod, running
from .leases import Leases

#: Their clock does not move unless the test moves it, so a Lease ends when the test says so.
TIMES = LeaseTimes(renew_seconds=0.01, look_seconds=0.01, request_seconds=0.3)


@pytest.fixture
async def leased() -> AsyncIterator[tuple[ClusterApiServer, Leases]]:
    sim = ClusterApiServer("a")
    leases = Leases(sim)
    async with sim:
        for name, count in (("a", 2), ("b", 4)):
            sim.put_node(node(name, count, inventory(name, count)))
        for name in ("one", "two"):
            sim.put_document(pod(f"extender-{name}"))
        yield sim, leases


@asynccontextmanager
async def replica(sim: ClusterApiServer, folder: Path, name: str, clock: Clock) -> AsyncIterator[Stage]:
    wanted = Replica(namespace="team", lease="gpumgr-scheduler", identity=name, pod=f"extender-{name}")
    async with running(sim, folder, replica=wanted, times=TIMES, clock=clock) as stage:
        yield stage


async def status(stage: Stage) -> tuple[int, str | None]:
    """The status of a filter call, with the answer's Connection header."""
    async with stage.http.post(f"{stage.url}/scheduler/filter", json={"Pod": pod("probe"), "NodeNames": ["a"]}) as answer:
        return answer.status, answer.headers.get("Connection")


async def answers(stage: Stage) -> None:
    async def works() -> bool:
        return (await status(stage))[0] == 200

    await until(works)


@pytest.mark.hami_bug("B39: every replica is ready")
async def test_one_replica_answers_and_both_are_ready(leased: tuple[ClusterApiServer, Leases], tmp_path: Path) -> None:
    sim, leases = leased
    clock = Clock()
    async with replica(sim, tmp_path, "one", clock) as one:
        await answers(one)
        async with replica(sim, tmp_path, "two", clock) as two:
            assert await status(two) == (503, "close")
            assert [await each.ready() for each in (one, two)] == [[200, 200]] * 2
            assert leases.holder == "one"
            await until(lambda: leases.labelled(LEADER_LABEL) == ["extender-one"])
        assert leases.holder == "one", "only a leader gives the Lease up"


async def test_a_leader_that_stops_hands_over_at_once(leased: tuple[ClusterApiServer, Leases], tmp_path: Path) -> None:
    """The clock does not move: nothing expires."""
    sim, leases = leased
    clock = Clock()
    async with AsyncExitStack() as stack:
        async with replica(sim, tmp_path, "one", clock) as one:
            await answers(one)
            two = await stack.enter_async_context(replica(sim, tmp_path, "two", clock))
        await answers(two)
        assert leases.holder == "two"
        await until(lambda: leases.labelled(LEADER_LABEL) == ["extender-two"])


async def test_a_leader_without_the_api_server_stops_before_another_one_leads(
    leased: tuple[ClusterApiServer, Leases], tmp_path: Path
) -> None:
    sim, leases = leased
    clock, other = Clock(), Clock(1e6)
    async with replica(sim, tmp_path, "one", clock) as one, replica(sim, tmp_path, "two", other) as two:
        await until(lambda: leases.holder != "")
        leader, follower = (one, two) if leases.holder == "one" else (two, one)
        await answers(leader)
        leases.lost = True
        for each in (clock, other):
            each.now += 4.1
        item = await leader.create(pod("late", ("app", 60, 16)))
        assert await leader.filtered(item) == ["a"]
        assert "Lease" in await leader.bind(item, "a"), "the binding might last longer than the Lease"
        for each in (clock, other):
            each.now += 3
        assert await status(leader) == (503, "close")
        assert await status(follower) == (503, "close")
        assert "bind" not in sim.requests


@pytest.mark.hami_bug("B30: pods are unmanaged during a failover")
async def test_a_dead_leader_is_replaced_and_its_label_removed(leased: tuple[ClusterApiServer, Leases], tmp_path: Path) -> None:
    """The new leader's watches are late: it lists everything before it answers."""
    sim, leases = leased
    clock = Clock()
    dead = {"holderIdentity": "one", "leaseDurationSeconds": 10, "renewTime": "then"}
    leases.document = {"metadata": {"name": "gpumgr-scheduler", "resourceVersion": "0"}, "spec": dead}
    stale = pod("extender-one")
    stale["metadata"]["labels"] = {LEADER_LABEL: "true"}
    sim.put_document(stale)
    async with replica(sim, tmp_path, "two", clock) as two:
        lists = sim.requests.count("list")
        clock.now += 9
        assert await status(two) == (503, "close")
        await until(lambda: two.leadership is not None and two.leadership._candidate.seen is not None)
        clock.now += 10
        await answers(two)
        assert sim.requests.count("list") >= lists + 3, "nodes, pods and quotas"
        await until(lambda: leases.labelled(LEADER_LABEL) == ["extender-two"])
        assert leases.holder == "two"


async def test_an_answer_without_a_list_of_pods_is_no_empty_list(leased: tuple[ClusterApiServer, Leases], tmp_path: Path) -> None:
    """The label of a dead leader is looked for until the API server has listed the pods."""
    sim, leases = leased
    sim.put_document({**pod("extender-one"), "metadata": {**pod("extender-one")["metadata"], "labels": {LEADER_LABEL: "true"}}})
    leases.empty = True
    with capture_logs() as logs:
        async with replica(sim, tmp_path, "two", Clock()) as two:
            await until(lambda: any("items" in line.get("error", "") for line in logs))
            await answers(two)
            assert leases.labelled(LEADER_LABEL) == ["extender-one", "extender-two"]
            leases.empty = False
            await until(lambda: leases.labelled(LEADER_LABEL) == ["extender-two"])


async def test_a_replica_without_rights_says_so_and_does_not_answer(
    leased: tuple[ClusterApiServer, Leases], tmp_path: Path
) -> None:
    sim, leases = leased
    with capture_logs() as logs:
        leases.lost = True
        async with replica(sim, tmp_path, "one", Clock()) as one:
            await until(lambda: any(line["event"] == "leader_election_retries" for line in logs))
            assert await status(one) == (503, "close")
            leases.lost = False
            await answers(one)


async def test_a_leader_that_loses_the_lease_stops_and_removes_its_label(
    leased: tuple[ClusterApiServer, Leases], tmp_path: Path
) -> None:
    sim, leases = leased
    async with replica(sim, tmp_path, "one", Clock()) as one:
        await answers(one)
        await until(lambda: leases.labelled(LEADER_LABEL) == ["extender-one"])
        assert leases.document is not None
        leases.document = {
            "metadata": {**leases.document["metadata"], "resourceVersion": "other"},
            "spec": {**leases.document["spec"], "holderIdentity": "other"},
        }
        await until(lambda: leases.labelled(LEADER_LABEL) == [])
        assert await status(one) == (503, "close")
    assert leases.holder == "other"
