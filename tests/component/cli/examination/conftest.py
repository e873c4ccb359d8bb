"""A node for the doctor: peers on sockets that answer, hang or are not there. They run on threads, so that a command can be run too."""

import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import grpc

from gpumgr.common.rpc import wire
from tests.component.driver.conftest import node as sim_node

__all__ = ["sim_node"]

VERSION = "/runtime.v1.RuntimeService/Version"
GET_POD = "/v1.PodResourcesLister/Get"


def version_answer(name: str, version: str) -> bytes:
    """A VersionResponse of CRI v1."""
    return wire.text_field(2, name) + wire.text_field(3, version) + wire.text_field(4, "v1")


#: What a method does: answer, refuse with a status, or (None) take the call and never answer.
Answer: TypeAlias = bytes | grpc.StatusCode | None


class _Fixed(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, answers: Mapping[str, Answer], over: threading.Event) -> None:
        self._answers, self._over = answers, over

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method not in self._answers:
            return None
        answer = self._answers[details.method]

        def call(_request: bytes, context: grpc.ServicerContext) -> bytes:
            if isinstance(answer, grpc.StatusCode):
                context.abort(answer, "refused")
            if answer is None:
                self._over.wait()
            return answer or b""

        return grpc.unary_unary_rpc_method_handler(call)


@contextmanager
def serving(path: Path, answers: Mapping[str, Answer]) -> Iterator[None]:
    """A gRPC server at `path`, on threads, with these methods."""
    over = threading.Event()
    with ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool, handlers=[_Fixed(answers, over)])
        server.add_insecure_port(f"unix:{path}")
        server.start()
        try:
            yield
        finally:
            over.set()
            server.stop(grace=None).wait()


@contextmanager
def listening(path: Path) -> Iterator[None]:
    """A socket that accepts connections and sends nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield
