"""The whole process on the simulated API server, its metrics and probes; and two replicas with one Lease."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from gpumgr.cluster.claims.lifecycle import FAMILIES, claims_routes, run_claims
from gpumgr.cluster.scheduler.leader import LEADER_LABEL, Replica
from gpumgr.cluster.scheduler.lease import LeaseTimes
from gpumgr.cluster.scheduler.pages import page_server
from gpumgr.common.errors import InputError, SettingsError
from gpumgr.kube.reflector import prompt_watches
from gpumgr.settings import Settings
from gpumgr.settings.schema import ClaimsSettings, HttpSettings
from tests.background import until
from tests.cluster_api import ClusterApiServer
from tests.component.cluster.scheduler.conftest import Clock
from tests.component.cluster.scheduler.leases import Leases

from .conftest import GATE, DraObjects, Stage, pod, quota, running


async def test_it_works_until_it_is_stopped(dra: DraObjects, tmp_path: Path) -> None:
    settings = Settings(claims=ClaimsSettings(http_port=0), http=HttpSettings(address="127.0.0.1"))
    stop = asyncio.Event()
    process = asyncio.create_task(run_claims(settings, dra.sim.kubeconfig(tmp_path / "kubeconfig"), stop=stop))
    dra.sim.put_document(pod("one", "vcuda-c0-30-20"))
    await until(lambda: bool(dra.templates) or process.done())
    stop.set()
    await process
    assert dra.templates == ["team/vcuda-c0-30-20"]


async def test_what_can_t_be_used_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="give --kubeconfig FILE"):
        await run_claims(Settings(), tmp_path / "missing", stop=asyncio.Event())
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    monkeypatch.setattr("gpumgr.cluster.scheduler.lifecycle._SERVICE_ACCOUNT", Path("/missing"))
    with pytest.raises(InputError, match=r"set claims\.lease_namespace"):
        await run_claims(Settings(claims=ClaimsSettings(leader_election=True)), None, stop=asyncio.Event())


@asynccontextmanager
async def serving(stage: Stage) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, str]]]]:
    """Its pages: a path -> status and text."""
    settings = Settings(http=HttpSettings(address="127.0.0.1"))
    server = page_server(claims_routes(stage.watches, stage.controller), stage.watches, settings, 0)
    await server.start()
    async with aiohttp.ClientSession(server.url) as client:

        async def get(path: str) -> tuple[int, str]:
            async with client.get(path) as answer:
                return answer.status, await answer.text()

        yield get
    await server.stop()


async def test_metrics_and_probes(dra: DraObjects, tmp_path: Path) -> None:
    dra.sim.put_configmap(quota(50))
    async with running(dra, tmp_path) as stage, serving(stage) as get:
        stage.gated_pod("late", 60)
        dra.sim.put_document({**pod("odd"), "spec": {"containers": 7}})
        await until(
            lambda: stage.controller.writes.total() == 2 and bool(stage.watches.templates) and stage.watches.unreadable == 1
        )
        status, text = await get("/metrics")
        assert status == 200
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines["gpumgr_claims_leader"] == lines["gpumgr_claims_synced"] == lines["gpumgr_claims_templates"] == "1"
        assert lines["gpumgr_claims_gated_pods"] == lines["gpumgr_claims_refused_pods"] == "1"
        assert lines["gpumgr_claims_api_objects_unreadable"] == "1"
        assert lines['gpumgr_claims_writes_total{object="template",outcome="ok"}'] == "1"
        assert all(f"# TYPE {family.name} {family.kind}" in text for family in FAMILIES)
        assert [(await get(path))[0] for path in ("/healthz", "/readyz", "/")] == [200, 200, 404]


async def test_nothing_is_written_while_watches_and_lists_fail(dra: DraObjects, tmp_path: Path) -> None:
    """A quota may have been used up, or a pod may have ended, and the controller does not know."""
    times = replace(prompt_watches(30.0), pause_seconds=(0.005, 0.02))
    async with running(dra, tmp_path, watch_times=times) as stage, serving(stage) as get:
        assert (stage.controller.leads, (await get("/readyz"))[0]) == (True, 200)
        await dra.sim.stop()
        stage.clock.now += 30
        await until(lambda: stage.watches.problem is not None)
        assert (stage.controller.leads, (await get("/readyz"))[0]) == (False, 503)
        await dra.sim.start()
        await until(lambda: stage.watches.problem is None)
        assert (stage.controller.leads, (await get("/readyz"))[0]) == (True, 200)


async def test_many_pods_at_once(stage: Stage) -> None:
    """Each look writes a limited number of events."""
    stage.sim.put_configmap(quota(100))
    for place in range(120):
        stage.sim.put_document(pod(f"p{place}", f"vcuda-c{place}-150-1", gates=[GATE], created=f"{place:03}"))
    await until(lambda: all(stage.events(f"p{place}") for place in range(120)))
    await until(lambda: dict(stage.controller.writes) == {("event", "ok"): 120})


#: Their clock moves only with the test.
TIMES = LeaseTimes(renew_seconds=0.01, look_seconds=0.01, request_seconds=0.3)


async def test_the_leader_alone_writes_and_the_other_one_takes_over(tmp_path: Path) -> None:
    sim = ClusterApiServer("a")
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
