"""A server on a free port that stops quickly."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest

from gpumgr.web import credentials
from gpumgr.web.server import WebServer
from tests.component.web.scene import Scene, origin_in_tests


class Serve(Protocol):
    async def __call__(self, **settings: Any) -> WebServer:
        """A server that runs until the test ends, with these arguments besides its address."""
        ...


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
async def serve(scene: Scene) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> WebServer:
            chosen = {"host": "127.0.0.1", "port": 0, "stop_seconds": 0.2, "origin_of": origin_in_tests, **settings}
            server = WebServer(scene, **chosen)
            await server.start()
            stack.push_async_callback(server.stop)
            return server

        yield start


@pytest.fixture
async def server(serve: Serve) -> WebServer:
    return await serve()


@pytest.fixture
async def client(server: WebServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


class HangingFiles:
    """The file system of the credentials, which hangs between `hang` and `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answers, self._read = threading.Event(), threading.Event()
        self._answers.set()
        look = credentials._stamp

        def stamp(*paths: Path) -> object:
            self._read.set()
            self._answers.wait(30)
            return look(*paths)

        monkeypatch.setattr(credentials, "_stamp", stamp)
        monkeypatch.setattr(credentials, "LOOK_SECONDS", 0.3)

    def hang(self) -> None:
        self._answers.clear()
        self._read.clear()

    async def until_read(self) -> None:
        """Until a look at the files hangs."""
        assert await asyncio.to_thread(self._read.wait, 10)

    def release(self) -> None:
        self._answers.set()


@pytest.fixture
def hanging_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingFiles]:
    files = HangingFiles(monkeypatch)
    yield files
    files.release()
