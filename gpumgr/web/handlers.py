"""Handlers of the HTTP requests. They respond from memory. Only a maintenance request may wait for the driver, the kubelet or the API
server."""

import asyncio
import platform
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, cast

import msgspec
from aiohttp import web

import gpumgr
from gpumgr.agent.maintenance import Action, MaintenanceRequest
from gpumgr.common.aio import Subscription, run_shielded
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.ledger.history import HISTORY_ENTRIES
from gpumgr.web.access import CurrentPolicy, Scope, origin_of
from gpumgr.web.graph import graph_data, graph_text
from gpumgr.web.read_model import ReadModel
from gpumgr.web.responses import (
    DENIED_NOW,
    MAX_BODY_BYTES,
    PAGE,
    TRUSTED,
    IndexPage,
    OriginOf,
    failure,
    json_bytes,
    json_response,
    make_middleware,
    metrics_response,
    on_response_prepare,
)
from gpumgr.web.state import entries_of

_HISTORY_SHOWN: Final = 100
MAX_STREAMS: Final = 64
HEARTBEAT_SECONDS: Final = 15.0
#: A comment of the event stream: clients ignore it, and it keeps proxies from closing the connection.
_HEARTBEAT: Final = b":\n\n"
_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
#: All metrics of an agent that waits for the node's former agent to end.
WAITING_METRIC: Final = """\
# HELP gpumgr_waits_for_agent 1 while this agent waits for the former agent of its node to end. Only that agent has the other metrics.
# TYPE gpumgr_waits_for_agent gauge
gpumgr_waits_for_agent 1
"""


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    reason: str = ""
    evict: bool = False
    again: bool = False


class Pages:
    def __init__(self, sources: ReadModel, page: IndexPage, *, heartbeat_seconds: float) -> None:
        self._sources, self._page, self._heartbeat_seconds = sources, page, heartbeat_seconds
        #: The newest state, and its event, encoded once for all streams.
        self._encoded = (b"", b"")

    async def index(self, request: web.Request) -> web.Response:
        return self._page.response(request)

    async def metrics(self, request: web.Request) -> web.Response:
        accept = ",".join(request.headers.getall("Accept", ()))
        encoding = ",".join(request.headers.getall("Accept-Encoding", ()))
        headers, body = await self._sources.scrape(accept, encoding)
        return web.Response(body=body, headers=headers)

    async def healthz(self, request: web.Request) -> web.Response:
        """Always ok: the answer itself shows that the event loop runs, and if a part of the agent fails, the process ends."""
        return probe_response(request, ())

    async def readyz(self, request: web.Request) -> web.Response:
        """`?only=driver` is for a startup probe."""
        match request.query.get("only"):
            case None:
                return probe_response(request, self._sources.not_ready(), notes=self._sources.notes())
            case "driver":
                return probe_response(request, self._sources.no_driver())
            case other:
                return failure(400, f"only={other} is not known; allowed: driver")

    async def version(self, _request: web.Request) -> web.Response:
        snapshot = self._sources.view().inventory.snapshot
        return json_response(
            {
                "version": gpumgr.__version__,
                "python": platform.python_version(),
                "driver": snapshot.driver_version,
                "nvml": snapshot.nvml_version,
                "cuda": snapshot.cuda_version,
            }
        )

    async def graph(self, request: web.Request) -> web.Response:
        """Without `format` the response is for gpu-manager's clients."""
        view = self._sources.view()
        match request.query.get("format"):
            case None:
                return json_response({"graph": graph_text(view)})
            case "text":
                return web.Response(text=graph_text(view))
            case "json":
                return json_response(graph_data(view))
            case other:
                return failure(400, f"format={other} is not known; allowed: text, json")

    async def usage(self, _request: web.Request) -> web.Response:
        return json_response(self._sources.usage())

    async def state(self, _request: web.Request) -> web.Response:
        return json_bytes(await self._sources.state())

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The state as server-sent events, one per sample period. A slow client misses states and gets the newest. Ends when a write
        detects that the client has disconnected, when its access is denied, or after `end_streams`."""
        if self._sources.states.readers >= MAX_STREAMS:
            return failure(503, f"{MAX_STREAMS} streams are open, which is the limit", headers={"Retry-After": "10"})
        with self._sources.states.subscribe() as states:
            await self._sources.state()  # without readers no states are published, so the latest one may be old
            response = web.StreamResponse(headers=_HEADERS)
            if request.transport is None:
                raise ConnectionResetError("the client went while the state was built")
            request.transport.set_write_buffer_limits(high=1)  # so that a write waits for a slow client
            with suppress(ConnectionError):
                await response.prepare(request)
                while (event := await self._next_event(states)) is not None and await request[DENIED_NOW]() is None:
                    await response.write(event)
        return response

    async def _next_event(self, states: Subscription[bytes]) -> bytes | None:
        """The next state, or a comment after a while. None: the stream ends."""
        try:
            async with asyncio.timeout(self._heartbeat_seconds):
                state = await anext(states)
        except TimeoutError:
            return _HEARTBEAT
        except StopAsyncIteration:
            return None
        if self._encoded[0] is not state:
            self._encoded = state, b"event: state\ndata: " + state + b"\n\n"
        return self._encoded[1]

    async def end_streams(self, _app: web.Application) -> None:
        """Ends every stream with a complete response."""
        self._sources.states.end_readers()

    async def history(self, request: web.Request) -> web.Response:
        """The entries, newest first."""
        entries = self._sources.history()
        if (name := request.query.get("pod")) is not None:
            namespace, _, pod = name.partition("/")
            if not (namespace and pod) or "/" in pod:
                return failure(400, f"pod {name!r} is not of the form NAMESPACE/NAME")
            entries = entries_of(self._sources.view().ledger, entries, (namespace, pod))
        limit = _number(request, "limit", _HISTORY_SHOWN, HISTORY_ENTRIES)
        chosen = entries[: -limit - 1 : -1]
        # A thousand entries of a node with many GPUs are a megabyte, so a thread encodes them.
        return json_bytes(await asyncio.to_thread(msgspec.json.encode, chosen))

    async def pod(self, request: web.Request) -> web.Response:
        namespace, pod = request.match_info["namespace"], request.match_info["pod"]
        details = self._sources.pod(namespace, pod)
        return failure(404, f"nothing is known of the pod {namespace}/{pod}") if details is None else json_response(details)

    async def maintenance(self, request: web.Request) -> web.Response:
        """The request is carried out even if the client disconnects."""
        try:
            body = decode_json(await request.read() or b"{}", _Body)
        except UnreadableText as error:
            return failure(400, f'the body is not of the form {{"reason": "...", "evict": false}}: {error}')
        wanted = MaintenanceRequest(
            action=cast(Action, request.match_info["action"]),
            gpu=request.match_info["gpu"],
            reason=body.reason,
            evict=body.evict,
            again=body.again,
        )
        return json_response(await run_shielded(self._sources.maintain(wanted), name=f"maintenance_{wanted.action}"))


_READ: Final[Mapping[str, tuple[Scope, Callable[[Pages, web.Request], Awaitable[web.StreamResponse]]]]] = {
    "/": ("page", Pages.index),
    "/metrics": ("metrics", Pages.metrics),
    "/metric": ("metrics", Pages.metrics),  # gpu-manager's path
    "/healthz": ("probe", Pages.healthz),
    "/readyz": ("probe", Pages.readyz),
    "/version": ("page", Pages.version),
    "/graph": ("page", Pages.graph),
    "/usage": ("page", Pages.usage),
    "/api/state": ("page", Pages.state),
    "/api/stream": ("page", Pages.stream),
    "/api/history": ("page", Pages.history),
    "/api/pods/{namespace}/{pod}": ("page", Pages.pod),
}
_MAINTENANCE: Final = "/api/gpus/{gpu}/{action:cordon|drain|uncordon|reset|forget}"
PATHS: Final = (*_READ, "/api/gpus/{gpu}/{action}")


def make_app(
    sources: ReadModel,
    policy: CurrentPolicy,
    *,
    names: Collection[str] = (),
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    origin_of: OriginOf = origin_of,
) -> web.Application:
    """`policy` is for remote clients. `names`: this host's names, valid as `Host` of loopback requests."""
    pages = Pages(sources, IndexPage(PAGE), heartbeat_seconds=heartbeat_seconds)
    scopes: dict[str, Scope] = {**{path: scope for path, (scope, _) in _READ.items()}, PATHS[-1]: "maintenance"}
    app = web.Application(
        middlewares=[make_middleware(scopes, policy, names, origin_of=origin_of)], client_max_size=MAX_BODY_BYTES
    )
    for path, (_, handler) in _READ.items():
        app.router.add_get(path, partial(handler, pages), allow_head=handler is not Pages.stream)
    app.router.add_post(_MAINTENANCE, pages.maintenance)
    app.on_response_prepare.append(on_response_prepare)
    app.on_shutdown.append(pages.end_streams)
    return app


def make_waiting(
    no_driver: Callable[[], Sequence[str]], not_ready: Callable[[], Sequence[str]], waits_for: Callable[[], str]
) -> Callable[[CurrentPolicy], web.Application]:
    """The application of an agent that waits until the node's former agent has ended. All paths except probes and metrics respond 503 with
    the text of `waits_for`."""

    async def healthz(request: web.Request) -> web.Response:
        return probe_response(request, ())

    async def readyz(request: web.Request) -> web.Response:
        return probe_response(request, (no_driver if request.query.get("only") == "driver" else not_ready)())

    async def metrics(_request: web.Request) -> web.Response:
        return metrics_response(WAITING_METRIC.encode())

    async def elsewhere(_request: web.Request) -> web.Response:
        return failure(503, f"this agent does not serve the node yet: it {waits_for()}")

    def application(policy: CurrentPolicy) -> web.Application:
        scopes: dict[str, Scope] = {"/healthz": "probe", "/readyz": "probe", "/metrics": "metrics"}
        app = web.Application(middlewares=[make_middleware(scopes, policy, ())], client_max_size=MAX_BODY_BYTES)
        for path, handler in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics)):
            app.router.add_get(path, handler)
        app.router.add_route("*", "/{path:.*}", elsewhere)
        return app

    return application


def probe_response(request: web.Request, reasons: Sequence[str], *, notes: Sequence[str] = ()) -> web.Response:
    """Clients that may not read the pages get only numbers, because reasons and `notes` contain paths and the driver's errors."""
    detail = {"reasons": [*reasons, *notes]} if request[TRUSTED] else {"reason_count": len(reasons) + len(notes)}
    return json_response({"status": "failing" if reasons else "ok", **detail}, status=503 if reasons else 200)


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    """Raises HTTPBadRequest."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9 and 1 <= int(text) <= most):
        raise web.HTTPBadRequest(reason=f"{name} is not a whole number from 1 to {most}")
    return int(text)
