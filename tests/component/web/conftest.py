"""A server on a free port that stops quickly."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Protocol

import aiohttp
import pytest

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
