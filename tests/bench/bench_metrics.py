"""What a scrape costs on a full node: 8 GPUs with 200 containers in all, and with 200 on each (1,600 series a family).

Prints one JSON object: milliseconds p50/p99 of a scrape over loopback HTTP (client included), of rendering a page, and how late the
event loop's timers were while pages were rendered on their thread.

Run: python -m tests.bench.bench_metrics [--rounds N]
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import structlog

from gpumgr.agent.inventory import Inventory
from gpumgr.agent.picture import Picture
from gpumgr.agent.writer import AgentView
from gpumgr.allocator.ids import Cards
from gpumgr.allocator.ledger import Allocation, Ledger
from gpumgr.metrics.exposition import Exposition
from gpumgr.metrics.live import Metrics
from gpumgr.topology.devices import Gpu, GpuProcess, GpuSample, Level, NodeSample, NodeSnapshot, Topology
from gpumgr.units import BLOCK_BYTES
from gpumgr.web.server import WebServer

GPUS: Final = 8
BLOCKS: Final = 564
_OPENMETRICS: Final = "application/openmetrics-text;version=1.0.0"


def uuid_of(index: int) -> str:
    return f"GPU-{index:08x}-7d1c-4a55-9a3e-0123456789ab"


def node_snapshot() -> NodeSnapshot:
    """An NVSwitch node."""
    return NodeSnapshot(
        gpus=tuple(
            Gpu(
                index=n,
                uuid=uuid_of(n),
                minor=n,
                bus_id=f"0000:{n:02x}:00.0",
                model="NVIDIA H200",
                memory_bytes=BLOCKS * BLOCK_BYTES,
                numa_node=n // 4,
            )
            for n in range(GPUS)
        ),
        topology=Topology(((Level.SYS,) * GPUS,) * GPUS, ((18,) * GPUS,) * GPUS),
        driver_version="550.54.15",
    )


def gpu_sample(uuid: str, processes: tuple[GpuProcess, ...] | None = None) -> GpuSample:
    return GpuSample(
        uuid=uuid,
        memory_used_bytes=10**10,
        memory_reserved_bytes=10**8,
        utilization_ratio=0.5,
        memory_copy_ratio=0.25,
        temperature_celsius=50.0,
        power_watts=400.0,
        processes=processes,
    )


def picture_of(containers_per_gpu: int) -> Picture:
    """That node with every GPU shared by so many containers."""
    snapshot = node_snapshot()
    inventory = Inventory(snapshot=snapshot)
    cards = inventory.meet(Cards())
    allocations = {
        f"{card.name}-{n}": Allocation(
            id=f"{card.name}-{n}",
            pod=("inference", f"server-{card.name}-{n:03d}"),
            uid=f"uid-{card.name}-{n}",
            container="main",
            # More sharers than cores is no real node, only a bound: then several hold the same core.
            cores={card.name: 1 << n % 100},
            blocks={card.name: 1 << n},
            gpus=(card.name,),
        )
        for card in cards.cards
        for n in range(containers_per_gpu)
    }
    ledger = Ledger(cards, allocations)
    sample = NodeSample(gpus={uuid: gpu_sample(uuid) for uuid in map(uuid_of, range(GPUS))})
    view = AgentView(ledger=ledger, inventory=inventory, node=inventory.view(cards, policy="binpack", visible_blocks={}))
    return Picture(view=view, sample=sample, sampled_at=time.monotonic(), nvml_up=True)


def summary(seconds: Sequence[float]) -> Mapping[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": round(1000 * ordered[len(ordered) // 2], 3),
        "p99_ms": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
    }


async def timed(rounds: int, work: Callable[[], Awaitable[object]]) -> Mapping[str, float]:
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - started)
    return summary(seconds)


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


class _Sources:
    def __init__(self, exposition: Exposition, picture: Picture) -> None:
        self.scrape = exposition.scrape
        self._picture = picture

    def not_alive(self) -> Sequence[str]:
        return ()

    def not_ready(self) -> Sequence[str]:
        return ()

    def view(self) -> AgentView:
        return self._picture.view


async def lag_while(work: Callable[[], Awaitable[object]], rounds: int) -> Mapping[str, float]:
    """Lateness of a 1 ms timer on the loop while `work` is repeated."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - due)

    ticking = asyncio.create_task(tick())
    for _ in range(rounds):
        await work()
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking
    return summary(late)


async def measure(containers_per_gpu: int, rounds: int) -> Mapping[str, object]:
    picture = picture_of(containers_per_gpu)
    exposition = Exposition(Metrics(node="bench", version="0"), lambda: picture)
    server = WebServer(_Sources(exposition, picture), host="127.0.0.1", port=0)
    await server.start()
    client = Client(*await asyncio.open_connection(*server.address, limit=2**24))
    renders = max(5, rounds // 20)
    classic = await client.get("/metrics", {})
    result: dict[str, object] = {
        "containers": GPUS * containers_per_gpu,
        "bytes": len(classic),
        "scrape_classic": await timed(rounds, lambda: client.get("/metrics", {})),
        "refresh_classic": await timed(renders, exposition.refresh),
        "loop_lag_in_refresh": await lag_while(exposition.refresh, renders),
        "scrape_openmetrics": await timed(rounds, lambda: client.get("/metrics", {"Accept": _OPENMETRICS})),
    }
    packed = await client.get("/metrics", {"Accept-Encoding": "gzip"})
    result["bytes_gzip"] = len(packed)
    result["scrape_gzip"] = await timed(rounds, lambda: client.get("/metrics", {"Accept-Encoding": "gzip"}))
    result["refresh_both"] = await timed(renders, exposition.refresh)
    result["graph"] = await timed(renders, lambda: client.get("/graph", {}))
    await server.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    results = {f"metrics_8x{n}": asyncio.run(measure(n, rounds)) for n in (25, 200)}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
