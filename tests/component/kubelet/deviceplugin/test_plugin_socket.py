"""A plugin's socket: stale files, takeovers, an orderly end."""

import asyncio
import socket
from pathlib import Path
from typing import cast

import grpc

from gpumgr.agent.writer import Agent
from gpumgr.common.aio import LatestValue
from gpumgr.kubelet.plugin import DevicePlugin, PluginServer
from tests.component.kubelet.deviceplugin.harness import ScriptedAllocator, Served, allocate_request, kubelet_stub
from tests.kubelet_api import deviceplugin as pb


def server_at(path: Path) -> PluginServer:
    return PluginServer(path, DevicePlugin("core", cast("Agent", ScriptedAllocator()), LatestValue(b"")))


async def test_a_drain_lets_calls_finish_and_ends_streams_cleanly(served: Served) -> None:
    async with kubelet_stub(served.path) as stub:
        stream = stub.ListAndWatch(pb.Empty())
        await stream.read()
        served.allocator.hold = asyncio.Event()
        running = stub.Allocate(allocate_request("a-m0"))
        await served.allocator.began.wait()
        draining = asyncio.create_task(served.server.drain(60))
        await asyncio.sleep(0)
        assert not served.path.exists()
        served.allocator.hold.set()
        assert len((await running).container_responses) == 1
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
    del stub, stream, running  # the connection lasts while they exist, and the drain waits for its end
    await draining
    assert served.devices.readers == 0


async def test_a_stale_socket_is_replaced(folder: Path) -> None:
    path = folder / "plugin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = server_at(path)
    await server.listen()
    async with kubelet_stub(path) as stub:
        assert (await stub.GetDevicePluginOptions(pb.Empty())).pre_start_required
    del stub
    assert path.stat().st_mode & 0o777 == 0o600
    await server.drain(0)
    assert not path.exists()


async def test_an_old_server_leaves_its_successors_socket(served: Served) -> None:
    successor = server_at(served.path)
    served.path.unlink()
    assert not served.server.in_place
    await successor.listen()
    assert not served.server.in_place
    await served.server.drain(0)
    assert successor.in_place
    await successor.drain(0)
