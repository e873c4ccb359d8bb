"""What random input at every socket leaves in the agent: resident memory, open descriptors and log lines, batch by batch.

`python -m tests.bench.bench_random_input [--inputs N] [--only http] [--set SECTION.KEY=VALUE]` starts an agent on a simulated node, sends
N inputs in batches and prints one JSON object. An input is a connection with random bytes, a damaged request, a request of a
client that disconnects before the response, or a burst of requests in one write.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import yaml

from tests.bench.bench_agent import settings_in

BATCHES: Final = 10
CONCURRENT: Final = 32
#: After the last batch: longer than the agent waits for a client's first request.
SETTLE_SECONDS: Final = 15.0
_PATHS: Final = (
    "/", "/metrics", "/metric", "/healthz", "/readyz", "/version", "/graph", "/graph?format=json", "/usage", "/api/state", "/api/stream",
    "/api/history", "/api/pods", "/api/pods/team/web", "/api/gpus/0/cordon", "/nowhere", "/%00",
)  # fmt: skip


def request(source: random.Random) -> bytes:
    method = source.choice(("GET", "GET", "GET", "POST", "HEAD", "PUT", "BREW"))
    lines = [f"{method} {source.choice(_PATHS)} HTTP/1.1", "Host: localhost"]
    sizes = (source.choice((1, 10, 300, 9000)) for _ in range(source.choice((0, 0, 1, 3, 70))))
    lines += [f"X-{source.randrange(100)}: {'x' * size}" for size in sizes]
    body = source.randbytes(source.choice((0, 0, 0, 5, 5000)))
    if body:
        lines.append(f"Content-Length: {len(body) + source.choice((0, 0, 1, -1, 10**6))}")
    return "\r\n".join((*lines, "", "")).encode() + body


def random_input(source: random.Random) -> bytes:
    match source.randrange(4):
        case 0:
            return source.randbytes(source.choice((1, 20, 500, 20_000)))
        case 1:
            damaged = bytearray(request(source))
            for _ in range(source.randrange(1, 5)):
                damaged[source.randrange(len(damaged))] = source.randrange(256)
            return bytes(damaged)
        case 2:
            return request(source) * source.choice((1, 2, 20))
        case _:
            return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + source.randbytes(source.choice((0, 9, 100, 3000)))


async def send_one(address: str | tuple[str, int], source: random.Random) -> None:
    """Connects, writes, and ends the connection in one of four ways."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    loop = asyncio.get_running_loop()
    with socket.socket(family, socket.SOCK_STREAM) as client, contextlib.suppress(OSError, TimeoutError):
        client.setblocking(False)
        await loop.sock_connect(client, address)
        async with asyncio.timeout(1):
            await loop.sock_sendall(client, random_input(source))
        match source.randrange(4):
            case 0:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends RST
            case 1:
                client.shutdown(socket.SHUT_WR)
            case 2:
                return
        async with asyncio.timeout(0.2):
            while await loop.sock_recv(client, 1 << 16):
                pass


async def batch(addresses: list[str | tuple[str, int]], number: int, source: random.Random) -> None:
    left = iter(range(number))

    async def work() -> None:
        for _ in left:
            await send_one(source.choice(addresses), source)

    await asyncio.gather(*(work() for _ in range(CONCURRENT)))


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1)


def addresses_of(folder: Path, log: Path, only: str) -> list[str | tuple[str, int]]:
    """Where the agent listens, as soon as it does."""
    while True:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        urls = [line["url"] for line in lines if line["event"] == "web_listening"]
        if urls:
            break
        time.sleep(0.1)
    time.sleep(3)  # the other servers, and the first polls
    http: list[str | tuple[str, int]] = [("127.0.0.1", int(urls[0].rpartition(":")[2])), str(folder / "agent.sock")]
    others: list[str | tuple[str, int]] = [
        str(path) for path in folder.rglob("*.sock") if path.is_socket() and path.name != "agent.sock"
    ]
    return http if only == "http" else others if only == "grpc" else [*http, *others]


def measure(folder: Path, inputs: int, only: str, seed: int, assignments: list[str]) -> dict[str, object]:
    config, log = folder / "gpumgr.yaml", folder / "agent.log"
    settings = settings_in(folder)
    Path(settings["kubelet"]["device_plugin_dir"]).mkdir()
    settings["enforcement"]["backend"] = "none"
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "gpumgr", "run", "--standalone", "--sim", "hgx-h100-8", "--config", str(config)]
    command += ["--output", "json"]
    command += [word for each in assignments for word in ("--set", each)]
    with log.open("wb") as stderr, subprocess.Popen(command, stdout=stderr, stderr=stderr, stdin=subprocess.DEVNULL) as agent:
        try:
            addresses = addresses_of(folder, log, only)
            source, resident, files = random.Random(seed), [resident_mib(agent.pid)], [descriptors(agent.pid)]
            for number in range(BATCHES):
                asyncio.run(batch(addresses, inputs // BATCHES, source))
                time.sleep(2 if number < BATCHES - 1 else SETTLE_SECONDS)
                resident.append(resident_mib(agent.pid))
                files.append(descriptors(agent.pid))
                print(resident[-1], files[-1], file=sys.stderr, flush=True)
        finally:
            agent.send_signal(signal.SIGTERM)
    events = Counter(json.loads(line)["event"] for line in log.read_text().splitlines() if line.startswith("{"))
    return {
        "sockets": [str(address) for address in addresses],
        "inputs": inputs,
        "resident_mib": resident,
        "descriptors": files,
        "log_lines": dict(events.most_common(10)),
    }


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--only", choices=("all", "http", "grpc"), default="all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpumgr-bench-") as folder:
        found = measure(Path(folder), arguments.inputs, arguments.only, arguments.seed, arguments.assignments)
    print(json.dumps({"random_input": found}, indent=2))


if __name__ == "__main__":
    main()
