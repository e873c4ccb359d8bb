"""The gRPC client: a grpclib channel over a unix socket."""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from grpclib.const import Cardinality, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol

from gpumgr.common.errors import KubeletError
from gpumgr.common.rpc import wire
from gpumgr.common.rpc.grpclib_private import OpenChannel

Reply = TypeVar("Reply")

#: The errors of a call if the peer is unavailable, disconnects, hangs or refuses. A TimeoutError is an OSError.
CALL_FAILURES: Final = (GRPCError, StreamTerminatedError, ProtocolError, OSError)


class WireCodec(CodecBase):
    """Messages are bytes, or generated messages of the type that the method declares."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:  # noqa: ARG002 (grpclib's signature)
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        return data if message_type is bytes else wire.parse(message_type, data)


class PeerConnection(H2Protocol):
    """A client's or server's connection to a peer that may send anything.

    Frames of an unknown type must be ignored (RFC 9113, section 5.5), but grpclib raises an error for the h2 event of such a frame. For
    unreadable data, h2 and grpclib raise errors of many types. Here each of them closes the connection.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.processor.processors = defaultdict(lambda: _ignore, self.processor.processors)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception:
            self.processor.close("the peer sent something that can't be read")


def _ignore(_event: object) -> None:
    pass


class UnixChannel(OpenChannel):
    """Connects at the first call, and again when the connection is lost. Use it as an async context manager. Create it inside a running
    event loop."""

    def __init__(self, path: Path) -> None:
        super().__init__(path=str(path), codec=WireCodec())

    async def __aenter__(self) -> Self:
        return self

    def connection(self, made: H2Protocol) -> H2Protocol:
        return PeerConnection(made.handler, made.config, made.h2_config)

    async def unary(self, route: str, request: Any, reply_type: type[Reply], *, timeout_seconds: float | None = None) -> Reply:
        """Makes one call; the peer receives the deadline, too. `request` is bytes or a generated message.

        Raises CALL_FAILURES, or WireError if the reply can't be read. If the peer reports that the deadline has passed, TimeoutError is
        raised.
        """
        # grpclib ends a wait by a cancellation of the task, which it never takes back. In Python 3.11.2 (Debian 12) the task's next
        # `asyncio.timeout` then raises CancelledError instead of TimeoutError, which ends a daemon. So the call has a task of its own.
        caller = asyncio.current_task()
        assert caller is not None
        cancellations = caller.cancelling()
        try:
            return await asyncio.create_task(self._unary(route, request, reply_type, timeout_seconds), name=route)
        except CALL_FAILURES as error:
            # If the caller is cancelled while grpclib ends the wait, grpclib's error replaces the cancellation.
            if caller.cancelling() > cancellations:
                raise asyncio.CancelledError from error
            raise

    async def _unary(self, route: str, request: Any, reply_type: type[Reply], timeout_seconds: float | None) -> Reply:
        try:
            async with self.request(route, Cardinality.UNARY_UNARY, type(request), reply_type, timeout=timeout_seconds) as stream:
                await stream.send_message(request, end=True)
                reply = await stream.recv_message()
        except GRPCError as error:
            if timeout_seconds is not None and error.status is Status.DEADLINE_EXCEEDED:
                raise TimeoutError(error.message) from error
            raise
        if reply is None:
            raise GRPCError(Status.INTERNAL, "the call ended without an answer")
        return reply


def failure_text(error: Exception) -> str:
    match error:
        case GRPCError():
            return f"the answer was {error.status.name}: {error.message or 'no reason given'}"
        case StreamTerminatedError() | ProtocolError():
            return "the peer closed the connection during the call"
        case TimeoutError():
            return "there was no answer in time"
        case FileNotFoundError():
            return "the socket does not exist"
        case ConnectionRefusedError():
            return "no process listens there"
        case OSError():
            return error.strerror or str(error)
        case _:
            return str(error)


_KUBELET_HINTS: Final[dict[type[Exception], str]] = {
    FileNotFoundError: " (is the kubelet running?)",
    ConnectionRefusedError: " (did a kubelet leave the socket behind?)",
}


def kubelet_error(doing: str, path: Path, error: Exception) -> KubeletError:
    """`error` is one of CALL_FAILURES. `doing`: for example "register tencent.com/vcuda-core"."""
    return KubeletError(f"can't {doing} at {path}: {failure_text(error)}{_KUBELET_HINTS.get(type(error), '')}")
