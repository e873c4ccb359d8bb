"""HTTP servers in the place of the agent and of the API server."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.component.kube.conftest import write_kubeconfig

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listening(socket: Path, handlers: Mapping[tuple[str, str], Handler]) -> AsyncIterator[Path]:
    """`handlers` by method and aiohttp's pattern of a path."""
    app = web.Application()
    for (method, path), handler in handlers.items():
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield socket
    finally:
        await runner.cleanup()


@asynccontextmanager
async def api_server(kubeconfig: Path, handler: Handler) -> AsyncIterator[Path]:
    """Answers every request by `handler`. Writes and yields its kubeconfig."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app, host="127.0.0.1") as server:
        yield write_kubeconfig(kubeconfig, f"http://127.0.0.1:{server.port}")
