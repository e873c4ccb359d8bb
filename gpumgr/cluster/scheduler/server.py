"""The HTTP server of the extender: the verbs under /scheduler, and probes.

The response to a verb has status 200 even for an error: `filter` and `bind` report it in the field `Error`, which kube-scheduler shows in
the pod's events. A replica that does not lead answers 503 and closes the connection, so that the client's next connection reaches the
leader.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gpumgr import __version__
from gpumgr.cluster.scheduler.bodies import Bodies
from gpumgr.cluster.scheduler.extender import NOT_LEADING, Extender
from gpumgr.cluster.scheduler.metrics import OUTCOME, outcome_of
from gpumgr.cluster.scheduler.wire import BindArgs, BindResult, FilterArgs, FilterResult, HostPriority, PreemptArgs, PreemptResult
from gpumgr.common.foreign_text import UnreadableText, decode_answer

_log = structlog.get_logger(__name__)

PREFIX: Final = "/scheduler"
#: Bytes for all bodies together, in addition to the largest one: bindings are small, and many arrive at a time.
_OTHER_BYTES: Final = 16 << 20
_Args = TypeVar("_Args", FilterArgs, BindArgs, PreemptArgs)
_Result = FilterResult | BindResult | PreemptResult | list[HostPriority]


class _RequestError(Exception):
    """The body can't be used."""


def make_application(
    extender: Extender,
    *,
    max_request_mebibytes: int,
    client_names: Collection[str] = (),
    middlewares: Sequence[Middleware] = (),
) -> web.Application:
    """`client_names`: common names or DNS names of the client certificates that may call the verbs; empty: all."""

    async def readyz(_: web.Request) -> web.Response:
        problem = extender.problem
        return web.Response(text="ok\n") if problem is None else web.Response(status=503, text=f"{problem}\n")

    application = web.Application(middlewares=[*middlewares, _guard(extender, frozenset(client_names))])
    bodies = Bodies(max_request_mebibytes << 20, (max_request_mebibytes << 20) + _OTHER_BYTES)
    verbs: Mapping[str, Handler] = {
        "filter": partial(_answer, bodies, FilterArgs, extender.answer_filter, lambda error: FilterResult(error=error)),
        "prioritize": partial(_answer, bodies, FilterArgs, extender.prioritize, lambda _: []),
        "preempt": partial(_answer, bodies, PreemptArgs, lambda args, _: extender.preempt(args), _no_victims),
        "bind": partial(_answer, bodies, BindArgs, lambda args, _: extender.bind(args), BindResult),
    }
    application.add_routes([web.post(f"{PREFIX}/{verb}", handler) for verb, handler in verbs.items()])
    application.add_routes(
        [
            web.get("/version", partial(_text, __version__)),
            web.get("/healthz", partial(_text, "ok\n")),
            web.get("/readyz", readyz),
        ]
    )
    return application


def _guard(extender: Extender, names: frozenset[str]) -> Middleware:
    """Checks, before a verb is read, whether this client may call it and whether this replica answers."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith(f"{PREFIX}/"):
            return await handler(request)
        if names and not names & names_of(request.get_extra_info("peercert")):
            return web.Response(status=403, text="the client certificate has none of scheduler.client_names\n")
        if not extender.answers:
            refusal = web.Response(status=503, text=f"{NOT_LEADING}\n")
            refusal.force_close()
            return refusal
        response = await handler(request)
        asyncio.get_running_loop().call_soon(extender.prepare)  # after the response has been sent
        return response

    return guarded


def names_of(certificate: Mapping[str, Any] | None) -> set[str]:
    """The common names and DNS names of a certificate as ssl.SSLSocket.getpeercert returns it."""
    found = certificate or {}
    common = {value for part in found.get("subject", ()) for key, value in part if key == "commonName"}
    return common | {value for key, value in found.get("subjectAltName", ()) if key == "DNS"}


async def _text(text: str, _: web.Request) -> web.Response:
    return web.Response(text=text)


async def _answer(
    bodies: Bodies,
    kind: type[_Args],
    verb: Callable[[_Args, Callable[[], bool]], Awaitable[_Result]],
    failed: Callable[[str], _Result],
    request: web.Request,
) -> web.Response:
    """The second argument of `verb` is a function that returns whether the client has disconnected."""
    try:
        return _json(await verb(await _read(bodies, request, kind), lambda: request.transport is None))
    except _RequestError as error:
        return _json(failed(str(error)))
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        _log.error("verb_failed", path=request.path, error=repr(error), exc_info=error)
        return _json(failed("gpumgr scheduler failed to answer; see its log"))


async def _read(bodies: Bodies, request: web.Request, kind: type[_Args]) -> _Args:
    """Reads the body. Raises _RequestError, and ConnectionError if the client has disconnected."""
    try:
        async with bodies.of(request) as body:
            return await decode_answer(body, kind)
    except web.HTTPRequestEntityTooLarge as error:
        raise _RequestError(
            "the request is too long; set scheduler.max_request_mebibytes higher, or nodeCacheCapable: true in kube-scheduler's "
            "configuration"
        ) from error
    except UnreadableText as error:
        raise _RequestError(f"the body is no request of extender/v1: {error}") from error


def _no_victims(error: str) -> PreemptResult:
    """The response to `preempt` has no field `Error`, so the error is logged."""
    _log.warning("preemption_refused", reason=error)
    return PreemptResult()


def _json(result: _Result) -> web.Response:
    response = web.Response(body=msgspec.json.encode(result), content_type="application/json")
    response[OUTCOME] = outcome_of(result)
    return response
