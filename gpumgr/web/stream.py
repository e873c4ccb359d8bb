"""/api/stream: the state as server-sent events, one a sample period, to every page that is open.

An event is put together once and its bytes go to all. A client that takes them slowly gets the newest next, and misses what lay between.
"""

import asyncio
from contextlib import suppress
from typing import Final, cast

from aiohttp import web

from gpumgr.aio import Subscription
from gpumgr.web.answers import failure
from gpumgr.web.door.connection import Connection
from gpumgr.web.sources import Sources

MOST_STREAMS: Final = 64
HEARTBEAT_SECONDS: Final = 15.0
#: A comment, which readers pass over: proxies keep a line open on which something comes.
_HEARTBEAT: Final = b":\n\n"
_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}


class Streams:
    """`most` streams at once."""

    def __init__(self, sources: Sources, *, most: int = MOST_STREAMS, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._sources, self._most, self._heartbeat_seconds = sources, most, heartbeat_seconds
        self._open: set[Subscription[bytes]] = set()
        self._encoded = (b"", b"")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Until the client is gone or `close` is called."""
        if len(self._open) >= self._most:
            return failure(503, f"{self._most} streams are open, and that is the most", headers={"Retry-After": "10"})
        with self._sources.states.subscribe() as states:
            self._open.add(states)
            try:
                return await self._stream(request, states)
            finally:
                self._open.discard(states)

    def close(self) -> None:
        """Every stream ends in order."""
        for states in list(self._open):
            states.close()

    async def _stream(self, request: web.Request, states: Subscription[bytes]) -> web.StreamResponse:
        # While nobody read, no states were made: what lies there may be old.
        stale = self._sources.states.value
        newest = await self._sources.state()
        answer = web.StreamResponse(headers=_HEADERS)
        cast(Connection, request.protocol).streaming(states.close)
        with suppress(ConnectionError):  # gone
            await answer.prepare(request)
            await self._send(request, answer, self._event(newest))
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_seconds):
                        state = await anext(states)
                except TimeoutError:
                    await self._send(request, answer, _HEARTBEAT)
                    continue
                except StopAsyncIteration:
                    break
                if state not in (stale, newest):
                    stale, newest = b"", state
                    await self._send(request, answer, self._event(state))
        return answer

    async def _send(self, request: web.Request, answer: web.StreamResponse, content: bytes) -> None:
        """Returns when the client has taken it all (or nearly); the doorman cuts one who takes nothing. Raises ConnectionError."""
        await answer.write(content)
        await request.writer.drain()

    def _event(self, state: bytes) -> bytes:
        if self._encoded[0] is not state:
            self._encoded = state, b"event: state\ndata: " + state.replace(b"\n", b"\ndata: ") + b"\n\n"
        return self._encoded[1]
