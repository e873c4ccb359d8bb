"""The pages, and what each is made of.

A page shows what is in memory: none of them waits for the driver, the kubelet or the API server. Only an order does.
"""

import asyncio
import platform
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, cast

import msgspec
from aiohttp import web

import gpumgr
from gpumgr.agent.maintenance import Action, Order
from gpumgr.aio import run_shielded
from gpumgr.allocator.history import HISTORY_ENTRIES
from gpumgr.web.answers import add_headers, failure, json_answer, json_bytes
from gpumgr.web.debug import profile, stacks
from gpumgr.web.door.access import Keys, Room
from gpumgr.web.door.connection import Connection
from gpumgr.web.door.guard import MOST_BODY_BYTES, make_guard
from gpumgr.web.front import Front
from gpumgr.web.graph import graph_data, graph_text
from gpumgr.web.sources import Sources
from gpumgr.web.stream import Streams

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HISTORY_SHOWN: Final = 100
_MOST_PROFILE_SECONDS: Final = 30


#: Where something can be read, and which room it is; `Pages.handlers` has the same order.
_READ: Final[Mapping[str, Room]] = {
    "/": "page",
    "/metrics": "metrics",
    "/metric": "metrics",  # gpu-manager's path
    "/healthz": "probe",
    "/readyz": "probe",
    "/version": "page",
    "/graph": "page",
    "/usage": "page",
    "/api/state": "page",
    "/api/stream": "page",
    "/api/history": "page",
    "/api/pods": "page",
    "/api/pods/{namespace}/{pod}": "page",
    "/debug/stacks": "debug",
    "/debug/profile": "debug",
}
_ORDERS: Final = "/api/gpus/{gpu}/{action:cordon|drain|uncordon|reset}"
PATHS: Final = (*_READ, "/api/gpus/{gpu}/{action}")


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """Of an order."""

    reason: str = ""
    evict: bool = False


class Pages:
    def __init__(self, sources: Sources, front: Front, streams: Streams) -> None:
        self._sources, self._front, self._streams = sources, front, streams
        self._profiling = asyncio.Lock()

    def handlers(self) -> Sequence[_Handler]:
        return (
            self.front,
            self.metrics,
            self.metrics,
            self.healthz,
            self.readyz,
            self.version,
            self.graph,
            self.usage,
            self.state,
            self._streams.serve,
            self.history,
            self.pods,
            self.pod,
            self.stacks,
            self.profile,
        )

    async def front(self, request: web.Request) -> web.Response:
        return self._front.answer(request)

    async def metrics(self, request: web.Request) -> web.Response:
        accept = ",".join(request.headers.getall("Accept", ()))
        encoding = ",".join(request.headers.getall("Accept-Encoding", ()))
        headers, body = await self._sources.scrape(accept, encoding)
        return web.Response(body=body, headers=headers)

    async def healthz(self, request: web.Request) -> web.Response:
        return _verdict(request, self._sources.not_alive())

    async def readyz(self, request: web.Request) -> web.Response:
        """With `?only=driver`, what a start in a pod must wait for: whoever has no driver's files then gets them by another start."""
        match request.query.get("only"):
            case None:
                return _verdict(request, self._sources.not_ready())
            case "driver":
                return _verdict(request, self._sources.no_driver())
            case other:
                return failure(400, f"only {other!r} is none of: driver")

    async def version(self, _request: web.Request) -> web.Response:
        snapshot = self._sources.view().inventory.snapshot
        return json_answer(
            {
                "version": gpumgr.__version__,
                "python": platform.python_version(),
                "driver": snapshot.driver_version,
                "nvml": snapshot.nvml_version,
                "cuda": snapshot.cuda_version,
            }
        )

    async def graph(self, request: web.Request) -> web.Response:
        """gpu-manager's message by default: its own clients know no other."""
        view = self._sources.view()
        match request.query.get("format"):
            case None:
                return json_answer({"graph": graph_text(view)})
            case "text":
                return web.Response(text=graph_text(view))
            case "json":
                return json_answer(graph_data(view))
            case other:
                return failure(400, f"format {other!r} is none of: text, json")

    async def usage(self, _request: web.Request) -> web.Response:
        return json_answer(self._sources.usage())

    async def state(self, _request: web.Request) -> web.Response:
        return json_bytes(await self._sources.state())

    async def history(self, request: web.Request) -> web.Response:
        """Newest first, whole entries."""
        entries = reversed(self._sources.history())
        if (name := request.query.get("pod")) is not None:
            pod = tuple(name.split("/"))
            if len(pod) != 2 or not all(pod):
                return failure(400, f"pod {name!r} is not of the form NAMESPACE/NAME")
            entries = (entry for entry in entries if entry.pod == pod)
        limit = _number(request, "limit", _HISTORY_SHOWN, HISTORY_ENTRIES)
        chosen = [entry for entry, _ in zip(entries, range(limit), strict=False)]
        # A thousand entries of a node with many GPUs are a megabyte.
        return json_bytes(await asyncio.to_thread(msgspec.json.encode, chosen))

    async def pods(self, request: web.Request) -> web.Response:
        """Of which pods something is known; with `?name=`, of those that are called so."""
        name = request.query.get("name")
        known = (key for key in self._sources.pods() if name in (None, key[1]))
        return json_answer([{"namespace": namespace, "pod": pod} for namespace, pod in known])

    async def pod(self, request: web.Request) -> web.Response:
        namespace, pod = request.match_info["namespace"], request.match_info["pod"]
        story = self._sources.story(namespace, pod)
        return failure(404, f"nothing is known of the pod {namespace}/{pod}") if story is None else json_answer(story)

    async def stacks(self, _request: web.Request) -> web.Response:
        return web.Response(text=await stacks())

    async def profile(self, request: web.Request) -> web.Response:
        seconds = _number(request, "seconds", 5, _MOST_PROFILE_SECONDS)
        if self._profiling.locked():
            return failure(409, "a profile is being taken; ask again when it is done")
        async with self._profiling:
            return web.Response(text=await profile(seconds))

    async def order(self, request: web.Request) -> web.Response:
        """A change, so it is carried out even if nobody waits for the answer any more."""
        try:
            body = msgspec.json.decode(await request.read() or b"{}", type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return failure(400, f'the body is not of the form {{"reason": "...", "evict": false}}: {error}')
        order = Order(
            action=cast(Action, request.match_info["action"]),
            gpu=request.match_info["gpu"],
            reason=body.reason,
            evict=body.evict,
        )
        return json_answer(await run_shielded(self._sources.maintain(order), name=f"order_{order.action}"))


def make_app(
    sources: Sources, *, front: Front, streams: Streams, keys: Callable[[], Keys], names: Collection[str] = ()
) -> web.Application:
    pages = Pages(sources, front, streams)
    rooms: dict[str, Room] = {**_READ, PATHS[-1]: "order"}
    app = web.Application(middlewares=[make_guard(rooms, keys, names)], client_max_size=MOST_BODY_BYTES)
    for path, handler in zip(_READ, pages.handlers(), strict=True):
        app.router.add_get(path, handler, allow_head=handler != streams.serve)
    app.router.add_post(_ORDERS, pages.order)
    app.on_response_prepare.append(add_headers)
    return app


def _verdict(request: web.Request, reasons: Sequence[str]) -> web.Response:
    """200 without reasons, 503 with them: what probes of the kubelet and load balancers go by. Strangers are told how many there are:
    the sentences have paths and the driver's errors in them."""
    told = {"reasons": list(reasons)} if cast(Connection, request.protocol).trusted else {"reason_count": len(reasons)}
    return json_answer({"status": "failing" if reasons else "ok", **told}, status=503 if reasons else 200)


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    """Raises HTTPBadRequest."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9 and 1 <= int(text) <= most):
        raise web.HTTPBadRequest(reason=f"{name} is not a whole number from 1 to {most}")
    return int(text)
