"""Answers in JSON, and the headers that every answer carries."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web


def json_answer(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_bytes(msgspec.json.encode(content), status=status, headers=headers)


def json_bytes(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json", charset="utf-8")


def failure(status: int, sentence: str, *, headers: Mapping[str, str] | None = None, **more: Any) -> web.Response:
    return json_answer({"error": sentence, **more}, status=status, headers=headers)


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    dress(response)


def dress(response: web.StreamResponse) -> None:
    """Nothing is kept, guessed at, framed or told to others, unless a page says so itself; no version is told by the way."""
    response.headers["Server"] = "gpumgr"
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
