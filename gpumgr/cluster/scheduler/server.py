"""The HTTP server of the extender: the verbs (kube-scheduler's calls) under /scheduler, and /readyz.

The response to a verb has status 200 even for an error: `filter` and `bind` report it in the field `Error`, which kube-scheduler shows in
the pod's events. A replica that does not lead answers 503 and closes the connection, so that the client's next connection reaches the
leader.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec
import structlog
from aiohttp import web

from gpumgr.cluster.scheduler.extender import NOT_LEADING, Extender
from gpumgr.cluster.scheduler.metrics import outcome_of
from gpumgr.cluster.scheduler.wire import BindArgs, BindResult, FilterArgs, FilterResult, HostPriority, PreemptArgs, PreemptResult
from gpumgr.common.aio import LogPace
from gpumgr.common.foreign_text import UnreadableText, decode_answer

_log = structlog.get_logger(__name__)

PREFIX: Final = "/scheduler"
#: Bytes for all bodies together, in addition to the largest one: bindings are small, and many arrive at a time.
_OTHER_BYTES: Final = 16 << 20
#: How long a body may take to arrive. A request with whole Node objects can have more than 100 MiB.
BODY_SECONDS: Final = 30.0
#: Added to the age of a body, so that the size decides among bodies that have just begun to arrive.
_YOUNG_SECONDS: Final = 0.01
_Args = TypeVar("_Args", FilterArgs, BindArgs, PreemptArgs)
_Result = FilterResult | BindResult | PreemptResult | list[HostPriority]


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
        #: The unfinished bodies, the oldest first.
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


def make_application(
    extender: Extender,
    *,
    max_request_mebibytes: int,
    client_names: Collection[str] = (),
    answered: Callable[[str, str, float], None] = lambda _verb, _outcome, _seconds: None,
) -> web.Application:
    """`client_names`: common names or DNS names of the client certificates that may call the verbs; empty: all. `answered` is called with
    the verb, the outcome and the seconds of each answer."""
    bodies = Bodies(max_request_mebibytes << 20, (max_request_mebibytes << 20) + _OTHER_BYTES)
    names = frozenset(client_names)

    async def readyz(_: web.Request) -> web.Response:
        problem = extender.problem
        return web.Response(text="ok\n") if problem is None else web.Response(status=503, text=f"{problem}\n")

    def answering(
        name: str, kind: type[_Args], verb: Callable[[_Args], Awaitable[_Result]], failed: Callable[[str], _Result]
    ) -> web.RouteDef:
        """Checks, before a verb is read, whether this client may call it and whether this replica answers."""

        async def answer(request: web.Request) -> web.Response:
            if names and not names & names_of(request.get_extra_info("peercert")):
                answered(name, "error", 0.0)
                return web.Response(status=403, text="the client certificate has none of scheduler.client_names\n")
            if not extender.answers:
                answered(name, "unavailable", 0.0)
                refusal = web.Response(status=503, text=f"{NOT_LEADING}\n")
                refusal.force_close()
                return refusal
            began = time.perf_counter()
            result = await _answer(bodies, kind, verb, failed, request)
            answered(name, outcome_of(result), time.perf_counter() - began)
            return web.Response(body=msgspec.json.encode(result), content_type="application/json")

        return web.post(f"{PREFIX}/{name}", answer)

    application = web.Application()
    application.add_routes(
        [
            answering("filter", FilterArgs, extender.answer_filter, lambda error: FilterResult(error=error)),
            answering("prioritize", FilterArgs, extender.prioritize, lambda _: []),
            answering("preempt", PreemptArgs, extender.preempt, _no_victims),
            answering("bind", BindArgs, extender.bind, BindResult),
            web.get("/readyz", readyz),
        ]
    )
    return application


def names_of(certificate: Mapping[str, Any] | None) -> set[str]:
    """The common names and DNS names of a certificate as ssl.SSLSocket.getpeercert returns it."""
    found = certificate or {}
    common = {value for part in found.get("subject", ()) for key, value in part if key == "commonName"}
    return common | {value for key, value in found.get("subjectAltName", ()) if key == "DNS"}


async def _answer(
    bodies: Bodies,
    kind: type[_Args],
    verb: Callable[[_Args], Awaitable[_Result]],
    failed: Callable[[str], _Result],
    request: web.Request,
) -> _Result:
    """Raises ConnectionError if the client has disconnected, and HTTPRequestTimeout."""
    try:
        async with bodies.of(request) as body:
            args = await decode_answer(body, kind)
        return await verb(args)
    except web.HTTPRequestEntityTooLarge:
        return failed(
            "the request is too long; set scheduler.max_request_mebibytes higher, or nodeCacheCapable: true in kube-scheduler's "
            "configuration"
        )
    except UnreadableText as error:
        return failed(f"the request can't be read: {error}")
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        _log.error("verb_failed", path=request.path, error=repr(error), exc_info=error)
        return failed("gpumgr scheduler failed to answer; see its log")


def _no_victims(error: str) -> PreemptResult:
    """The response to `preempt` has no field `Error`, so the error is logged."""
    _log.warning("preemption_refused", reason=error)
    return PreemptResult()
