"""The memory that the bodies of requests take, before anything in them is checked."""

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog
from aiohttp import web

from gpumgr.web.connection import Connection

_log = structlog.get_logger(__name__)

_LOG_SECONDS: Final = 60.0
#: Added to the age of a body, so that the size decides among the ones that arrive at one time.
_YOUNG_SECONDS: Final = 0.01


@dataclass(eq=False, slots=True)
class _Body:
    request: web.BaseRequest
    began: float
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0


class Bodies:
    """Each body has at most `most_bytes`, and the ones that are in memory have at most `total_bytes` together. If they exceed it, the
    connection with the unfinished body of the largest product of size and age is closed: kube-scheduler and the API server send a body
    without a pause, and neither many large bodies nor many slow ones are a reason to close theirs. `clock` is monotonic, in seconds."""

    def __init__(self, most_bytes: int, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes, self._total_bytes, self._clock = most_bytes, total_bytes, clock
        #: The unfinished bodies, the oldest first; and the bytes of all.
        self._arriving: dict[_Body, None] = {}
        self._total = 0
        #: Connections that were closed, in all and when that was logged last.
        self.cut = 0
        self._logged = (-math.inf, 0)

    @asynccontextmanager
    async def of(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """The whole body, as long as it is needed. Raises HTTPRequestEntityTooLarge, and ConnectionError if the connection was closed."""
        body = _Body(request, self._clock())
        self._arriving[body] = None
        try:
            async for chunk in request.content.iter_any():
                if body in self._arriving:
                    self._add(body, chunk)
                if body.size > self._most_bytes:
                    raise web.HTTPRequestEntityTooLarge(self._most_bytes)
            if body not in self._arriving:
                raise ConnectionAbortedError
            del self._arriving[body]
            if isinstance(request.protocol, Connection):
                request.protocol.request_received()
            data = b"".join(body.chunks)
            body.chunks.clear()
            yield data
        finally:
            self._arriving.pop(body, None)
            self._total -= body.size

    def _add(self, body: _Body, chunk: bytes) -> None:
        body.chunks.append(chunk)  # a bytearray would take 22 MiB more for 600 bodies, since it grows by copies
        body.size += len(chunk)
        self._total += len(chunk)
        if self._total <= self._total_bytes:
            return
        now = self._clock()
        for each in sorted(self._arriving, key=lambda each: each.size * (now - each.began + _YOUNG_SECONDS), reverse=True):
            del self._arriving[each]
            self._total -= each.size
            each.size = 0
            each.chunks.clear()
            if each.request.transport is not None:
                each.request.transport.abort()
            self._log_cut(each.request)
            if self._total <= self._total_bytes:
                return

    def _log_cut(self, request: web.BaseRequest) -> None:
        self.cut += 1
        now = self._clock()
        if now >= self._logged[0] + _LOG_SECONDS:
            count, self._logged = self.cut - self._logged[1], (now, self.cut)
            limit = f"bodies of requests take more than {self._total_bytes >> 20} MiB"
            _log.warning("requests_cut", path=request.path, last_peer=request.remote, count=count, reason=limit)
