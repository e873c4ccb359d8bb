"""The middleware around each page: authorization, the size of the request's body, and errors as JSON."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, cast

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from gpumgr.common.errors import GpumgrError, InputError, Refusal
from gpumgr.web.access import AuthPolicy, CurrentPolicy, HttpClient, Scope, authorize
from gpumgr.web.connection import Connection
from gpumgr.web.responses import failure

_log = structlog.get_logger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: A maintenance request has some hundred bytes, a request for a page none.
MAX_BODY_BYTES: Final = 4096
#: In the place of `Authorization`, which Kubernetes' API server removes from what its proxies pass on.
PROXIED_AUTHORIZATION: Final = "X-Gpumgr-Authorization"


def make_middleware(scopes: Mapping[str, Scope], policy: CurrentPolicy, names: Collection[str]) -> Middleware:
    """`scopes` maps canonical paths to scopes; other paths count as "page". `policy` is read for remote clients, `names` are the names of
    this host."""

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        connection = cast(Connection, request.protocol)
        try:
            return await _denied(request, connection, scopes, policy, names) or await _respond(request, connection, handler)
        except web.HTTPNotFound:
            return failure(404, f"there is nothing at {request.path}", paths=list(scopes))
        finally:
            connection.response_sent()

    return middleware


async def _denied(
    request: web.Request,
    connection: Connection,
    scopes: Mapping[str, Scope],
    policy: CurrentPolicy,
    names: Collection[str],
) -> web.Response | None:
    resource = request.match_info.route.resource
    scope = scopes.get(resource.canonical, "page") if resource is not None else "page"
    caller = HttpClient(
        origin=connection.origin,
        certified=connection.certified,
        authorization=request.headers.get("Authorization", request.headers.get(PROXIED_AUTHORIZATION)),
        hosts=tuple(request.headers.getall("Host", ())),
    )
    current = await policy() if caller.origin == "remote" else AuthPolicy()
    denial = authorize(scope, caller, current, names)
    connection.trusted = authorize("page", caller, current, names) is None
    if denial is None:
        return None
    return failure(denial.status, denial.sentence, headers={"WWW-Authenticate": denial.challenge} if denial.challenge else None)


async def _respond(request: web.Request, connection: Connection, handler: _Handler) -> web.StreamResponse:
    try:
        await _read_body(request)
        connection.request_received()
        return await handler(request)
    except (web.HTTPNotFound, ConnectionError):
        raise
    except web.HTTPException as error:
        return _http_failure(request, error)
    except Refusal as error:
        return failure(409, str(error), code=error.code)
    except InputError as error:
        return failure(404, str(error))
    except GpumgrError as error:
        return failure(503, str(error))
    except Exception as error:
        _log.error("page_failed", path=request.path, error=str(error), kind=type(error).__name__, where=_where(error))
        return failure(500, "the agent failed to respond; see its log")


async def _read_body(request: web.Request) -> None:
    """Raises HTTPRequestEntityTooLarge before more than the limit is in memory, ConnectionError if the client has gone."""
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES)
    try:
        await request.read()
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest from error


def _http_failure(request: web.Request, error: web.HTTPException) -> web.Response:
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            only = (
                f"{request.path} takes maintenance requests"
                if "POST" in error.allowed_methods
                else f"{request.path} can only be read"
            )
            return failure(error.status, f"{only}: use {allowed}", headers={"Allow": allowed})
        case web.HTTPRequestEntityTooLarge():
            response = failure(error.status, f"the body has more than {MAX_BODY_BYTES} bytes")
            response.force_close()
            return response
        case _:
            return failure(error.status, error.reason)


def _where(error: Exception) -> str:
    """File and line that raised the error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last is not None else "?"
