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
from gpumgr.web.http_server import HttpServer
from tests.component.web.scene import Scene, page_server


class Serve(Protocol):
    async def __call__(self, **options: Any) -> HttpServer:
        """A server that runs until the test ends; `options` as of `scene.page_server`."""
        ...


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
async def serve(scene: Scene) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> HttpServer:
            server = page_server(scene, **{"stop_seconds": 0.2, **options})
            await server.start()
            stack.push_async_callback(server.stop)
            return server

        yield start


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """With the token s3cret."""
    (tmp_path / "token").write_text("s3cret\n")
    return tmp_path / "token"


@pytest.fixture
async def server(serve: Serve) -> HttpServer:
    return await serve()


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


class HangingFiles:
    """The file system of the credentials, which hangs between `hang` and `release`. Only then a look at the files soon takes too long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._answers, self._read = threading.Event(), threading.Event()
        self._answers.set()
        look = credentials._stamp

        def stamp(*paths: Path) -> object:
            self._read.set()
            self._answers.wait(30)
            return look(*paths)

        monkeypatch.setattr(credentials, "_stamp", stamp)
        self._set_limit(30.0)

    def _set_limit(self, seconds: float) -> None:
        self._monkeypatch.setattr(credentials, "LOOK_SECONDS", seconds)

    def hang(self) -> None:
        self._set_limit(0.3)
        self._answers.clear()
        self._read.clear()

    async def until_read(self) -> None:
        """Until a look at the files hangs."""
        assert await asyncio.to_thread(self._read.wait, 10)

    def release(self) -> None:
        self._set_limit(30.0)
        self._answers.set()


@pytest.fixture
def hanging_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingFiles]:
    files = HangingFiles(monkeypatch)
    yield files
    files.release()
