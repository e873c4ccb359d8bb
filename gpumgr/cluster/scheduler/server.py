"""The HTTP server of the extender: the verbs (kube-scheduler's calls) under /scheduler, and /readyz.

A verb that fails still has status 200: `filter` and `bind` report the error in the field `Error`, which the pod's events show. A client
without a permitted certificate gets 403, and one that sends too slowly gets 408. A replica that does not lead answers 503 and closes the
connection, so that the client's next connection reaches the leader.
"""

import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeVar

import msgspec
import structlog
from aiohttp import web

from gpumgr.cluster.scheduler.extender import NOT_LEADING, Extender
from gpumgr.cluster.scheduler.metrics import outcome_of
from gpumgr.cluster.scheduler.wire import BindArgs, BindResult, FilterArgs, FilterResult, HostPriority, PreemptArgs, PreemptResult
from gpumgr.common.foreign_text import UnreadableText, decode_answer
from gpumgr.web.bodies import Bodies
from gpumgr.web.credentials import certificate_names

_log = structlog.get_logger(__name__)

PREFIX: Final = "/scheduler"
#: Beside one request body of the largest permitted size, other bodies may take this much memory: many small bindings arrive at a time.
_OTHER_BYTES: Final = 16 << 20
_Args = TypeVar("_Args", FilterArgs, BindArgs, PreemptArgs)
_Result = FilterResult | BindResult | PreemptResult | list[HostPriority]


def make_application(
    extender: Extender,
    *,
    max_request_mebibytes: int,
    client_names: Collection[str] = (),
    answered: Callable[[str, str, float], None] = lambda _verb, _outcome, _seconds: None,
) -> web.Application:
    """`client_names`: common names or DNS names of the certificates that may call the verbs; empty: all. `answered` takes the verb, the
    outcome and the seconds of each answer."""
    bodies = Bodies(max_request_mebibytes << 20, (max_request_mebibytes << 20) + _OTHER_BYTES)
    names = frozenset(client_names)

    async def readyz(_: web.Request) -> web.Response:
        problem = extender.problem
        return web.Response(text="ok\n") if problem is None else web.Response(status=503, text=f"{problem}\n")

    def answering(
        name: str, kind: type[_Args], verb: Callable[[_Args], Awaitable[_Result]], failed: Callable[[str], _Result]
    ) -> web.RouteDef:
        """Checks, before a body is read, whether this client may call the verb and whether this replica answers."""

        async def answer(request: web.Request) -> web.Response:
            if names and not names & certificate_names(request.get_extra_info("peercert")):
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
