"""What happens around each page: may the caller in, is the request whole and small, and whatever goes wrong becomes a JSON error."""

import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, cast

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from gpumgr.errors import GpumgrError, InputError, Refusal
from gpumgr.web.answers import failure
from gpumgr.web.door.access import Caller, Keys, Room, decide
from gpumgr.web.door.connection import Connection

_log = structlog.get_logger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: An order takes some hundred bytes, a page none at all.
MOST_BODY_BYTES: Final = 4096


def make_guard(rooms: Mapping[str, Room], keys: Callable[[], Keys], names: Collection[str]) -> Middleware:
    """`rooms` says by canonical path which room a page is; what is nowhere counts as a page. `keys` is asked for callers from beyond,
    `names` are this host's own."""

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        connection = cast(Connection, request.protocol)
        try:
            return _denied(request, connection, rooms, keys, names) or await _answered(request, connection, handler)
        except web.HTTPNotFound:
            return failure(404, f"there is nothing at {request.path}", paths=list(rooms))
        finally:
            connection.answered()

    return guard


def _denied(
    request: web.Request, connection: Connection, rooms: Mapping[str, Room], keys: Callable[[], Keys], names: Collection[str]
) -> web.Response | None:
    resource = request.match_info.route.resource
    room = rooms.get(resource.canonical, "page") if resource is not None else "page"
    caller = Caller(
        whence=connection.whence,
        certified=connection.certified,
        authorization=request.headers.get("Authorization"),
        hosts=tuple(request.headers.getall("Host", ())),
    )
    held = keys() if caller.whence == "beyond" else Keys()
    denial = decide(room, caller, held, names)
    connection.trusted = decide("page", caller, held, names) is None
    if denial is None:
        return None
    return failure(denial.status, denial.sentence, headers={"WWW-Authenticate": denial.challenge} if denial.challenge else None)


async def _answered(request: web.Request, connection: Connection, handler: _Handler) -> web.StreamResponse:
    try:
        await _take_body(request)
        connection.asked()
        return await handler(request)
    except web.HTTPNotFound:
        raise
    except web.HTTPException as error:
        return _told(request, error)
    except Refusal as error:
        return failure(409, str(error), code=error.code)
    except InputError as error:
        return failure(404, str(error))
    except GpumgrError as error:
        return failure(503, str(error))
    except ConnectionError:
        raise  # the client is gone: nobody is left to tell
    except Exception as error:
        _log.error("page_failed", path=request.path, error=str(error), kind=type(error).__name__, where=_where(error))
        return failure(500, "the agent failed to answer; its log says why")


async def _take_body(request: web.Request) -> None:
    """Most requests have none. Raises HTTPRequestEntityTooLarge before more than the allowed is in memory."""
    if (request.content_length or 0) > MOST_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MOST_BODY_BYTES)
    try:
        await request.read()
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest from error


def _told(request: web.Request, error: web.HTTPException) -> web.Response:
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            only = f"{request.path} takes orders" if "POST" in error.allowed_methods else f"{request.path} can only be read"
            return failure(error.status, f"{only}: use {allowed}", headers={"Allow": allowed})
        case web.HTTPRequestEntityTooLarge():
            told = failure(error.status, f"the body has more than {MOST_BODY_BYTES} bytes")
            told.force_close()
            return told
        case _:
            return failure(error.status, error.reason)


def _where(error: Exception) -> str:
    """File and line that raised it: enough to find it, in one line of the log."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
