"""The HTTP server of the extender: verbs under /scheduler, probes beside them.

The answer to every verb has the status 200, and an error is its `Error`: kube-scheduler shows that text in the pod's events.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from gpumgr.scheduler.extender import NOT_SYNCED, Extender
from gpumgr.scheduler.metrics import OUTCOME, outcome_of
from gpumgr.scheduler.wire import BindArgs, BindResult, FilterArgs, FilterResult, HostPriority

_log = structlog.get_logger(__name__)

PREFIX: Final = "/scheduler"
_Args = TypeVar("_Args", FilterArgs, BindArgs)
_Result = FilterResult | BindResult | list[HostPriority]


class _RequestError(Exception):
    """The body can't be used."""


def make_application(
    extender: Extender, *, max_request_mebibytes: int, middlewares: Sequence[Middleware] = ()
) -> web.Application:
    async def filter_nodes(request: web.Request) -> web.Response:
        return await _answer(request, FilterArgs, extender.filter, lambda error: FilterResult(error=error))

    async def prioritize(request: web.Request) -> web.Response:
        return await _answer(request, FilterArgs, extender.prioritize, lambda _: [])

    async def bind(request: web.Request) -> web.Response:
        try:
            return _json(await extender.bind(await _read(request, BindArgs)))
        except _RequestError as error:
            return _json(BindResult(str(error)))
        except Exception as error:
            return _json(BindResult(_bug(request, error)))

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if extender.ready else web.Response(status=503, text=f"{NOT_SYNCED}\n")

    application = web.Application(middlewares=middlewares, client_max_size=max_request_mebibytes << 20)
    application.add_routes(
        [
            web.post(f"{PREFIX}/filter", filter_nodes),
            web.post(f"{PREFIX}/prioritize", prioritize),
            web.post(f"{PREFIX}/bind", bind),
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
        ]
    )
    return application


async def _answer(
    request: web.Request, kind: type[_Args], verb: Callable[[_Args], _Result], failed: Callable[[str], _Result]
) -> web.Response:
    try:
        return _json(verb(await _read(request, kind)))
    except _RequestError as error:
        return _json(failed(str(error)))
    except Exception as error:
        return _json(failed(_bug(request, error)))


async def _read(request: web.Request, kind: type[_Args]) -> _Args:
    """Raises _RequestError."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except web.HTTPRequestEntityTooLarge as error:
        raise _RequestError(
            "the request is too long; set scheduler.max_request_mebibytes higher, or nodeCacheCapable: true in kube-scheduler's "
            "configuration"
        ) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _RequestError(f"the body is no request of extender/v1: {error}") from error


def _bug(request: web.Request, error: Exception) -> str:
    _log.error("verb_failed", path=request.path, error=repr(error), exc_info=error)
    return "gpumgr scheduler failed to answer; see its log"


def _json(result: _Result) -> web.Response:
    response = web.Response(body=msgspec.json.encode(result), content_type="application/json")
    response[OUTCOME] = outcome_of(result)
    return response
