import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import yaml

from gpumgr.kube.cache import PodCache
from gpumgr.kube.client import ApiServer
from gpumgr.kube.reflector import WatchTimes
from gpumgr.placement.pods import PodView
from gpumgr.sim.apiserver import SimApiServer
from tests.background import background

from .fake_api_server import FakeApiServer
from .stage import Stage, Time, staged

FAST = WatchTimes(pause_seconds=(0.005, 0.02), watch_seconds=(60, 60))

Change = tuple[PodView | None, PodView | None]


def write_kubeconfig(path: Path, server: str, token: str = "secret") -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me"}}],
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
async def api() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as fake:
        yield fake


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def server(api: FakeApiServer, time: Time, tmp_path: Path) -> AsyncIterator[ApiServer]:
    connection = await ApiServer.connect(api.kubeconfig(tmp_path / "kubeconfig"), clock=lambda: time.now)
    yield connection
    await connection.close()


@pytest.fixture
async def stage(sim: SimApiServer, tmp_path: Path) -> AsyncIterator[Stage]:
    """A publisher in front of `sim`."""
    async with staged(sim.kubeconfig(tmp_path / "kubeconfig")) as made:
        yield made


@pytest.fixture
async def odd(api: FakeApiServer, tmp_path: Path) -> AsyncIterator[Stage]:
    """A publisher in front of `api`."""
    async with staged(api.kubeconfig(tmp_path / "kubeconfig")) as made:
        yield made


class Running:
    """A pod cache that runs, and the changes that its listener received."""

    def __init__(self, cache: PodCache) -> None:
        self.cache = cache
        self.changes: asyncio.Queue[Change] = asyncio.Queue()
        cache.subscribe(lambda before, after: self.changes.put_nowait((before, after)))

    async def next(self) -> Change:
        return await self.changes.get()

    async def next_uids(self) -> tuple[str | None, str | None]:
        """Which incarnations the next change is from and to."""
        before, after = await self.next()
        return getattr(before, "uid", None), getattr(after, "uid", None)


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def start(server: ApiServer) -> Start:
    @asynccontextmanager
    async def started(watch_times: WatchTimes = FAST, *, synced: bool = True) -> AsyncIterator[Running]:
        running = Running(PodCache(server, "node-1", watch_times=watch_times))
        async with background(running.cache.run()) as task:
            if synced:
                await running.cache.wait_synced()
            yield running
            assert not task.done(), task

    return started
