"""An API server that is silent, late or refuses watches: no GPU is given twice, and the scheduler says when it can't decide."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

from gpumgr.cluster.scheduler.leader import Leadership
from gpumgr.cluster.scheduler.pages import page_server
from gpumgr.kube.reflector import prompt_watches
from gpumgr.placement.requests import ContainerKind
from gpumgr.settings import Settings
from gpumgr.settings.schema import HttpSettings, SchedulerSettings
from gpumgr.sim.apiserver_objects import failure
from tests.background import until
from tests.cluster_api import ClusterApiServer

from .conftest import Json, Stage, inventory, node, pod, running

#: The times of a scheduler, with short pauses; a watch ends earlier if the test says so.
TIMES = replace(prompt_watches(30.0), watch_seconds=(20, 20), pause_seconds=(0.005, 0.02))
WHOLE: tuple[ContainerKind, int, int] = ("app", 100, 0)
Watch = Callable[..., Awaitable[web.StreamResponse]]


def refusing(_: Watch) -> Watch:
    async def refuse(*_: object) -> web.StreamResponse:
        return failure(429, "TooManyRequests", "slow down", {"Retry-After": "1"})

    return refuse


def hanging(_: Watch) -> Watch:
    async def hang(request: web.Request, _: object) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    return hang


def late(watch: Watch) -> Watch:
    """Each watch shows what happened before the test's event, which is never set."""

    async def wait(request: web.Request, wanted: object) -> web.StreamResponse:
        await asyncio.Event().wait()
        return await watch(request, wanted)

    return wait


@pytest.mark.parametrize("fault", [refusing, hanging, late], ids=["429", "hangs", "late"])
async def test_no_gpu_is_given_twice_while_the_watch_of_pods_does_not_show_the_bindings(
    fault: Callable[[Watch], Watch], sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim._pods, "watch", fault(sim._pods.watch))
    async with running(sim, tmp_path, SchedulerSettings()) as stage:
        for number in range(6):
            item = await stage.create(pod(f"p{number}", WHOLE))
            (name,) = (await stage.filter(item))["NodeNames"]
            assert await stage.bind(item, name) == ""
        for _ in range(5):  # their time passes again and again
            stage.clock.now += 61
            await stage.extender.look_up_assumed()
            assert (await stage.filter(await stage.create(pod("late", WHOLE))))["NodeNames"] == []
            assert len(stage.index.assumed) == 6
        await sim.stop()
        stage.clock.now += 3600
        await stage.extender.look_up_assumed()
        assert (await stage.filter(pod("late", WHOLE)))["NodeNames"] == [], "no answer is no reason"
        await sim.start()
        gone, ended = "uid-p1", sim._pods.items["uid-p2"]
        sim.remove(gone)
        sim.put_document({**ended, "status": {"phase": "Succeeded"}})
        stage.clock.now += 61
        await stage.extender.look_up_assumed()
        assert len(stage.index.assumed) == 4
        assert len((await stage.filter(pod("late", WHOLE)))["NodeNames"]) == 1
        assert len((await stage.filter(pod("later", WHOLE)))["NodeNames"]) == 1
        assert (await stage.filter(pod("last", WHOLE)))["NodeNames"] == []


async def test_a_bound_pod_that_the_watch_does_not_show_is_not_moved(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kube-scheduler that starts, or has a late watch itself, filters it again."""
    monkeypatch.setattr(sim._pods, "watch", hanging(sim._pods.watch))
    async with running(sim, tmp_path, SchedulerSettings()) as stage:
        item = await stage.create(pod("one", ("app", 200, 0)))
        await stage.filter(item, ["a"])
        assert await stage.bind(item, "a") == ""
        assert "not clear yet whether the pod is bound" in (await stage.filter(item, ["b"]))["Error"]
        assert (await stage.filter(item, ["a", "b"]))["NodeNames"] == ["a"]
        assert "HTTP 409" in await stage.bind(item, "a")
        await stage.extender.look_up_assumed()
        assert stage.cores("a") == [100, 100]


async def test_many_assumed_pods_are_looked_up_a_few_at_a_time(sim: ClusterApiServer, tmp_path: Path) -> None:
    async with running(sim, tmp_path, SchedulerSettings()) as stage:
        for number in range(50):
            await stage.filter(pod(f"p{number}", ("app", 1, 1)))
        stage.clock.now += 60
        for left in (30, 10, 0, 0):
            await stage.extender.look_up_assumed()
            assert len(stage.index.assumed) == left
        assert sim.requests.count("read") == 50


async def test_pods_that_cannot_be_read_do_not_keep_others_from_their_look_up(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods that wait the longest are next."""
    async with running(sim, tmp_path, SchedulerSettings()) as stage:
        for number in range(50):
            await stage.filter(pod(f"p{number}", ("app", 1, 1)))
        sim.forbidden.add(("get", "pods"))
        read, paths = stage.server.read, set[str]()

        async def noted(_method: str, path: str) -> Json:
            paths.add(path)
            return await read("GET", path)

        monkeypatch.setattr(stage.server, "read", noted)
        for _ in range(3):
            stage.clock.now += 60
            await stage.extender.look_up_assumed()
        assert (len(paths), len(stage.index.assumed)) == (50, 50)


async def test_what_changed_during_a_look_up_stays(sim: ClusterApiServer, tmp_path: Path) -> None:
    async with running(sim, tmp_path, SchedulerSettings()) as stage:
        item = pod("one", ("app", 200, 0))
        await stage.filter(item, ["a"])
        stage.clock.now += 60
        sim.delay_seconds = 0.2
        looking = asyncio.create_task(stage.extender.look_up_assumed())
        await asyncio.sleep(0)
        assert (await stage.filter(item, ["b"]))["NodeNames"] == ["b"]
        await looking
        assert sum(stage.cores("b")) == 200, "the pod's new filter has placed it"


async def readyz(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer.status, await answer.text()


async def test_without_watches_and_lists_the_verbs_answer_an_error_until_the_api_server_answers(
    sim: ClusterApiServer, tmp_path: Path
) -> None:
    async with running(sim, tmp_path, SchedulerSettings(), watch_times=TIMES) as stage:
        settings = Settings(http=HttpSettings(address="127.0.0.1"))
        pages = page_server(stage.pages.routes(), stage.watches, settings, 0)
        await pages.start()
        page = f"http://127.0.0.1:{pages.address[1]}"
        item = await stage.create(pod("one", WHOLE))
        await sim.stop()
        stage.clock.now += 29
        assert (await stage.filter(item))["NodeNames"], "in time"
        stage.clock.now += 1
        await until(lambda: stage.extender.problem is not None)
        told = (await stage.filter(item))["Error"]
        assert told.startswith("the API server has sent nothing about ")
        assert " for 30 s, and a list has failed (ClientConnectorError" in told
        assert told.endswith("; no pod is placed until it answers")
        assert (await stage.bind(item, "a")).endswith("; no pod is placed until it answers")
        for url in (stage.url, page):
            assert (await readyz(f"{url}/readyz"))[0] == 503
        assert 'gpumgr_scheduler_api_silence_seconds{resource="pods"} 30' in (await readyz(f"{page}/metrics"))[1]
        await sim.start()
        await until(lambda: stage.extender.problem is None)
        for url in (stage.url, page):
            assert (await readyz(f"{url}/readyz"))[0] == 200
        assert (await stage.filter(item))["NodeNames"]
        await pages.stop()


@pytest.mark.parametrize("bookmarks", [True, False], ids=["bookmarks", "no bookmarks"])
async def test_a_quiet_cluster_with_5000_nodes_is_always_ready(sim: ClusterApiServer, tmp_path: Path, bookmarks: bool) -> None:
    """A quarter of an hour without any change: each watch ends in time, and no list follows."""
    for watched in sim._watched.values():
        watched.needless_bookmarks = bookmarks
    names = [f"n{number}" for number in range(5000)]
    for name in names:
        sim.put_node(node(name, 1, inventory(name, 1)))
    async with running(sim, tmp_path, SchedulerSettings(), watch_times=TIMES) as stage:
        lists = sim.requests.count("list")
        for round_ in range(45):
            await until(partial(lambda number: sim.requests.count("watch") == number, 3 * (round_ + 1)))
            await until(lambda: all(each._watching_since == stage.clock.now for each in stage.watches._watched))
            for seconds in (18, 2):
                stage.clock.now += seconds
                assert stage.extender.problem is None
            assert await stage.get("/readyz") == 200
            sim.end_watches()
        assert (await stage.filter(pod("one", WHOLE), names))["NodeNames"] == ["n0"]
        assert sim.requests.count("list") == lists


class EndingLease:
    """A Lease that ends between two looks."""

    answers = True

    def __init__(self) -> None:
        self.looks = [True, False]

    def outlives(self, _: float) -> bool:
        return self.looks.pop(0) if self.looks else True


async def test_a_binding_is_not_sent_if_the_lease_ended_while_it_waited_for_a_connection(stage: Stage) -> None:
    """The process may have been stopped, or have had no connection, since the binding was allowed."""
    item: Json = await stage.create(pod("one", WHOLE))
    (name,) = (await stage.filter(item))["NodeNames"]
    stage.extender._leadership = cast("Leadership", EndingLease())
    assert (await stage.bind(item, name)).startswith("the Lease of this replica may end before the binding does")
    assert stage.sim._pods.items["uid-one"]["spec"].get("nodeName") is None
    assert len(stage.index.assumed) == 0
    assert await stage.bind(item, name) == ""
