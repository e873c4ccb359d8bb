"""Every call of the device plugin API as the kubelet makes it, through grpcio."""

import asyncio
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from gpumgr.common.errors import Refusal, RefusalCode
from tests.background import until
from tests.component.kubelet.calls import channel_to, refusal
from tests.component.kubelet.deviceplugin.harness import RESPONSE, Served, allocate_request, device_list, kubelet_stub
from tests.kubelet_api import deviceplugin as pb


async def test_allocate(stub: Any, served: Served) -> None:
    answer = await stub.Allocate(allocate_request("a-m0", "a-m1"))
    [container] = answer.container_responses
    assert dict(container.envs) == RESPONSE.envs
    assert [(mount.container_path, mount.host_path, mount.read_only) for mount in container.mounts] == [
        ("/usr/local/nvidia", "/run/x", True)
    ]
    assert served.allocator.calls == [("allocate", "memory", ("a-m0", "a-m1"))]
    assert served.outcomes == [("Allocate", "ok")]


async def test_preference(stub: Any) -> None:
    wanted = pb.ContainerPreferredAllocationRequest(
        available_deviceIDs=["a-m2", "a-m0", "a-m1"], must_include_deviceIDs=["a-m2"], allocation_size=2
    )
    answer = await stub.GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[wanted]))
    assert [list(each.deviceIDs) for each in answer.container_responses] == [["a-m2", "a-m0"]]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_request", grpc.StatusCode.INVALID_ARGUMENT),
        ("no_fit", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("gpu_unhealthy", grpc.StatusCode.FAILED_PRECONDITION),
        ("conflict", grpc.StatusCode.ABORTED),
        ("unknown_device", grpc.StatusCode.NOT_FOUND),
        ("internal", grpc.StatusCode.INTERNAL),
    ],
)
async def test_refusals_keep_their_sentence(stub: Any, served: Served, code: RefusalCode, status: grpc.StatusCode) -> None:
    sentence = "no GPU has 30 free cores and 12 free blocks: GPU 0 has 20 and 320 – «100 %»\n"
    served.allocator.failure = Refusal(code, sentence)
    assert await refusal(stub.Allocate(allocate_request("a-m0"))) == (status, sentence)
    assert await refusal(stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["a-m0"]))) == (status, sentence)
    assert served.outcomes == [("Allocate", code), ("PreStartContainer", code)]


async def test_malformed_bytes_are_refused_and_the_server_continues(served: Served) -> None:
    async with channel_to(served.path) as channel:
        for rpc in ("Allocate", "GetPreferredAllocation", "PreStartContainer"):
            call = channel.unary_unary(f"/v1beta1.DevicePlugin/{rpc}")(b"\x0a\x7fgarbage")
            status, text = await refusal(call)
            assert status is grpc.StatusCode.INVALID_ARGUMENT
            assert f"can't read this {rpc} request: the message is truncated" in text
    async with kubelet_stub(served.path) as stub:
        await stub.Allocate(allocate_request("a-m0"))


async def test_a_bug_is_logged_once_and_named_to_the_kubelet(stub: Any, served: Served) -> None:
    served.allocator.failure = ZeroDivisionError("division by zero")
    with capture_logs() as logs:
        status, text = await refusal(stub.Allocate(allocate_request("a-m0")))
    assert status is grpc.StatusCode.INTERNAL
    assert "Allocate (ZeroDivisionError: division by zero)" in text
    assert [line["event"] for line in logs] == ["call_failed"]
    served.allocator.failure = None
    await stub.Allocate(allocate_request("a-m0"))


async def test_a_kubelet_that_hangs_up_cuts_no_decision_in_half(stub: Any, served: Served) -> None:
    served.allocator.hold = asyncio.Event()
    call = stub.Allocate(allocate_request("a-m0"))
    await served.allocator.until_began()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    served.allocator.hold.set()
    await until(lambda: served.allocator.ended == 1)


async def test_the_list_comes_first_and_again_on_change_only(stub: Any, served: Served) -> None:
    stream = stub.ListAndWatch(pb.Empty())
    first = await stream.read()
    assert [(device.ID, device.health, device.topology.nodes[0].ID) for device in first.devices] == [
        (f"5f3a9c01-m{number}", "Healthy", 0) for number in range(4)
    ]
    served.devices.set(device_list(4))
    served.devices.set(device_list(4, sick=1))
    second = await stream.read()
    assert [device.health for device in second.devices] == ["Unhealthy", "Healthy", "Healthy", "Healthy"]
    stream.cancel()


async def test_an_unread_list_holds_up_nothing_and_leaves_no_trace(stub: Any, served: Served) -> None:
    served.devices.set(device_list(20_000))
    streams = [stub.ListAndWatch(pb.Empty()) for _ in range(10)]
    for stream in streams:
        await stream.read()
    for sick in range(1, 30):
        served.devices.set(device_list(20_000, sick=sick))
        await stub.Allocate(allocate_request("a-m0"))
    assert served.devices.readers == 10
    for stream in streams:
        stream.cancel()
    await until(lambda: not served.devices.readers)


async def test_a_drain_lets_calls_finish_and_ends_streams_cleanly(served: Served) -> None:
    async with kubelet_stub(served.path) as stub:
        stream = stub.ListAndWatch(pb.Empty())
        await stream.read()
        served.allocator.hold = asyncio.Event()
        running = stub.Allocate(allocate_request("a-m0"))
        await served.allocator.until_began()
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
