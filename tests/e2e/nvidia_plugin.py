"""A stand-in for NVIDIA's own device plugin: `python -m tests.e2e.nvidia_plugin UUID...` gives these GPUs out as nvidia.com/gpu, whole.

Socket, resource, ids and the answer of Allocate are those of k8s-device-plugin v0.17 with its defaults (deviceListStrategy envvar).
Until SIGTERM; the kubelet must be there, and is not waited for when it restarts.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import betterproto
import grpc

from gpumgr._pb.deviceplugin.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateResponse,
    Device,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    RegisterRequest,
)

from .places import DEVICE_PLUGINS

RESOURCE: Final = "nvidia.com/gpu"
SOCKET: Final = DEVICE_PLUGINS / "nvidia-gpu.sock"
_SERVICE: Final = "/v1beta1.DevicePlugin/"


class _Plugin(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, uuids: Sequence[str], over: threading.Event) -> None:
        self._uuids, self._over = uuids, over

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        match details.method.removeprefix(_SERVICE):
            case "GetDevicePluginOptions":
                return _unary(Empty, lambda _: DevicePluginOptions())
            case "ListAndWatch":
                return grpc.unary_stream_rpc_method_handler(self._watch, Empty().parse, bytes)
            case "Allocate":
                return _unary(AllocateRequest, _allocate)
        return None

    def _watch(self, _request: Empty, _context: object) -> Iterator[ListAndWatchResponse]:
        yield ListAndWatchResponse(devices=[Device(id=uuid, health="Healthy") for uuid in self._uuids])
        self._over.wait()


def _allocate(request: AllocateRequest) -> AllocateResponse:
    wanted = [",".join(each.devices_ids) for each in request.container_requests]
    answers = [ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": uuids}) for uuids in wanted]
    return AllocateResponse(container_responses=answers)


def _unary(request: type[betterproto.Message], answer: Callable[[Any], betterproto.Message]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(lambda asked, _context: answer(asked), lambda data: request().parse(data), bytes)


def serve(uuids: Sequence[str]) -> None:
    """Registers and serves until SIGTERM."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool, handlers=[_Plugin(uuids, over)])
        server.add_insecure_port(f"unix:{SOCKET}")
        server.start()
        with grpc.insecure_channel(f"unix://{DEVICE_PLUGINS}/kubelet.sock") as channel:
            register = channel.unary_unary("/v1beta1.Registration/Register", bytes)
            register(RegisterRequest(version="v1beta1", endpoint=SOCKET.name, resource_name=RESOURCE), timeout=60)
        print(f"{RESOURCE}: {len(uuids)}", flush=True)
        over.wait()
        server.stop(grace=None).wait()
    SOCKET.unlink(missing_ok=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
