"""The cost of a scrape on a full node: 8 GPUs with 200 containers in all, and with 200 on each (1,600 in all).

Prints one JSON object. `scrape_*`: milliseconds p50/p99 of a scrape over loopback HTTP, client included, every 10 ms from another
process while pages are rendered once a second; `floor_*`: the same of a handler that answers fixed bytes of that size. `cpu_percent`: of
one core, with 10 scrapes a second in the format of Prometheus.

Run: python -m tests.bench.bench_metrics [--seconds N]
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NoReturn

from aiohttp import web
from msgspec.structs import replace

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.aio import until_tick
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.placement.devices import NodeSnapshot
from gpumgr.placement.pods import ContainerSpec, PodView
from gpumgr.web.metrics import Exposition, Metrics
from tests.allocations import block_count
from tests.background import background
from tests.bench import figures
from tests.bench.children import child, serving
from tests.bench.figures import spread
from tests.node_reports import report
from tests.unit.web.metrics.pictures import snapshot_of

GPUS: Final = 8
BLOCKS: Final = 564
ROUNDS: Final = 3
SCRAPE_EVERY_SECONDS: Final = 0.01
CPU_EVERY_SECONDS: Final = 0.1

#: What Prometheus 2.40 to 3 sends, without its other headers.
_PROMETHEUS: Final = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
    "Accept-Encoding": "gzip",
}
#: Ways to ask, and what the figures call them.
_ASKED: Final[Mapping[str, Mapping[str, str]]] = {"classic": {}, "openmetrics_gzip": _PROMETHEUS}


def node_snapshot() -> NodeSnapshot:
    """An NVSwitch node."""
    made = snapshot_of(GPUS, nvlinks=18)
    gpus = tuple(replace(gpu, memory_bytes=BLOCKS * BLOCK_BYTES, numa_node=gpu.index // 4) for gpu in made.gpus)
    return replace(made, gpus=gpus)


def picture_of(containers_per_gpu: int) -> NodeReport:
    """A node with every GPU shared by so many containers. More sharers than cores is no real node, only a bound."""
    pods = [("inference", f"server-{number:04d}") for number in range(GPUS * containers_per_gpu)]
    return report(pods, node="bench", at=time.time(), sampled_at=time.monotonic())


def pods_of(report: NodeReport) -> list[PodView]:
    return [
        PodView(
            namespace=each.pod[0],
            name=each.pod[1],
            uid=each.uid or "",
            phase="Running",
            containers=(ContainerSpec(name="main", cores=each.cores, memory_blocks=block_count(each)),),
        )
        for each in report.view.ledger.allocations.values()
        if each.pod
    ]


def exposition_of(containers_per_gpu: int) -> Exposition:
    report = picture_of(containers_per_gpu)
    pods = pods_of(report)
    return Exposition(Metrics(node="bench", version="0", pods=lambda: pods), lambda: report)


# -- the process that is scraped -------------------------------------------------------------------------------------------


async def refresh(exposition: Exposition) -> NoReturn:
    while True:
        await exposition.refresh()
        await asyncio.sleep(until_tick(1.0))


async def serve(containers_per_gpu: int | None, size: int) -> None:
    """The exposition, or, with None, `size` fixed bytes. /cpu returns the CPU seconds of this process."""

    async def scrape(request: web.Request) -> web.Response:
        headers, body = await exposition.scrape(request.headers.get("Accept", ""), request.headers.get("Accept-Encoding", ""))
        return web.Response(body=body, headers=headers)

    async def fixed(_request: web.Request) -> web.Response:
        return web.Response(body=filling)

    async def cpu(_request: web.Request) -> web.Response:
        return web.Response(text=str(time.process_time()))

    filling = b"x" * size
    app = web.Application()
    app.router.add_get("/metrics", fixed if containers_per_gpu is None else scrape)
    app.router.add_get("/cpu", cpu)
    async with AsyncExitStack() as stack:
        if containers_per_gpu is not None:
            exposition = exposition_of(containers_per_gpu)
            await stack.enter_async_context(background(refresh(exposition)))
        url = await stack.enter_async_context(serving(app))
        print(url.rpartition(":")[2], flush=True)
        await asyncio.to_thread(sys.stdin.read)


class Client:
    """A keep-alive HTTP/1.1 connection that does as little as a scrape needs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def get(self, path: str, headers: Mapping[str, str]) -> bytes:
        lines = [f"GET {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        self._writer.write("\r\n".join(lines).encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        return await self._reader.readexactly(length)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@asynccontextmanager
async def client_of(*words: object) -> AsyncIterator[Client]:
    """The figures of a process that serves as `words` say."""
    with child("tests.bench.bench_metrics", *words) as port:
        client = Client(*await asyncio.open_connection("127.0.0.1", int(port), limit=2**24))
        try:
            yield client
        finally:
            await client.close()


# -- what is measured ------------------------------------------------------------------------------------------------------


async def times(client: Client, headers: Mapping[str, str], seconds: float) -> dict[str, float | int]:
    """The CPU of scrapes at a steady pace, in rounds of so many seconds."""
    await client.get("/metrics", headers)
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        taken: list[float] = []
        rounds.append(taken)
        until = time.perf_counter() + seconds
        while (started := time.perf_counter()) < until:
            await client.get("/metrics", headers)
            taken.append(time.perf_counter() - started)
            await asyncio.sleep(max(0.0, SCRAPE_EVERY_SECONDS - taken[-1]))
    return spread(rounds)


async def cpu_percent(client: Client, headers: Mapping[str, str], seconds: float) -> float:
    """Share of one core that the scraped process takes, 10 scrapes a second included."""
    await client.get("/metrics", headers)
    await asyncio.sleep(1.5)
    computed, began = float(await client.get("/cpu", {})), time.perf_counter()
    while time.perf_counter() - began < seconds:
        await client.get("/metrics", headers)
        await asyncio.sleep(CPU_EVERY_SECONDS)
    computed = float(await client.get("/cpu", {})) - computed
    return round(100 * computed / (time.perf_counter() - began), 2)


async def measure_node(containers_per_gpu: int, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {"containers": GPUS * containers_per_gpu}
    for name, headers in _ASKED.items():
        async with client_of("--serve", containers_per_gpu) as client:
            size = len(await client.get("/metrics", headers))
            result[f"scrape_{name}"] = await times(client, headers, seconds)
            if name == "openmetrics_gzip":
                result["cpu_percent"] = await cpu_percent(client, headers, ROUNDS * seconds)
        async with client_of("--floor", size) as client:
            result[f"floor_{name}"] = await times(client, headers, seconds)
            if name == "openmetrics_gzip":
                result["floor_cpu_percent"] = await cpu_percent(client, headers, ROUNDS * seconds)
    return result


async def measure(seconds: float) -> dict[str, Any]:
    """`seconds`: of each of three rounds."""
    return {f"metrics_8x{n}": await measure_node(n, seconds) for n in (25, 200)}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--serve", containers_per_gpu]:
            asyncio.run(serve(int(containers_per_gpu), 0))
        case ["--floor", size]:
            asyncio.run(serve(None, int(size)))
        case _:
            figures.main(measure, __doc__, seconds=3.0)
