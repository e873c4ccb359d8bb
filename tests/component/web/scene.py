"""Sources that a test holds, and a client that says exactly what a test wants."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpumgr.agent.maintenance import Order
from gpumgr.agent.picture import Picture
from gpumgr.aio import Latest
from gpumgr.allocator.history import Candidate, Entry
from gpumgr.allocator.pods import PodKey
from gpumgr.metrics.exposition import Exposition
from gpumgr.metrics.live import Metrics
from gpumgr.web.door.access import Whence, whence
from tests.unit.metrics.pictures import allocation, name_of, sample_of, view_of, whole

CERTIFICATES = Path(__file__).parent / "certificates"
#: A client that binds this address counts as one from another machine.
BEYOND = "127.0.0.77"


def seen_from(family: int, peer: Any) -> Whence:
    """As ever, but that this machine's own BEYOND is elsewhere: tests reach nothing but the loopback."""
    if family == socket.AF_INET and peer[0] == BEYOND:
        return "beyond"
    return whence(family, peer)


class Scene:
    """Implements web.sources.Sources."""

    def __init__(self) -> None:
        self.ailments: list[str] = []
        self.obstacles: list[str] = []
        self.driverless: list[str] = []
        self.books = view_of(
            allocation("a", ("team", "share"), cores={0: 0b111}, blocks={0: 0b1}), whole("b", ("team", "train"), 1)
        )
        self.before_scrape: Callable[[], Awaitable[object]] | None = None
        self.states = Latest(b"")
        self.now = b'{"at": 1}'
        self.entries: list[Entry] = [
            Entry(
                number=1, at=1.0, what="granted", id="a", pod=("team", "share"), candidates=(Candidate(gpu=name_of(0), index=0),)
            ),
            Entry(number=2, at=2.0, what="refused", id="c", pod=("team", "late"), why="no room", code="no_fit"),
            Entry(number=3, at=3.0, what="freed", id="a", pod=("team", "share")),
        ]
        self.orders: list[Order] = []
        self.on_order: Callable[[Order], Awaitable[Mapping[str, Any]]] | None = None
        self._exposition = Exposition(Metrics(node="node-1", version="1"), self.picture)

    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        if self.before_scrape is not None:
            await self.before_scrape()
        return await self._exposition.scrape(accept, accept_encoding)

    def not_alive(self) -> Sequence[str]:
        return self.ailments

    def not_ready(self) -> Sequence[str]:
        return self.obstacles

    def no_driver(self) -> Sequence[str]:
        return self.driverless

    def view(self) -> Any:
        return self.books

    def picture(self) -> Picture:
        return Picture(view=self.books, sample=sample_of(0))

    async def state(self) -> bytes:
        return self.now

    def usage(self) -> Mapping[str, Any]:
        return {"usage": {"uid-a": {"project": "team"}}}

    def history(self) -> Sequence[Entry]:
        return self.entries

    def story(self, namespace: str, pod: str) -> Mapping[str, Any] | None:
        return {"namespace": namespace, "pod": pod, "uid": "uid-a"} if (namespace, pod) == ("team", "share") else None

    def pods(self) -> Sequence[PodKey]:
        return [("other", "share"), ("team", "late"), ("team", "share")]

    async def maintain(self, order: Order) -> Mapping[str, Any]:
        self.orders.append(order)
        return await self.on_order(order) if self.on_order is not None else {"gpu": order.gpu, "done": order.action}


async def say(address: tuple[str, int], *parts: bytes, half_close: bool = False, source: str = "127.0.0.1") -> bytes:
    """All that the server answers to these bytes until it hangs up."""
    reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
    for part in parts:
        writer.write(part)
        await writer.drain()
    if half_close:
        writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


def get(path: str, *headers: str) -> bytes:
    """A request after which the server hangs up."""
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", "")).encode()


def parsed(answer: bytes) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)
