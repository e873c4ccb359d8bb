"""Sources with data that a test sets, and a client that sends given bytes."""

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import fields

from gpumgr.agent.api import PodDetails
from gpumgr.agent.maintenance import MaintenanceRequest
from gpumgr.agent.node_report import NodeReport
from gpumgr.common.aio import LatestValue
from gpumgr.ledger.history import Candidate, HistoryEntry
from gpumgr.settings.schema import HttpSettings
from gpumgr.web.access import Origin, origin_of
from gpumgr.web.handlers import make_app
from gpumgr.web.http_server import HttpServer, Limits, PageServer
from gpumgr.web.metrics import Exposition, Metrics
from tests.unit.web.metrics.pictures import allocation, name_of, sample_of, view_of, whole

CERTIFICATES = Path(__file__).parent / "certificates"
TLS = {"tls_cert_file": CERTIFICATES / "server.crt", "tls_key_file": CERTIFICATES / "server.key"}
#: A client that binds this address counts as one from another machine.
REMOTE = "127.0.0.77"


def origin_in_tests(family: int, peer: Any) -> Origin:
    """As in production, but REMOTE, an address of the loopback, counts as another machine."""
    if family == socket.AF_INET and peer[0] == REMOTE:
        return "remote"
    return origin_of(family, peer)


class Scene:
    """In place of the ReadModel."""

    def __init__(self) -> None:
        self.obstacles: list[str] = []
        self.driverless: list[str] = []
        self.agent_state = view_of(
            allocation("a", ("team", "share"), cores={0: 0b111}, blocks={0: 0b1}), whole("b", ("team", "train"), 1)
        )
        self.before_scrape: Callable[[], Awaitable[object]] | None = None
        self.states = LatestValue(b"")
        self.now = b'{"at": 1}'
        self.entries: list[HistoryEntry] = [
            # Its pod was not known yet; the ledger and the entry 3 name it.
            HistoryEntry(number=1, at=1.0, what="granted", id="a", candidates=(Candidate(gpu=name_of(0), index=0),)),
            HistoryEntry(number=2, at=2.0, what="refused", id="c", pod=("team", "late"), why="no room", code="no_fit"),
            HistoryEntry(number=3, at=3.0, what="freed", id="a", pod=("team", "share")),
        ]
        self.orders: list[MaintenanceRequest] = []
        self.on_order: Callable[[MaintenanceRequest], Awaitable[Mapping[str, Any]]] | None = None
        self._exposition = Exposition(Metrics(node="node-1", version="1"), self.report)

    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        if self.before_scrape is not None:
            await self.before_scrape()
        return await self._exposition.scrape(accept, accept_encoding)

    def notes(self) -> Sequence[str]:
        return ()

    def not_ready(self) -> Sequence[str]:
        return self.obstacles

    def no_driver(self) -> Sequence[str]:
        return self.driverless

    def view(self) -> Any:
        return self.agent_state

    def report(self) -> NodeReport:
        return NodeReport(view=self.agent_state, sample=sample_of(0))

    async def state(self) -> bytes:
        self.states.set(self.now)
        return self.now

    def usage(self) -> Mapping[str, Any]:
        return {"usage": {"uid-a": {"project": "team"}}}

    def history(self) -> Sequence[HistoryEntry]:
        return self.entries

    def pod(self, namespace: str, pod: str) -> PodDetails | None:
        return PodDetails(namespace=namespace, pod=pod, uid="uid-a") if (namespace, pod) == ("team", "share") else None

    async def maintain(self, order: MaintenanceRequest) -> Mapping[str, Any]:
        self.orders.append(order)
        return await self.on_order(order) if self.on_order is not None else {"gpu": order.gpu, "done": order.action}


def page_server(scene: Any, **options: Any) -> PageServer:
    """On a free port of the loopback. `options`: of the settings' section http, of `Limits`, of `make_app`, and `unix_socket`."""
    http = {name: options.pop(name) for name in HttpSettings.__struct_fields__ if name in options}
    limits = {name: options.pop(name) for name in (each.name for each in fields(Limits)) if name in options}
    unix_socket = options.pop("unix_socket", None)
    return PageServer(
        partial(make_app, scene, origin_of=origin_in_tests, **options),
        HttpSettings(**{"address": "127.0.0.1", "port": 0, **http}),
        unix_socket=unix_socket,
        limits=Limits(**{"connections": http.get("max_connections", 512), **limits}),
    )


async def status_of(
    server: HttpServer, path: str, *, source: str = "127.0.0.1", token: str | None = None, secured: ssl.SSLContext | None = None
) -> int:
    """What a client at the address `source` gets. An error is JSON."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connector = aiohttp.TCPConnector(local_addr=(source, 0))
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers) as client,
        client.get(f"{server.url}{path}", ssl=secured or True) as answer,
    ):
        assert answer.status == 200 or set(await answer.json()) == {"error"}
        return answer.status


async def say(address: tuple[str, int], *parts: bytes, source: str = "127.0.0.1") -> bytes:
    """Sends these bytes. Returns all that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
    for part in parts:
        writer.write(part)
        await writer.drain()
    try:
        return await reader.read()
    finally:
        writer.close()


def by_unix(socket: Path) -> aiohttp.ClientSession:
    """A client on the unix socket, as root is."""
    return aiohttp.ClientSession("http://agent", connector=aiohttp.UnixConnector(str(socket)))


def get(path: str, *headers: str) -> bytes:
    """A request after which the server closes the connection."""
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", "")).encode()


def parsed(answer: bytes) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)
