"""The pages: /metrics (and /metric, gpu-manager's path), /healthz, /readyz, /version, /graph. Read only; errors are JSON too.

A page shows what is in memory: none of them waits for the driver, the kubelet or the API server.
"""

import platform
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

import gpumgr
from gpumgr.web.graph import graph_data, graph_text
from gpumgr.web.sources import Sources

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PATHS: Final = ("/metrics", "/metric", "/healthz", "/readyz", "/version", "/graph")
#: A GET needs no body; what some client sends along is not taken in.
_BODY_BYTES: Final = 1024


def make_app(sources: Sources) -> web.Application:
    app = web.Application(middlewares=[_errors_as_json], client_max_size=_BODY_BYTES)
    pages = _Pages(sources)
    handlers = (pages.metrics, pages.metrics, pages.healthz, pages.readyz, pages.version, pages.graph)
    for path, handler in zip(PATHS, handlers, strict=True):
        app.router.add_get(path, handler)
    app.on_response_prepare.append(_hide_server)
    return app


class _Pages:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    async def metrics(self, request: web.Request) -> web.Response:
        accept = ",".join(request.headers.getall("Accept", ()))
        encoding = ",".join(request.headers.getall("Accept-Encoding", ()))
        headers, body = await self._sources.scrape(accept, encoding)
        return web.Response(body=body, headers=headers)

    async def healthz(self, _request: web.Request) -> web.Response:
        return _verdict(self._sources.not_alive())

    async def readyz(self, _request: web.Request) -> web.Response:
        return _verdict(self._sources.not_ready())

    async def version(self, _request: web.Request) -> web.Response:
        snapshot = self._sources.view().inventory.snapshot
        return web.json_response(
            {
                "version": gpumgr.__version__,
                "python": platform.python_version(),
                "driver": snapshot.driver_version,
                "nvml": snapshot.nvml_version,
                "cuda": snapshot.cuda_version,
            }
        )

    async def graph(self, request: web.Request) -> web.Response:
        wanted = request.query.get("format") or ("json" if "application/json" in request.headers.get("Accept", "") else "text")
        if wanted not in ("text", "json"):
            return web.json_response({"error": f"format {wanted!r} is none of: text, json"}, status=400)
        view = self._sources.view()
        headers = {"Vary": "Accept", "Cache-Control": "no-store"}
        if wanted == "json":
            return web.json_response(graph_data(view), headers=headers)
        return web.Response(text=graph_text(view), headers=headers)


def _verdict(reasons: Sequence[str]) -> web.Response:
    """200 without reasons, 503 with them: what probes of the kubelet and load balancers go by."""
    body = {"status": "failing" if reasons else "ok", "reasons": list(reasons)}
    return web.json_response(body, status=503 if reasons else 200, headers={"Cache-Control": "no-store"})


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        body = {"error": f"{request.path} can only be read: use {allowed}"}
        return web.json_response(body, status=error.status, headers={"Allow": allowed})
    except web.HTTPNotFound as error:
        return web.json_response({"error": f"there is nothing at {request.path}", "paths": PATHS}, status=error.status)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)


async def _hide_server(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop("Server", None)
