"""The memory that the bodies of requests take, before anything in them is checked."""

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog
from aiohttp import web

from gpumgr.web.connection import Connection

_log = structlog.get_logger(__name__)

_LOG_SECONDS: Final = 60.0


@dataclass(eq=False, slots=True)
class _Body:
    request: web.BaseRequest
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0
    arriving: bool = True


class Bodies:
    """Each body has at most `most_bytes`, and those that are in memory have at most `total_bytes` together. If they exceed it, the
    connection with the oldest unfinished body is closed: kube-scheduler and the API server send a body without a pause."""

    def __init__(self, most_bytes: int, total_bytes: int) -> None:
        self._most_bytes, self._total_bytes = most_bytes, total_bytes
        #: The oldest first.
        self._kept: dict[_Body, None] = {}
        #: Connections that were closed, in all and when that was logged last.
        self.cut = 0
        self._logged = (-math.inf, 0)

    @asynccontextmanager
    async def of(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """The whole body, as long as it is needed. Raises HTTPRequestEntityTooLarge, and ConnectionError if the connection was closed."""
        body = _Body(request)
        self._kept[body] = None
        try:
            async for chunk in request.content.iter_any():
                body.chunks.append(chunk)
                body.size += len(chunk)
                if body.size > self._most_bytes:
                    raise web.HTTPRequestEntityTooLarge(self._most_bytes)
                self._make_room()
            body.arriving = False
            if isinstance(request.protocol, Connection):
                request.protocol.request_received()
            body.chunks = [b"".join(body.chunks)]
            yield body.chunks[0]
        finally:
            self._kept.pop(body, None)

    def _make_room(self) -> None:
        excess = sum(each.size for each in self._kept) - self._total_bytes
        for oldest in [each for each in self._kept if each.arriving] if excess > 0 else ():
            excess -= oldest.size
            del self._kept[oldest]
            oldest.chunks.clear()
            if oldest.request.transport is not None:
                oldest.request.transport.abort()
            self._log_cut(oldest.request)
            if excess <= 0:
                return

    def _log_cut(self, request: web.BaseRequest) -> None:
        self.cut += 1
        now = time.monotonic()
        if now >= self._logged[0] + _LOG_SECONDS:
            count, self._logged = self.cut - self._logged[1], (now, self.cut)
            limit = f"bodies of requests take more than {self._total_bytes >> 20} MiB"
            _log.warning("requests_cut", path=request.path, last_peer=request.remote, count=count, reason=limit)
