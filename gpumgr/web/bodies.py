"""Bounds the memory of the requests' bodies that an HTTP server receives at the same time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import structlog
from aiohttp import web

from gpumgr.common.aio import LogPace

_log = structlog.get_logger(__name__)

#: How long a body may take to arrive. A request with whole Node objects can have more than 100 MiB.
BODY_SECONDS: Final = 30.0
#: Added to the age of a body, so that the size decides among bodies that have just begun to arrive.
_YOUNG_SECONDS: Final = 0.01


class _Body(msgspec.Struct, eq=False):
    request: web.BaseRequest
    began: float
    chunks: list[bytes] = msgspec.field(default_factory=list)
    size: int = 0


class Bodies:
    """Each body may have up to `most_bytes`, and all bodies in memory up to `total_bytes` together.

    If the bodies exceed `total_bytes`, the connection of the unfinished body with the largest product of size and age is closed.
    kube-scheduler and the API server send a body without a pause, so they keep their connections even if other clients send many large
    or many slow bodies. `clock` is monotonic, in seconds.
    """

    def __init__(self, most_bytes: int, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes, self._total_bytes, self._clock = most_bytes, total_bytes, clock
        #: The unfinished bodies.
        self._arriving = dict[_Body, None]()
        self._total = 0
        self._cut, self._pace = 0, LogPace(clock)

    @asynccontextmanager
    async def of(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """Yields the whole body. It counts as in memory until the context ends.

        Raises HTTPRequestEntityTooLarge, HTTPRequestTimeout if the body has not arrived in BODY_SECONDS, and ConnectionError if the
        client has disconnected or its connection was closed.
        """
        body = _Body(request, self._clock())
        self._arriving[body] = None
        try:
            await self._receive(body)
            del self._arriving[body]
            data = b"".join(body.chunks)
            body.chunks.clear()
            yield data
        finally:
            self._arriving.pop(body, None)
            self._total -= body.size

    async def _receive(self, body: _Body) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in body.request.content.iter_any():
                    if body in self._arriving:
                        self._add(body, chunk)
                    if body.size > self._most_bytes:
                        raise web.HTTPRequestEntityTooLarge(self._most_bytes)
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"the body did not arrive in {BODY_SECONDS:g} s\n") from error
        if body not in self._arriving:
            raise ConnectionAbortedError

    def _add(self, body: _Body, chunk: bytes) -> None:
        body.chunks.append(chunk)  # a bytearray would take 22 MiB more for 600 bodies, since it grows by copies
        body.size += len(chunk)
        self._total += len(chunk)
        while self._total > self._total_bytes and self._arriving:
            now = self._clock()
            self._close(max(self._arriving, key=lambda each: each.size * (now - each.began + _YOUNG_SECONDS)))

    def _close(self, body: _Body) -> None:
        del self._arriving[body]
        self._total -= body.size
        body.size = 0
        body.chunks.clear()
        if body.request.transport is not None:
            body.request.transport.abort()
        self._cut += 1
        if self._pace.due():
            limit = f"bodies of requests take more than {self._total_bytes >> 20} MiB"
            _log.warning("requests_cut", path=body.request.path, last_peer=body.request.remote, count=self._cut, reason=limit)
            self._cut = 0
