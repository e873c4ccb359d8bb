"""What open pages cost the agent: 50 streams with a state of 8 GPUs and 104 containers, one a second; and how big the page is.

`python -m tests.bench.bench_pages [--seconds N]` prints one JSON object. `core_percent` is CPU time of the server's process by the clock;
its readers are another process.
"""

import asyncio
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, cast

import msgspec
from msgspec.structs import replace

from gpumgr.agent.node_report import NodeReport
from gpumgr.ledger.history import HistoryEntry
from gpumgr.settings.schema import HttpSettings
from gpumgr.web.handlers import make_app
from gpumgr.web.http_server import PageServer
from gpumgr.web.responses import PAGE, IndexPage
from gpumgr.web.state import HISTORY_SHOWN, node_state
from tests.bench import figures
from tests.bench.bench_metrics import picture_of
from tests.bench.children import child
from tests.component.web.scene import Scene

CONTAINERS_PER_GPU: Final = 13
STREAMS: Final = 50
PERIOD_SECONDS: Final = 1.0


class Node(Scene):
    """A node on which little happens."""

    def __init__(self, report: NodeReport, history: list[HistoryEntry]) -> None:
        super().__init__()
        self._report, self.entries = report, history

    def report(self) -> NodeReport:
        return replace(self._report, at=time.time(), sampled_at=time.monotonic())

    async def state(self) -> bytes:
        return msgspec.json.encode(node_state(self.report(), self.entries))


def node() -> Node:
    """8 GPUs that 104 containers share, each with two processes; as much history as is shown."""
    report = picture_of(CONTAINERS_PER_GPU)
    history = [
        HistoryEntry(
            number=n,
            at=time.time(),
            what="granted",
            id=a.id,
            pod=a.pod,
            gpus=tuple(a.gpus),
            why="the fullest GPU that has the room",
        )
        for n, a in enumerate([*report.view.ledger.allocations.values()][:HISTORY_SHOWN])
    ]
    return Node(report, history)


async def publish(sources: Node, seconds: float) -> None:
    """A state a second, made once for all, as the agent does."""
    for _ in range(round(seconds / PERIOD_SECONDS)):
        sources.states.set(await sources.state())
        await asyncio.sleep(PERIOD_SECONDS)


async def measure(seconds: float) -> Mapping[str, object]:
    sources, front = node(), IndexPage(PAGE)
    server = PageServer(partial(make_app, cast("Any", sources)), HttpSettings(port=0))
    await server.start()
    with ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, child("tests.bench.bench_pages", "--read", server.address[1]))
        began, spent = time.perf_counter(), time.process_time()
        await publish(sources, seconds)
        percent = 100 * (time.process_time() - spent) / (time.perf_counter() - began)
        if sources.states.readers != STREAMS:
            raise RuntimeError(f"{sources.states.readers} of {STREAMS} streams are left")
    await server.stop()
    return {
        "page_bytes": len(front.plain),
        "page_bytes_gzip": len(front.packed),
        "state_bytes": len(await sources.state()),
        "streams": STREAMS,
        "core_percent": round(percent, 2),
    }


def read(port: int) -> None:
    """Takes in what all streams bring until standard input ends."""
    selector = selectors.DefaultSelector()
    for _ in range(STREAMS):
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stream.recv(1 << 20)
        selector.register(stream, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    while sys.stdin not in (ready := [key.fileobj for key, _ in selector.select()]):
        for each in ready:
            assert isinstance(each, socket.socket)
            each.recv(1 << 20)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(int(sys.argv[2]))
    else:
        figures.main(measure, __doc__, seconds=15.0)
