"""Two replicas with one Lease: one writes."""

from pathlib import Path

from gpumgr.cluster.scheduler.leader import LEADER_LABEL, Replica
from gpumgr.cluster.scheduler.lease import LeaseTimes
from gpumgr.sim.apiserver import SimApiServer
from tests.background import until
from tests.component.cluster.scheduler.conftest import Clock
from tests.component.cluster.scheduler.leases import Leases

from .conftest import DraObjects, pod, quota, running

TIMES = LeaseTimes(renew_seconds=0.01, look_seconds=0.01, request_seconds=0.3)


async def test_the_leader_alone_writes_and_the_other_one_takes_over(tmp_path: Path) -> None:
    sim = SimApiServer("a")
    dra, leases = DraObjects(sim), Leases(sim)
    clock = Clock()

    def replica(name: str) -> Replica:
        return Replica(namespace="team", lease="gpumgr-claims", identity=name)

    async with sim:
        sim.put_configmap(quota(100))
        async with running(dra, tmp_path, replica=replica("two"), times=TIMES, clock=clock) as two:
            await until(lambda: leases.holder == "two")
            async with running(dra, tmp_path, replica=replica("one"), times=TIMES, clock=clock) as one:
                sim.put_document(pod("a", "vcuda-c0-1-1"))
                await until(lambda: bool(dra.templates))
                assert not one.controller.leads
                assert leases.labelled(LEADER_LABEL) == []
                leases.lost = True
                clock.now += 6  # the Lease may end within the time of a write
                assert not two.controller.leads
                sim.put_document(pod("b", "vcuda-c0-2-1"))
                await until(lambda: "uid-b" in one.watches.pods and "uid-b" in two.watches.pods)
                assert len(dra.posted) == 1
                leases.lost = False
                await until(lambda: len(dra.templates) == 2)
                assert one.controller.writes.total() == 0
