"""Makes JSON responses, sets the headers that every response has, and parses the Accept headers of requests."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_bytes(msgspec.json.encode(content), status=status, headers=headers)


def json_bytes(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json", charset="utf-8")


def failure(status: int, sentence: str, *, headers: Mapping[str, str] | None = None, **more: Any) -> web.Response:
    return json_response({"error": sentence, **more}, status=status, headers=headers)


async def on_response_prepare(_request: web.Request, response: web.StreamResponse) -> None:
    add_common_headers(response)


def add_common_headers(response: web.StreamResponse) -> None:
    """Sets headers against caching, framing, content sniffing, referrers and a shown version. A page may set its own Cache-Control and
    Content-Security-Policy."""
    response.headers["Server"] = "gpumgr"
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"


def ranked(header: str) -> list[tuple[str, float, dict[str, str]]]:
    """Entries of the header (RFC 9110, 12.4.2): name in lower case, weight 0..1, other parameters. Malformed entries get the weight 0."""
    entries = []
    for entry in header.split(","):
        name, *words = (word.strip() for word in entry.split(";"))
        parameters = {key.strip().lower(): value.strip() for key, _, value in (word.partition("=") for word in words)}
        try:
            weight = float(parameters.pop("q", "1"))
        except ValueError:
            weight = 0.0
        entries.append((name.lower(), weight, parameters))
    return entries


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header allows gzip; a missing header does not."""
    weights = {name: weight for name, weight, _ in ranked(accept_encoding)}
    return weights.get("gzip", weights.get("*", 0.0)) > 0
