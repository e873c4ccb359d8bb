"""Serves unary calls: reads the request as bytes, and answers each failure with a gRPC status and a sentence."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from gpumgr.common.errors import Refusal, RefusalCode
from gpumgr.common.rpc.wire import WireError

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


@dataclass(slots=True)
class Call:
    """A running call. `outcome` is a bounded label: "ok", a RefusalCode, or "cancelled" until another outcome is set."""

    outcome: str = "cancelled"


@contextmanager
def answering(rpc: str, log: Any, observe: Observe = lambda *_: None) -> Iterator[Call]:
    """Encloses the work of a call; the block sets the outcome at its end. Errors become GRPCErrors. A bug is logged to `log` and ends only
    this call."""
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
    except Exception as error:  # it is logged only here
        call.outcome = "internal"
        log.exception("call_failed", rpc=rpc)
        raise GRPCError(Status.INTERNAL, failed_inside(rpc, error)) from error
    finally:
        observe(rpc, call.outcome, time.perf_counter() - started)


def unary(rpc: str, answer: Callable[[bytes], Awaitable[bytes]], log: Any, observe: Observe = lambda *_: None) -> Handler:
    """A method in the form that grpclib requires. Messages stay bytes. `log` and `observe`: see `answering`."""

    async def serve(stream: Any) -> None:
        with answering(rpc, log, observe) as call:
            reply = await answer(await receive(stream))
            call.outcome = "ok"
        await stream.send_message(reply)

    return Handler(serve, Cardinality.UNARY_UNARY, bytes, bytes)


def failed_inside(rpc: str, error: Exception) -> str:
    """The sentence that answers a call that failed by a bug."""
    return f"gpumgr failed inside {rpc} ({type(error).__name__}: {error}); its log has the details"


async def receive(stream: Any) -> bytes:
    """The request of a call; empty if the client closes its side without a message.

    Raises GRPCError for requests that grpclib can't decode: compressed messages, and frames shorter than their length field.
    """
    try:
        request: bytes | None = await stream.recv_message()
    except NotImplementedError as error:
        raise GRPCError(Status.UNIMPLEMENTED, "gpumgr accepts no compressed messages") from error
    except AssertionError as error:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request is shorter than the length in its frame") from error
    return request or b""
