"""/api/stream: the state as server-sent events, one per sample period, for every open page.

An event is encoded once for all clients. A slow client gets the newest state next and skips those in between.
"""

import asyncio
from contextlib import suppress
from typing import Final, cast

from aiohttp import web

from gpumgr.common.aio import Subscription
from gpumgr.web.connection import Connection
from gpumgr.web.responses import failure
from gpumgr.web.sources import Sources

MAX_STREAMS: Final = 64
HEARTBEAT_SECONDS: Final = 15.0
#: A comment, which clients ignore; it keeps proxies from closing the connection.
_HEARTBEAT: Final = b":\n\n"
_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}


class Streams:
    """At most `limit` streams at once."""

    def __init__(self, sources: Sources, *, limit: int = MAX_STREAMS, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._sources, self._limit, self._heartbeat_seconds = sources, limit, heartbeat_seconds
        self._open: set[Subscription[bytes]] = set()
        self._encoded = (b"", b"")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Returns when the client has gone or `close` is called."""
        if len(self._open) >= self._limit:
            return failure(503, f"{self._limit} streams are open, which is the limit", headers={"Retry-After": "10"})
        with self._sources.states.subscribe() as states:
            self._open.add(states)
            try:
                return await self._stream(request, states)
            finally:
                self._open.discard(states)

    def close(self) -> None:
        """Ends every stream with a complete response."""
        for states in list(self._open):
            states.close()

    async def _stream(self, request: web.Request, states: Subscription[bytes]) -> web.StreamResponse:
        # Without readers no states are published, so the latest one may be old.
        stale = self._sources.states.value
        newest = await self._sources.state()
        response = web.StreamResponse(headers=_HEADERS)
        cast(Connection, request.protocol).stream_started(states.close)
        with suppress(ConnectionError):  # the client has gone
            await response.prepare(request)
            await self._send(request, response, self._event(newest))
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_seconds):
                        state = await anext(states)
                except TimeoutError:
                    await self._send(request, response, _HEARTBEAT)
                    continue
                except StopAsyncIteration:
                    break
                if state not in (stale, newest):
                    stale, newest = b"", state
                    await self._send(request, response, self._event(state))
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, content: bytes) -> None:
        """Returns when the client has read nearly everything; the connection limit cuts one that reads nothing. Raises ConnectionError."""
        await response.write(content)
        await request.writer.drain()

    def _event(self, state: bytes) -> bytes:
        if self._encoded[0] is not state:
            self._encoded = state, b"event: state\ndata: " + state.replace(b"\n", b"\ndata: ") + b"\n\n"
        return self._encoded[1]
