"""The health stream as the kubelet reads it, through grpcio."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpumgr.common.aio import LatestValue
from gpumgr.common.rpc.unix_server import UnixServer
from gpumgr.kubelet.dra_service import DraHealth, Faults
from tests.background import until
from tests.component.kubelet.calls import channel_to
from tests.kubelet_api import drahealth as pb

GPUS: Faults = {f"gpu-{number}": None for number in range(3)}


@dataclass
class Served:
    faults: LatestValue[Faults]
    server: UnixServer
    channel: Any

    def watch(self, version: str = "v1") -> Any:
        method = self.channel.unary_stream(
            f"/{version}.DRAResourceHealth/NodeWatchResources",
            request_serializer=pb.NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=pb.NodeWatchResourcesResponse.FromString,
        )
        return method(pb.NodeWatchResourcesRequest())


@asynccontextmanager
async def served(folder: Path, *, repeat_seconds: float = 3600) -> AsyncIterator[Served]:
    faults = LatestValue(GPUS)
    times = iter(range(100, 10_000))
    health = DraHealth("node-1", faults, repeat_seconds=repeat_seconds, clock=lambda: float(next(times)))
    server = UnixServer(folder / "dra.sock", [health], faults.end_readers)
    await server.listen()
    async with channel_to(server.path) as channel:
        yield Served(faults, server, channel)
    await server.drain(0)


def states(message: Any) -> list[tuple[str, int, str]]:
    return [(each.device.device_name, each.health, each.message) for each in message.devices]


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
async def test_the_whole_list_comes_at_once_and_on_each_change(folder: Path, version: str) -> None:
    async with served(folder) as one:
        stream = one.watch(version)
        healthy = [(f"gpu-{number}", 1, "") for number in range(3)]
        assert states(await stream.read()) == healthy
        one.faults.set({**GPUS, "gpu-0": "Xid 79"})
        assert states(await stream.read()) == [("gpu-0", 2, "Xid 79"), *healthy[1:]]
        one.faults.set({})
        assert states(await stream.read()) == []
        stream.cancel()
        await until(lambda: one.faults.readers == 0)


async def test_the_list_is_repeated_with_a_new_time(folder: Path) -> None:
    async with served(folder, repeat_seconds=0.01) as one:
        stream = one.watch()
        read = [await stream.read() for _ in range(3)]
        assert [message.devices[0].last_updated_time for message in read] == [100, 101, 102]
        assert [states(message) for message in read] == [states(read[0])] * 3
        stream.cancel()


async def test_streams_end_cleanly(folder: Path) -> None:
    async with served(folder) as one:
        streams = [one.watch("v1"), one.watch("v1alpha1")]
        for stream in streams:
            await stream.read()
        draining = asyncio.create_task(one.server.drain(5))
        for stream in streams:
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK
        await draining
        assert one.faults.readers == 0
