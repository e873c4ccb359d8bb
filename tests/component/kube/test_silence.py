"""A reflector's pauses after failures, and when its copy counts as outdated: the API server answers neither watches nor lists, or only
one of them. The clock is the test's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.kube.client import ApiServer
from gpumgr.kube.pods import parse_pod
from gpumgr.kube.reflector import Reflector, WatchTimes, prompt_watches
from gpumgr.kube.watched import Watched
from tests.background import background, until

from .fake_api_server import Answer, FakeApiServer, pod, raw, silent, status

SLOW = status(429, "slow down", {"Retry-After": "1"})


class Silence:
    """A reflector. `now` moves as it sleeps; `slept` are its pauses. After `most_sleeps` it sleeps for good. `outdated_at`: when it was
    first outdated; `why`: its text then."""

    def __init__(self, server: ApiServer, most_sleeps: int, watch_times: WatchTimes) -> None:
        self.now, self.slept, self._most_sleeps = 0.0, list[float](), most_sleeps
        self.outdated_at: float | None = None
        self.why = ""
        self.reflector: Reflector[Any] = Reflector(
            server,
            Watched(path="/api/v1/pods", parse=parse_pod),
            on_change=lambda *_: None,
            watch_times=watch_times,
            sleep=self._sleep,
            jitter=lambda: 0.5,
            clock=lambda: self.now,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) > self._most_sleeps:
            await asyncio.Event().wait()
        self.now += seconds
        if self.outdated_at is None and (why := self.reflector.outdated) is not None:
            self.outdated_at, self.why = self.now, why
        await asyncio.sleep(0)


@asynccontextmanager
async def watched(server: ApiServer, *, most_sleeps: int = 10**9) -> AsyncIterator[Silence]:
    found = Silence(server, most_sleeps, replace(prompt_watches(30.0), silence_seconds=1e6))
    async with background(found.reflector.run()):
        await found.reflector.synced.wait()
        yield found


def test_a_silent_server_is_noticed_in_time() -> None:
    """The watch with the latest end, its silence, and the list after it."""
    for seconds in (15.0, 30.0, 600.0):
        times = prompt_watches(seconds)
        low, high = times.watch_seconds
        assert 4 < low <= high, "the bookmark is sent 2 s before the end"
        assert high + times.silence_seconds + 4 <= times.outdated_seconds == seconds
    assert prompt_watches(30.0).watch_seconds == (18, 20)


async def test_a_watch_asks_for_a_short_time_and_for_bookmarks(api: FakeApiServer, server: ApiServer) -> None:
    async with watched(server):
        await until(lambda: api.count(watch=True) == 1)
        query = api.seen[-1]
        assert (query["timeoutSeconds"], query["allowWatchBookmarks"]) == ("19", "true")


async def test_events_and_bookmarks_keep_the_copy_current(api: FakeApiServer, server: ApiServer) -> None:
    async with watched(server) as found:
        await until(lambda: api.count(watch=True) == 1)
        for number in range(200):
            found.now += 29.9
            assert found.reflector.outdated is None
            api.put_document(pod(f"p{number}", f"uid-{number}")) if number % 2 else api.bookmark()
            await until(lambda: found.reflector.silent_seconds == 0)
        assert (api.count(watch=False), api.count(watch=True)) == (1, 1)


async def test_the_end_of_a_watch_in_time_keeps_the_copy_current(api: FakeApiServer, server: ApiServer) -> None:
    """The API server sends no bookmark if nothing has changed since the watch began."""
    async with watched(server) as found:
        for number in range(1, 50):
            await until(partial(lambda number: api.count(watch=True) == number, number))
            await until(lambda: found.reflector._watching_since == found.now)
            found.now += 19
            assert found.reflector.outdated is None
            api.end_watches()
        assert api.count(watch=False) == 1


@pytest.mark.parametrize("watch", [SLOW, raw(), status(500, "no")], ids=["429", "early ends", "500"])
async def test_while_a_list_works_the_copy_is_current_whatever_the_watches_do(
    watch: Answer, api: FakeApiServer, server: ApiServer
) -> None:
    api.watches.extend([watch] * 1000)
    async with watched(server) as found:
        for number in range(1, 5):
            api.put_document(pod(f"p{number}", f"uid-{number}"))
            before = api.count(watch=False)
            await until(partial(lambda before: api.count(watch=False) > before + 1, before))
            assert found.reflector.outdated is None
            assert len(found.reflector._objects) == number
        # One list in 18 s, not one at each failure.
        assert api.count(watch=False) <= 2 + found.now / 18
        assert api.count(watch=True) > 3 * api.count(watch=False)


async def test_without_watches_and_lists_the_copy_is_outdated_in_time_and_says_why(api: FakeApiServer, server: ApiServer) -> None:
    with capture_logs() as logs:
        async with watched(server) as found:
            await until(lambda: api.count(watch=True) == 1)
            api.watches.extend([SLOW] * 1000)
            api.lists.extend([SLOW] * 1000)
            api.end_watches()
            await until(lambda: found.outdated_at is not None)
            assert found.outdated_at is not None
            assert 30 <= found.outdated_at <= 35, "a pause after the last failure may pass the limit"
            assert found.why.startswith("the API server has sent nothing about pods for 3")
            assert found.why.endswith("s, and a list has failed (HTTP 429: slow down)")
            await until(lambda: any(line["event"] == "objects_outdated" for line in logs))
            lists, watches = api.count(watch=False), api.count(watch=True)
            await until(lambda: api.count(watch=False) > lists and api.count(watch=True) > watches)
            api.watches.clear()  # one of the two is enough
            api.bookmark()
            await until(lambda: found.reflector.outdated is None)


async def test_a_list_that_hangs_counts_as_failed(api: FakeApiServer, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.kube.reflector._SHORTEST_LIST", 0.05)

    reset = asyncio.Event()

    async def until_reset(request: web.Request) -> web.StreamResponse:
        response = await raw()(request)
        await reset.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    api.watches.extend([until_reset, *[SLOW] * 1000])
    async with watched(server, most_sleeps=1) as found:
        await until(lambda: found.reflector._watching_since is not None)
        api.lists.append(silent())
        found.now = 29.99
        reset.set()
        await until(lambda: found.outdated_at is not None)


async def test_retry_after_is_kept_to_up_to_the_time_of_the_next_list(api: FakeApiServer, server: ApiServer) -> None:
    api.watches.extend([status(429, "slow down", {"Retry-After": "60"})] * 3)
    async with watched(server, most_sleeps=3) as found:
        api.lists.append(status(429, "slow down", {"Retry-After": "60"}))
        await until(lambda: len(found.slept) == 4)
        assert found.slept[:3] == pytest.approx([18, 60, 60]), "the first one ends for a list, which fails"


async def test_a_list_that_is_stopped_half_way_loses_no_change(
    api: FakeApiServer, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its changes are reported in slices, and `run` may be cancelled between them."""
    monkeypatch.setattr("gpumgr.common.aio.SLICE_SECONDS", -1.0)
    for number in range(120):
        api.put_document(pod(f"p{number}", f"uid-{number}"))
    copy, changes = dict[str, Any](), list[asyncio.Task[Any]]()

    def change(before: Any, after: Any) -> None:
        assert copy.pop(before.uid, None) == before if before is not None else after.uid not in copy
        if after is not None:
            copy[after.uid] = after
        if len(copy) == 60:
            changes[-1].cancel()

    reflector = Reflector(server, Watched(path="/api/v1/pods", parse=parse_pod), on_change=change)
    for _ in range(2):
        reflector.expire()
        changes.append(asyncio.create_task(reflector.run()))
        await asyncio.wait([changes[-1], asyncio.create_task(reflector.synced.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert (len(copy) == 120) == reflector.synced.is_set() == (len(changes) == 2)
    changes[-1].cancel()
    await asyncio.wait(changes)


# -- pauses ------------------------------------------------------------------------------------------------------------------


async def pauses(server: ApiServer, wanted: int, **watch_times: float) -> list[float]:
    """The first pauses of a reflector."""
    found = Silence(server, wanted - 1, WatchTimes(**watch_times))  # type: ignore[arg-type]
    async with background(found.reflector.run()):
        await until(lambda: len(found.slept) == wanted)
    return found.slept


@pytest.mark.parametrize(
    "storm",
    [
        pytest.param(raw(), id="clean ends"),
        pytest.param(status(500, "no"), id="errors"),
        pytest.param(status(410, "gone"), id="expired versions"),
    ],
)
async def test_pauses_grow_to_a_bound_while_nothing_works(storm: Answer, api: FakeApiServer, server: ApiServer) -> None:
    api.watches.extend([storm] * 10)
    assert await pauses(server, 8) == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])


async def test_waits_as_long_as_retry_after_requests(api: FakeApiServer, server: ApiServer) -> None:
    api.lists.append(status(429, "slow down", {"Retry-After": "7"}))
    api.lists.append(status(503, "slow down", {"Retry-After": "86400"}))
    api.lists.append(status(503, "slow down", {"Retry-After": "soon"}))
    assert await pauses(server, 3) == pytest.approx([7, 120, 2])


async def test_a_watch_that_lasted_is_resumed_at_once(api: FakeApiServer, server: ApiServer) -> None:
    api.watches.extend([raw()] * 5)
    api.watches.append(status(500, "no"))
    assert await pauses(server, 1, lasted_seconds=0.0) == pytest.approx([0.5])
    assert api.count(watch=True) == 6
