"""A plugin's socket: stale files, takeovers, an orderly end."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpumgr.common.aio import LatestValue
from gpumgr.common.errors import KubeletError
from gpumgr.kubelet.deviceplugin.plugin import DevicePlugin, PluginServer
from tests.component.kubelet.deviceplugin.harness import ScriptedAllocator, Served, device_list, kubelet_stub
from tests.kubelet_api import deviceplugin as pb


def server_at(path: Path) -> PluginServer:
    return PluginServer(path, DevicePlugin("core", ScriptedAllocator(), LatestValue(b"")))


async def test_the_probe_finds_itself(served: Served) -> None:
    await served.server.probe()
    assert served.server.in_place


async def test_a_drain_lets_calls_finish_and_ends_streams_cleanly(served: Served, stub: Any) -> None:
    stream = stub.ListAndWatch(pb.Empty())
    await stream.read()
    served.allocator.hold = asyncio.Event()
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["a-m0"])])
    running = asyncio.ensure_future(_result(stub.Allocate(request)))
    await served.allocator.began.wait()

    draining = asyncio.create_task(served.server.drain(5))
    await asyncio.sleep(0)
    assert not served.path.exists()
    served.allocator.hold.set()
    assert len((await running).container_responses) == 1
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    await draining
    assert served.devices.readers == 0


async def test_a_call_beyond_the_grace_is_cut(served: Served, stub: Any) -> None:
    served.allocator.hold = asyncio.Event()
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["a-m0"])])
    running = asyncio.ensure_future(_result(stub.Allocate(request)))
    await served.allocator.began.wait()
    await served.server.drain(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    served.allocator.hold.set()
    await served.allocator.ended.wait()


async def _result(call: Any) -> Any:
    return await call


async def test_an_unread_stream_does_not_hold_up_the_end(served: Served, stub: Any) -> None:
    served.devices.set(device_list(60_000))
    stream = stub.ListAndWatch(pb.Empty())
    await stub.GetDevicePluginOptions(pb.Empty())
    async with asyncio.timeout(5):
        await served.server.drain(0.1)
    stream.cancel()


async def test_a_second_drain_does_nothing(served: Served) -> None:
    await served.server.drain(0)
    await served.server.drain(0)


async def test_a_stale_socket_is_replaced(folder: Path) -> None:
    path = folder / "plugin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = server_at(path)
    await server.start()
    await server.probe()
    assert path.stat().st_mode & 0o777 == 0o600
    await server.drain(0)
    assert not path.exists()


async def test_another_file_in_its_place_is_left_alone(folder: Path) -> None:
    path = folder / "plugin.sock"
    path.write_text("precious")
    with pytest.raises(KubeletError, match="can't listen on"):
        await server_at(path).start()
    assert path.read_text() == "precious"


async def test_a_missing_folder_is_an_error(folder: Path) -> None:
    with pytest.raises(KubeletError, match="No such file or directory"):
        await server_at(folder / "none" / "plugin.sock").start()


async def test_a_path_that_is_too_long_is_reported_with_its_length(folder: Path) -> None:
    path = folder / ("x" * 100) / "plugin.sock"
    with pytest.raises(KubeletError, match=rf"{len(str(path))} bytes and a unix socket allows 107"):
        await server_at(path).start()


async def test_an_old_server_leaves_its_successors_socket(served: Served) -> None:
    successor = server_at(served.path)
    served.path.unlink()
    assert not served.server.in_place
    await successor.start()
    assert not served.server.in_place
    await served.server.drain(0)
    await successor.probe()
    await successor.drain(0)


async def test_a_server_of_another_process_is_recognised(folder: Path) -> None:
    server = server_at(folder / "plugin.sock")
    other = grpc.aio.server()
    other.add_insecure_port(f"unix:{server.path}")
    await other.start()
    with pytest.raises(KubeletError, match="UNIMPLEMENTED"):
        await server.probe()
    await other.stop(None)


async def test_connections_are_refused_after_the_end(served: Served) -> None:
    await served.server.drain(0)
    async with kubelet_stub(served.path) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetDevicePluginOptions(pb.Empty())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
