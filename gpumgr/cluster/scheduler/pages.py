"""The scheduler's pages: the cluster page, its data, the reasons why a pod waits, metrics and probes. Every replica serves them from its
own index. The section http of the settings decides who may read them."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

import gpumgr
from gpumgr.cluster.core.request import Policy
from gpumgr.cluster.scheduler.api import Kind, Why
from gpumgr.cluster.scheduler.metrics import SchedulerMetrics
from gpumgr.cluster.scheduler.node_rows import NodeRows
from gpumgr.cluster.scheduler.objects import WatchedPod
from gpumgr.cluster.scheduler.reasons import WaitingReasons, request_text
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer
from gpumgr.settings import Settings
from gpumgr.web.access import CurrentPolicy, Scope, origin_of
from gpumgr.web.http_server import PageServer
from gpumgr.web.listening import ListenError
from gpumgr.web.responses import (
    MAX_BODY_BYTES,
    IndexPage,
    OriginOf,
    failure,
    json_response,
    make_middleware,
    on_response_prepare,
)

_log = structlog.get_logger(__name__)

PAGE: Final = Path(__file__).with_name("page") / "index.html"
#: The most waiting pods that the page lists.
MAX_PENDING: Final = 1000
#: The reasons of all waiting pods are computed at most once in this time.
_KEPT_SECONDS: Final = 1.0
#: The most calls of /api/why that are answered at a time, because each examines all nodes.
_MAX_QUESTIONS: Final = 4
#: Path -> who may read it, and its handler.
Routes = Mapping[str, tuple[Scope, Handler]]


class ClusterPages:
    """`leader`: whether this replica answers kube-scheduler."""

    def __init__(
        self, server: ApiServer, watches: ClusterWatches, policy: Policy, *, leader: Callable[[], bool] = lambda: True
    ) -> None:
        self._server, self._watches, self._leader = server, watches, leader
        self._rows = NodeRows(watches)
        self._reasons = WaitingReasons(watches, self._rows, policy)
        self.metrics = SchedulerMetrics(watches, self._rows, leader=leader)
        self._page = IndexPage(PAGE)
        self._computing, self._answering = asyncio.Lock(), asyncio.Semaphore(_MAX_QUESTIONS)
        self._kinds: tuple[float, list[tuple[WatchedPod, Kind | None, str]]] = (-math.inf, [])

    def routes(self) -> Routes:
        return {
            "/": ("page", self._index),
            "/metrics": ("metrics", self._scrape),
            "/api/cluster": ("page", self._cluster),
            "/api/why": ("page", self._why),
        }

    async def _waiting(self) -> list[tuple[WatchedPod, Kind | None, str]]:
        """Refreshes the rows, and returns WaitingReasons.kinds of all waiting pods."""
        async with self._computing:
            await self._rows.refresh()
            now = asyncio.get_running_loop().time()
            if now >= self._kinds[0] + _KEPT_SECONDS:
                self._kinds = now, await self._reasons.kinds(self._watches.pending.values())
            return self._kinds[1]

    async def _index(self, request: web.Request) -> web.Response:
        return self._page.response(request)

    async def _scrape(self, _: web.Request) -> web.Response:
        waiting = await self._waiting()
        return await self.metrics.response(Counter(kind for _, kind, _ in waiting))

    async def _cluster(self, _: web.Request) -> web.Response:
        waiting = await self._waiting()
        shown = sorted(waiting, key=lambda each: (each[0].namespace, each[0].name))[:MAX_PENDING]
        return _compressed(
            {
                "gpumgr": gpumgr.__version__,
                "leader": self._leader(),
                "synced": self._watches.synced,
                "waiting": len(waiting),
                "pods": [_row(*each) for each in shown],
                "nodes": [node.row for node in self._rows.nodes.values()],
            }
        )

    async def _why(self, request: web.Request) -> web.Response:
        """Answers `?namespace=NAMESPACE&name=NAME`. With `&nodes=1` the answer lists each node in the group of its reason."""
        namespace, name = request.query.get("namespace", ""), request.query.get("name", "")
        if not (namespace and name):
            return failure(400, "give ?namespace=NAMESPACE&name=NAME of a pod")
        if (problem := self._watches.problem) is not None:
            return failure(503, problem)
        async with self._answering:
            return await self._answer(request, namespace, name)

    async def _answer(self, request: web.Request, namespace: str, name: str) -> web.Response:
        try:
            item = await self._server.read("GET", f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}")
            pod = self._watches.parse_pod(item)
        except AnswerError as error:
            return failure(404 if error.status == 404 else 503, f"pod {namespace}/{name}: {error}")
        except API_FAILURES as error:
            return failure(503, f"the API server did not answer: {error}")
        except UNREADABLE as error:
            return failure(422, f"pod {namespace}/{name} can't be read: {error}")
        status = item.get("status") or {}
        why = Why(
            namespace=namespace, pod=name, phase=str(status.get("phase", "")), node=pod.node or "", problem=pod.problem or ""
        )
        if pod.node is None and pod.wants_gpu:
            scheduled = [each for each in status.get("conditions") or () if each.get("type") == "PodScheduled"]
            why.condition = " ".join(str(each.get("message") or each.get("reason") or "") for each in scheduled)
            why.waiting = await self._reasons.why(pod, each_node=request.query.get("nodes") == "1")
        elif pod.node is None and why.phase == "Pending":
            why.problem = "it requests no GPU, so gpumgr does not place it"
        return _compressed(why)


def _row(pod: WatchedPod, kind: str | None, limit: str) -> dict[str, Any]:
    return {"namespace": pod.namespace, "name": pod.name, "request": request_text(pod.request), "kind": kind, "limit": limit}


def _compressed(content: Any) -> web.Response:
    response = json_response(content)
    response.enable_compression()
    return response


def application_of(
    routes: Routes,
    watches: ClusterWatches,
    policy: CurrentPolicy,
    names: tuple[str, ...] = (),
    *,
    origin_of: OriginOf = origin_of,
) -> web.Application:
    async def healthz(_: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        ready = watches.problem is None
        return json_response({"status": "ok" if ready else "failing"}, status=200 if ready else 503)

    routes = {**routes, "/healthz": ("probe", healthz), "/readyz": ("probe", readyz)}
    access = make_middleware({path: scope for path, (scope, _) in routes.items()}, policy, names, origin_of=origin_of)
    app = web.Application(middlewares=[access], client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.get(path, handler) for path, (_, handler) in routes.items()])
    app.on_response_prepare.append(on_response_prepare)
    return app


def page_server(routes: Routes, watches: ClusterWatches, settings: Settings, port: int) -> PageServer:
    """Raises SettingsError if a file of the section http can't be used."""
    names = (settings.node.name,)
    return PageServer(lambda policy: application_of(routes, watches, policy, names), settings.http, port=port)


async def serve_pages(server: PageServer, *, lost: str) -> None:
    """Starts the server. If it can't listen, the process works without its pages. `lost`: what is missing then, for the log."""
    try:
        await server.start()
    except ListenError as error:
        _log.error("pages_not_served", error=str(error), consequence=lost)
