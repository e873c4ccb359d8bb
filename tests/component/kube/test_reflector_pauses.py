"""The reflector's pauses after failures; its sleep only records them."""

import asyncio

import pytest

from gpumgr.kube.client import ApiServer
from gpumgr.kube.pods import parse_pod
from gpumgr.kube.reflector import Reflector, Watched, WatchTimes
from tests.background import background

from .fake_api_server import Answer, FakeApiServer, raw, status


async def pauses(server: ApiServer, wanted: int, watch_times: WatchTimes | None = None) -> list[float]:
    """The first pauses of a reflector, which does not really sleep."""
    slept: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == wanted:
            enough.set()
            await asyncio.Event().wait()

    reflector = Reflector(
        server,
        Watched(path="/api/v1/pods", parse=parse_pod),
        on_change=lambda *_: None,
        watch_times=watch_times,
        sleep=sleep,
        jitter=lambda: 0.5,
    )
    async with background(reflector.run()):
        await asyncio.wait_for(enough.wait(), 5)
    return slept


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
    assert await pauses(server, 1, WatchTimes(lasted_seconds=0.0)) == pytest.approx([0.5])
    assert api.count(watch=True) == 6
