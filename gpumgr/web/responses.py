"""JSON responses, the page at /, and the middleware around each page.

The page is one file that loads no other file. Its Content-Security-Policy allows only its own scripts and styles.
"""

import asyncio
import base64
import gzip
import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from gpumgr.common.errors import GpumgrError, InputError, Refusal
from gpumgr.web.access import AuthPolicy, CurrentPolicy, HttpClient, Origin, Scope, authorize, origin_of


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_bytes(msgspec.json.encode(content), status=status, headers=headers)


def json_bytes(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json", charset="utf-8")


#: The Content-Type of Prometheus' text format.
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def metrics_response(text: bytes) -> web.Response:
    return web.Response(body=text, headers={"Content-Type": METRICS_TYPE})


def failure(status: int, sentence: str, *, headers: Mapping[str, str] | None = None, **more: Any) -> web.Response:
    return json_response({"error": sentence, **more}, status=status, headers=headers)


async def on_response_prepare(_request: web.Request, response: web.StreamResponse) -> None:
    """Headers against caching, framing, content sniffing and referrers. A page may have its own Content-Security-Policy."""
    response.headers["Server"] = "gpumgr"
    response.headers["Cache-Control"] = "no-store"
    response.headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"


def accepts(header: str, name: str) -> bool:
    """Whether an Accept or Accept-Encoding header names this format; weights are ignored."""
    return any(entry.partition(";")[0].strip().lower() == name for entry in header.split(","))


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: The body of a maintenance request has some hundred bytes. Requests for pages have no body.
MAX_BODY_BYTES: Final = 4096
BODY_SECONDS: Final = 10.0
#: Key of a request: its client may read any page, not only metrics and probes.
TRUSTED: Final = web.RequestKey("trusted", bool)
#: Key of a request: a coroutine function that checks the request again with the present credentials. Returns the denial or None.
DENIED_NOW: Final = web.RequestKey("denied_now", partial)
#: Clients send it in place of `Authorization`, which the API server removes from requests that it forwards.
PROXIED_AUTHORIZATION: Final = "X-Gpumgr-Authorization"

#: (family of the socket, the peer's address) -> origin.
OriginOf = Callable[[int, Any], Origin]


def make_middleware(
    scopes: Mapping[str, Scope], policy: CurrentPolicy, names: Collection[str], *, origin_of: OriginOf = origin_of
) -> Middleware:
    """`scopes`: canonical path -> scope; other paths are "page". `policy` is for remote clients. `names`: this host's names."""

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            caller = HttpClient(
                origin=origin_of(request.get_extra_info("socket").family, request.get_extra_info("peername")),
                certified=bool(request.get_extra_info("peercert")),
                authorization=request.headers.get("Authorization", request.headers.get(PROXIED_AUTHORIZATION)),
                hosts=tuple(request.headers.getall("Host", ())),
            )
            request[DENIED_NOW] = denied = partial(_denied, request, caller, scopes, policy, names)
            return await denied() or await _respond(request, handler)
        except web.HTTPNotFound:
            return failure(404, f"there is nothing at {request.path}", paths=list(scopes))

    return middleware


async def _denied(
    request: web.Request, caller: HttpClient, scopes: Mapping[str, Scope], policy: CurrentPolicy, names: Collection[str]
) -> web.Response | None:
    resource = request.match_info.route.resource
    scope = scopes.get(resource.canonical, "page") if resource is not None else "page"
    current = await policy() if caller.origin == "remote" else AuthPolicy()
    denial = authorize(scope, caller, current, names)
    request[TRUSTED] = authorize("page", caller, current, names) is None
    if denial is None:
        return None
    return failure(denial.status, denial.sentence, headers={"WWW-Authenticate": denial.challenge} if denial.challenge else None)


async def _respond(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        await _read_body(request)
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


async def _read_body(request: web.Request) -> None:
    """Raises HTTPRequestEntityTooLarge before more than the limit is in memory, HTTPRequestTimeout, HTTPBadRequest, and ConnectionError."""
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            await request.read()
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest from error
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error


def _http_failure(request: web.Request, error: web.HTTPException) -> web.Response:
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return failure(
                error.status, f"{request.path} does not take {request.method}: use {allowed}", headers={"Allow": allowed}
            )
        case web.HTTPRequestEntityTooLarge():
            return _last(failure(error.status, f"the body has more than {MAX_BODY_BYTES} bytes"))
        case web.HTTPRequestTimeout():
            return _last(failure(error.status, f"the body did not arrive in {BODY_SECONDS:g} s"))
        case _:
            return failure(error.status, error.reason)


def _last(response: web.Response) -> web.Response:
    """Closes the connection after the response, because the rest of the request was not read."""
    response.force_close()
    return response


PAGE: Final = Path(__file__).with_name("page") / "index.html"
#: Tag and text of scripts and styles.
_INLINE: Final = re.compile(r"<(script|style)\b[^>]*>(.*?)</\1\s*>", re.DOTALL | re.IGNORECASE)


class IndexPage:
    """Compresses the page once. aiohttp's `enable_compression` would compress it for each request."""

    def __init__(self, path: Path) -> None:
        self.plain = path.read_bytes()
        self.packed = gzip.compress(self.plain, 9, mtime=0)
        self._policy = page_policy(self.plain.decode())

    def response(self, request: web.Request) -> web.Response:
        packed = accepts(",".join(request.headers.getall("Accept-Encoding", ())), "gzip")
        headers = {"Vary": "Accept-Encoding", "Content-Security-Policy": self._policy}
        if packed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(
            body=self.packed if packed else self.plain, headers=headers, content_type="text/html", charset="utf-8"
        )


def page_policy(html: str) -> str:
    """Allows this file's own scripts and styles, data of its own origin, and no frames. It forbids attributes (`style="..."`,
    `onclick="..."`), but not what a script sets through the DOM."""
    inline = [(tag.lower(), text) for tag, text in _INLINE.findall(html.replace("\r\n", "\n"))]
    rules = {
        "default-src": "'none'",
        "script-src": _hashes(text for tag, text in inline if tag == "script"),
        "style-src": _hashes(text for tag, text in inline if tag == "style"),
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashes(texts: Iterable[str]) -> str:
    """See https://www.w3.org/TR/CSP3/#framework-directive-source-list."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
