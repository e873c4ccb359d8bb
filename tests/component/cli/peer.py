"""An HTTP server on a unix socket, in the agent's place."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

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
