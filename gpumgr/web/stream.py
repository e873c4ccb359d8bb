"""/api/stream: the state as server-sent events, one per sample period, for every open page.

An event is encoded once for all clients. A slow client gets the newest state next and skips those in between.
"""

import asyncio
from contextlib import suppress
from typing import Final

from aiohttp import web

from gpumgr.common.aio import Subscription
from gpumgr.web.read_model import ReadModel
from gpumgr.web.responses import failure

MAX_STREAMS: Final = 64
HEARTBEAT_SECONDS: Final = 15.0
#: A comment, which clients ignore; it keeps proxies from closing the connection.
_HEARTBEAT: Final = b":\n\n"
_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}


class Streams:
    """At most `limit` streams at once."""

    def __init__(self, sources: ReadModel, *, limit: int = MAX_STREAMS, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._sources, self._limit, self._heartbeat_seconds = sources, limit, heartbeat_seconds
        self._open: set[Subscription[bytes]] = set()
        self._encoded = (b"", b"")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Returns when the client has gone, which the next write finds, or `close` is called."""
        if len(self._open) >= self._limit:
            return failure(503, f"{self._limit} streams are open, which is the limit", headers={"Retry-After": "10"})
        with self._sources.states.subscribe() as states:
            self._open.add(states)
            try:
                return await self._stream(request, states)
            finally:
                self._open.discard(states)

    async def close(self, _app: web.Application) -> None:
        """Ends every stream with a complete response; for `on_shutdown` of the application."""
        for states in list(self._open):
            states.close()

    async def _stream(self, request: web.Request, states: Subscription[bytes]) -> web.StreamResponse:
        # Without readers no states are published, so the latest one may be old.
        stale = self._sources.states.value
        newest = await self._sources.state()
        response = web.StreamResponse(headers=_HEADERS)
        if request.transport is None:
            raise ConnectionResetError("the client went while the state was built")
        request.transport.set_write_buffer_limits(high=1)  # a write ends when the client has read it
        with suppress(ConnectionError):  # the client has gone
            await response.prepare(request)
            await response.write(self._event(newest))
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_seconds):
                        state = await anext(states)
                except TimeoutError:
                    await response.write(_HEARTBEAT)
                    continue
                except StopAsyncIteration:
                    break
                if state not in (stale, newest):
                    stale, newest = b"", state
                    await response.write(self._event(state))
        return response

    def _event(self, state: bytes) -> bytes:
        if self._encoded[0] is not state:
            self._encoded = state, b"event: state\ndata: " + state.replace(b"\n", b"\ndata: ") + b"\n\n"
        return self._encoded[1]
