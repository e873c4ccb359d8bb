"""An API server that is silent, late or refuses watches: no GPU is given twice, and the scheduler says when it can't decide."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
from aiohttp import web
from msgspec.structs import replace

from gpumgr.cluster.scheduler.leader import Leadership
from gpumgr.common import aio
from gpumgr.kube.reflector import prompt_watches
from gpumgr.placement.requests import ContainerKind
from gpumgr.sim.apiserver_objects import failure
from tests.background import until
from tests.cluster_api import ClusterApiServer

from .conftest import Json, Stage, inventory, node, pod, running

#: The times of a scheduler, with short pauses; a watch ends earlier if the test says so.
TIMES = replace(prompt_watches(30.0), watch_seconds=(20, 20), pause_seconds=(0.005, 0.02))
WHOLE: tuple[ContainerKind, int, int] = ("app", 100, 0)
Watch = Callable[..., Awaitable[web.StreamResponse]]


def refusing(_: Watch) -> Watch:
    async def refuse(*_: object, **__: object) -> web.StreamResponse:
        return failure(429, "TooManyRequests", "slow down", {"Retry-After": "1"})

    return refuse


def hanging(_: Watch) -> Watch:
    async def hang(request: web.Request, **_: object) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    return hang


def late(watch: Watch) -> Watch:
    """Each watch shows what happened before the test's event, which is never set."""

    async def wait(request: web.Request, **options: object) -> web.StreamResponse:
        await asyncio.Event().wait()
        return await watch(request, **options)

    return wait


@pytest.mark.parametrize("fault", [refusing, hanging, late], ids=["429", "hangs", "late"])
async def test_no_gpu_is_given_twice_while_the_watch_of_pods_does_not_show_the_bindings(
    fault: Callable[[Watch], Watch], sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim._pods, "watch", fault(sim._pods.watch))
    async with running(sim, tmp_path) as stage:
        for number in range(6):
            item = await stage.create(pod(f"p{number}", WHOLE))
            (name,) = await stage.filtered(item)
            assert await stage.bind(item, name) == ""
        for _ in range(5):  # their time passes again and again
            stage.clock.now += 61
            await stage.extender.look_up_assumed()
            assert await stage.filtered(await stage.create(pod("late", WHOLE))) == []
            assert len(stage.index.assumed) == 6
        await sim.stop()
        stage.clock.now += 3600
        await stage.extender.look_up_assumed()
        assert await stage.filtered(pod("late", WHOLE)) == [], "no answer is no reason"
        await sim.start()
        gone, ended = "uid-p1", sim._pods.items["uid-p2"]
        sim.remove(gone)
        sim.put_document({**ended, "status": {"phase": "Succeeded"}})
        stage.clock.now += 61
        await stage.extender.look_up_assumed()
        assert len(stage.index.assumed) == 4
        assert len(await stage.filtered(pod("late", WHOLE))) == 1
        assert len(await stage.filtered(pod("later", WHOLE))) == 1
        assert await stage.filtered(pod("last", WHOLE)) == []


async def test_a_bound_pod_that_the_watch_does_not_show_is_not_moved(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kube-scheduler that starts, or has a late watch itself, filters it again."""
    monkeypatch.setattr(sim._pods, "watch", hanging(sim._pods.watch))
    async with running(sim, tmp_path) as stage:
        item = await stage.create(pod("one", ("app", 200, 0)))
        await stage.filter(item, ["a"])
        assert await stage.bind(item, "a") == ""
        assert "not clear yet whether the pod is bound" in (await stage.filter(item, ["b"]))["Error"]
        assert await stage.filtered(item, ["a", "b"]) == ["a"]
        assert "HTTP 409" in await stage.bind(item, "a")
        await stage.extender.look_up_assumed()
        assert stage.cores("a") == [100, 100]


async def test_many_assumed_pods_are_looked_up_a_few_at_a_time(stage: Stage) -> None:
    for number in range(50):
        await stage.filter(pod(f"p{number}", ("app", 1, 1)))
    stage.clock.now += 60
    for left in (30, 10, 0, 0):
        await stage.extender.look_up_assumed()
        assert len(stage.index.assumed) == left
    assert stage.sim.requests.count("read") == 50


async def test_pods_that_cannot_be_read_do_not_keep_others_from_their_look_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods that wait the longest are next."""
    for number in range(50):
        await stage.filter(pod(f"p{number}", ("app", 1, 1)))
    stage.sim.forbidden.add(("get", "pods"))
    read, paths = stage.server.read, set[str]()

    async def noted(_method: str, path: str) -> Json:
        paths.add(path)
        return await read("GET", path)

    monkeypatch.setattr(stage.server, "read", noted)
    for _ in range(3):
        stage.clock.now += 60
        await stage.extender.look_up_assumed()
    assert (len(paths), len(stage.index.assumed)) == (50, 50)


async def test_what_changed_during_a_look_up_stays(stage: Stage) -> None:
    item = pod("one", ("app", 200, 0))
    await stage.filter(item, ["a"])
    stage.clock.now += 60
    stage.sim.delay_seconds = 0.2
    looking = asyncio.create_task(stage.extender.look_up_assumed())
    await asyncio.sleep(0)
    assert await stage.filtered(item, ["b"]) == ["b"]
    await looking
    assert sum(stage.cores("b")) == 200, "the pod's new filter has placed it"


async def test_a_listing_that_began_before_a_refresh_does_not_end_it(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica may become the leader while it lists everything. What has happened since then counts, too."""
    monkeypatch.setattr(sim._pods, "watch", hanging(sim._pods.watch))
    monkeypatch.setattr(aio, "SLICE_SECONDS", -1.0)
    async with running(sim, tmp_path) as stage:
        began = list[asyncio.Task[None]]()

        def settling() -> Iterator[None]:
            """The last step of a listing. In the first one a pod is bound, and the second refresh begins."""
            if not began:
                sim.put_document(pod("late", WHOLE, on="a"))
                began.append(asyncio.create_task(stage.watches.refresh()))
            yield

        with patch.object(stage.index, "settling", settling):
            first = asyncio.create_task(stage.watches.refresh())
            await until(lambda: began)
            await began[0]
        await first
        assert sum(stage.cores("a")) == 100


async def test_without_watches_and_lists_the_verbs_answer_an_error_until_the_api_server_answers(
    sim: ClusterApiServer, tmp_path: Path
) -> None:
    async with running(sim, tmp_path, watch_times=TIMES) as stage:
        item = await stage.create(pod("one", WHOLE))
        await sim.stop()
        stage.clock.now += 29
        assert await stage.filtered(item), "in time"
        stage.clock.now += 1
        await until(lambda: stage.extender.problem is not None)
        told = (await stage.filter(item))["Error"]
        assert told.startswith("the API server has sent nothing about ")
        assert " for 30 s, and a list has failed (ClientConnectorError" in told
        assert told.endswith("; no pod is placed until it answers")
        assert (await stage.bind(item, "a")).endswith("; no pod is placed until it answers")
        assert await stage.ready() == [503, 503]
        assert 'gpumgr_scheduler_api_silence_seconds{resource="pods"} 30' in (await stage.page("/metrics"))[1]
        await sim.start()
        await until(lambda: stage.extender.problem is None)
        assert await stage.ready() == [200, 200]
        assert await stage.filtered(item)


@pytest.mark.parametrize("bookmarks", [True, False], ids=["bookmarks", "no bookmarks"])
async def test_a_quiet_cluster_with_5000_nodes_is_always_ready(sim: ClusterApiServer, tmp_path: Path, bookmarks: bool) -> None:
    """A quarter of an hour without any change: each watch ends in time, and no list follows."""
    for watched in sim._watched.values():
        watched.needless_bookmarks = bookmarks
    names = [f"n{number}" for number in range(5000)]
    for name in names:
        sim.put_node(node(name, 1, inventory(name, 1)))
    async with running(sim, tmp_path, watch_times=TIMES) as stage:
        lists = sim.requests.count("list")
        for round_ in range(45):
            await until(partial(lambda number: sim.requests.count("watch") == number, 3 * (round_ + 1)))
            await until(lambda: all(each._watching_since == stage.clock.now for each in stage.watches._watched))
            for seconds in (18, 2):
                stage.clock.now += seconds
                assert stage.extender.problem is None
            assert await stage.ready() == [200, 200]
            sim.end_watches()
        assert await stage.filtered(pod("one", WHOLE), names) == ["n0"]
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
    (name,) = await stage.filtered(item)
    stage.extender._leadership = cast("Leadership", EndingLease())
    assert (await stage.bind(item, name)).startswith("the Lease of this replica may end before the binding does")
    assert stage.sim._pods.items["uid-one"]["spec"].get("nodeName") is None
    assert len(stage.index.assumed) == 0
    assert await stage.bind(item, name) == ""
