"""Serves gRPC on a unix socket. A failed call is answered with a gRPC status and a sentence."""

import errno
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from gpumgr.common.errors import KubeletError, Refusal, RefusalCode
from gpumgr.common.rpc.server import DrainingServer
from gpumgr.common.rpc.wire import WireError
from gpumgr.common.unix_socket import UnixSocket

_STATUS: Final[dict[RefusalCode, Status]] = {
    "invalid_request": Status.INVALID_ARGUMENT,
    "no_fit": Status.RESOURCE_EXHAUSTED,
    "gpu_unhealthy": Status.FAILED_PRECONDITION,
    "conflict": Status.ABORTED,
    "unknown_device": Status.NOT_FOUND,
    "internal": Status.INTERNAL,
}

#: Called after each call with its name, its outcome (see `Call`) and its duration in seconds.
Observe = Callable[[str, str, float], None]


class Call(msgspec.Struct):
    """A running call. `outcome` is "ok", a RefusalCode, or "cancelled" until another outcome is set."""

    outcome: str = "cancelled"


@contextmanager
def answering(rpc: str, log: Any, observe: Observe = lambda *_: None) -> Iterator[Call]:
    """Reports the outcome of the block to `observe` and turns errors into GRPCErrors. The block sets the outcome at its end. A bug is
    logged and ends only this call."""
    started = time.perf_counter()
    call = Call()
    try:
        yield call
    except Refusal as refusal:
        call.outcome = refusal.code
        raise GRPCError(_STATUS[refusal.code], str(refusal)) from refusal
    except WireError as error:
        call.outcome = "invalid_request"
        raise GRPCError(Status.INVALID_ARGUMENT, f"gpumgr can't read this {rpc} request: {error}") from error
    except GRPCError:
        call.outcome = "invalid_request"
        raise
    except Exception as error:
        call.outcome = "internal"
        log.exception("call_failed", rpc=rpc)
        raise GRPCError(Status.INTERNAL, failed_inside(rpc, error)) from error
    finally:
        observe(rpc, call.outcome, time.perf_counter() - started)


def unary(rpc: str, answer: Callable[[bytes], Awaitable[bytes]], log: Any, observe: Observe = lambda *_: None) -> Handler:
    """A method in grpclib's form, with messages as bytes. See `answering`."""

    async def serve(stream: Any) -> None:
        with answering(rpc, log, observe) as call:
            reply = await answer(await receive(stream))
            call.outcome = "ok"
        await stream.send_message(reply)

    return Handler(serve, Cardinality.UNARY_UNARY, bytes, bytes)


def failed_inside(rpc: str, error: Exception) -> str:
    return f"gpumgr failed inside {rpc} ({type(error).__name__}: {error}); its log has the details"


async def receive(stream: Any) -> bytes:
    """The request of a call; empty without a message. Raises GRPCError for what grpclib can't decode: compressed messages, and frames
    shorter than their length field."""
    try:
        request: bytes | None = await stream.recv_message()
    except NotImplementedError as error:
        raise GRPCError(Status.UNIMPLEMENTED, "gpumgr accepts no compressed messages") from error
    except AssertionError as error:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request is shorter than the length in its frame") from error
    return request or b""


_REMEDIES: Final = {errno.ENAMETOOLONG: "; use a folder with a shorter path", errno.EEXIST: "; remove it"}


class UnixServer(DrainingServer):
    """Create it inside the event loop."""

    def __init__(self, path: Path, services: Collection[Any], end_streams: Callable[[], None] = lambda: None) -> None:
        super().__init__(services, end_streams=end_streams)
        self.path = path
        self._socket = UnixSocket(path)

    @property
    def in_place(self) -> bool:
        """Whether the socket file is still this server's."""
        return self._socket.in_place

    async def listen(self) -> None:
        """Binds the path and listens. A socket file at the path is replaced, but no other file. A further call makes a new socket file, and
        existing connections and calls continue.

        Raises KubeletError if the path is too long or can't be bound.
        """
        try:
            await self.listen_on(self._socket.bind(replace_served=True))
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "")
            raise KubeletError(f"can't listen on {self.path}: {error.strerror or error}{remedy}") from error

    def remove(self) -> None:
        """Removes the socket file unless a newer one has replaced it."""
        self._socket.remove()

    async def drain(self, grace_seconds: float) -> None:
        self.remove()
        await super().drain(grace_seconds)


class LinkState(msgspec.Struct, frozen=True, kw_only=True):
    """A registration with the kubelet. `registrations` counts the successful attempts. `error` is the present problem."""

    registered: bool = False
    registrations: int = 0
    error: str | None = None
