"""A node for the doctor: peers on sockets that answer, hang or are not there. They run on threads, so that a command can be run too."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import grpc

from gpumgr.cli.examination import CheckResult, State
from gpumgr.common.rpc import wire
from tests.component.driver.conftest import node as sim_node

__all__ = ["sim_node"]

VERSION = ("runtime.v1.RuntimeService", "Version")
GET_POD = ("v1.PodResourcesLister", "Get")
#: What a method does: answer, refuse with a status, or (None) take the call and never answer.
Answer: TypeAlias = bytes | grpc.StatusCode | None


def brief(found: CheckResult) -> tuple[State, str]:
    return found.state, found.message


def version_answer(name: str, version: str) -> bytes:
    """A VersionResponse of CRI v1."""
    return wire.text_field(2, name) + wire.text_field(3, version) + wire.text_field(4, "v1")


@contextmanager
def serving(path: Path, method: tuple[str, str], answer: Answer) -> Iterator[None]:
    """A gRPC server at `path`, on threads, with one method of one service."""
    over = threading.Event()

    def call(_request: bytes, context: grpc.ServicerContext) -> bytes:
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "refused")
        if answer is None:
            over.wait()
        return answer or b""

    service, name = method
    handler = grpc.method_handlers_generic_handler(service, {name: grpc.unary_unary_rpc_method_handler(call)})
    with ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool, handlers=[handler])
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
