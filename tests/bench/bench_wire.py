"""The kubelet's calls on the wire: `python -m tests.bench.bench_wire [--rounds N]` prints one JSON object, times in milliseconds.

The server runs in a process of its own with an allocator that answers at once; the client is grpcio with the kubelet's options.
What is measured is everything between the kubelet and the allocator: HTTP/2, codecs, the plugin.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from gpumgr.aio import LatestValue
from gpumgr.allocator.response import ContainerResponse, DeviceNode, Mount
from gpumgr.deviceplugin.codec import encode_devices
from gpumgr.deviceplugin.plugin import DevicePlugin
from gpumgr.deviceplugin.server import PluginServer
from gpumgr.units import Resource

#: 8 GPUs of 141 GB: 564 blocks of 256 MiB each.
IDS = tuple(f"5f3a9c{gpu:02x}-m{block}" for gpu in range(8) for block in range(564))
RESPONSE = ContainerResponse(
    envs={"NVIDIA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64", "A": "b", "C": "d"},
    mounts=tuple(Mount(container_path=f"/c/{number}", host_path=f"/h/{number}", read_only=True) for number in range(3)),
    devices=tuple(
        DeviceNode(container_path=path, host_path=path) for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
    ),
)


class InstantAllocator:
    """The cheapest answers there are."""

    async def prefer(self, _kind: Resource, available: Sequence[str], _must_include: Sequence[str], size: int) -> Sequence[str]:
        return available[:size]

    async def allocate(self, _kind: Resource, _device_ids: Sequence[str]) -> ContainerResponse:
        return RESPONSE

    async def pre_start(self, _kind: Resource, _device_ids: Sequence[str]) -> None:
        return None


async def serve(path: Path) -> None:
    """Serves until standard input ends."""
    devices = LatestValue(encode_devices([(device_id, True, 0) for device_id in IDS]))
    server = PluginServer(path, DevicePlugin("memory", InstantAllocator(), devices))
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.drain(0)


def measure(call: Callable[[], object], rounds: int) -> dict[str, float]:
    """p50 and p99 of `rounds` calls, after a few that don't count."""
    for _ in range(5):
        call()
    took = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        took.append((time.perf_counter() - started) * 1000)
    took.sort()
    return {"p50": round(took[len(took) // 2], 3), "p99": round(took[min(len(took) - 1, len(took) * 99 // 100)], 3)}


def client_results(path: Path, rounds: int) -> dict[str, dict[str, float]]:
    from tests.kubelet_api import deviceplugin as pb
    from tests.kubelet_api import deviceplugin_services

    def allocate(count: int) -> Any:
        return pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=IDS[:count])])

    wanted = pb.ContainerPreferredAllocationRequest(available_deviceIDs=IDS, allocation_size=64)
    preference = pb.PreferredAllocationRequest(container_requests=[wanted])
    with grpc.insecure_channel(f"unix:{path}", options=[("grpc.default_authority", "localhost")]) as channel:
        stub = deviceplugin_services.DevicePluginStub(channel)

        def first_list() -> None:
            stream = stub.ListAndWatch(pb.Empty())
            assert len(next(stream).devices) == len(IDS)
            stream.cancel()

        one, every, hundred = allocate(1), allocate(len(IDS)), allocate(100)
        return {
            "allocate_1": measure(lambda: stub.Allocate(one), rounds),
            "allocate_100": measure(lambda: stub.Allocate(hundred), rounds),
            "allocate_4512": measure(lambda: stub.Allocate(every), rounds),
            "prefer_4512": measure(lambda: stub.GetPreferredAllocation(preference), rounds),
            "first_list_4512": measure(first_list, max(10, rounds // 4)),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return
    with tempfile.TemporaryDirectory(prefix="gpumgr") as folder:
        path = Path(folder) / "plugin.sock"
        command = [sys.executable, "-m", "tests.bench.bench_wire", "--serve", str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            print(json.dumps({"unit": "ms", "rounds": options.rounds, **client_results(path, options.rounds)}, indent=2))
            assert server.stdin is not None
            server.stdin.close()


if __name__ == "__main__":
    main()
