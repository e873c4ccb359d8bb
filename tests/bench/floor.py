"""The floor: a device plugin that answers every call at once with an empty message and parses no request.

`python -m tests.bench.floor SOCKET COUNT` serves until standard input ends. grpcio, so in C but for a handler of one line: the
cost of a call to a plugin that does no work at all.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import grpc

from tests.kubelet_api import deviceplugin as pb

_EMPTY = {
    "Allocate": pb.AllocateResponse(),
    "GetPreferredAllocation": pb.PreferredAllocationResponse(),
    "PreStartContainer": pb.PreStartContainerResponse(),
}


def handlers(count: int) -> Any:
    """The calls that are measured; the list has `count` devices."""
    devices = [pb.Device(ID=f"5f3a9c01-m{n}", health="Healthy", topology={"nodes": [{"ID": 0}]}) for n in range(count)]
    listed = pb.ListAndWatchResponse(devices=devices).SerializeToString()

    def list_and_watch(_request: bytes, context: Any) -> Iterator[bytes]:
        ended = Event()
        context.add_callback(ended.set)
        yield listed
        ended.wait()

    methods = {"ListAndWatch": grpc.unary_stream_rpc_method_handler(list_and_watch)}
    for name, message in _EMPTY.items():
        answer = message.SerializeToString()
        methods[name] = grpc.unary_unary_rpc_method_handler(lambda _request, _context, answer=answer: answer)
    return grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods)


def registrations() -> Any:
    """RegisterVDevice of the vcuda library, with an empty response."""
    method = grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")
    return grpc.method_handlers_generic_handler("vcuda.VCUDAService", {"RegisterVDevice": method})


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((handlers(int(sys.argv[2])), registrations()))
    server.add_insecure_port(f"unix:{sys.argv[1]}")
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(None).wait()


if __name__ == "__main__":
    main()
