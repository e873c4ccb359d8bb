"""The server's side: grpclib's server, made to tell its peers when it goes.

grpclib's own `close` sends nothing to connected clients (no GOAWAY, no trailers), keeps serving them, and from Python 3.12 on
`wait_closed` then waits for ever. It answers unknown methods without a content type, which grpc-go reports as UNKNOWN.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Any, cast

from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol, Stream
from grpclib.server import Handler, Server
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from gpumgr.rpc.channel import WireCodec

#: How long the transports may take to flush once everything is said.
_FLUSH_SECONDS = 2.0
#: A call that ended so recently may be the first of two.
_PAIR_SECONDS = 0.05


class DrainingServer(Server):
    """A gRPC server with an orderly end: running calls finish, streams end cleanly, clients get a GOAWAY."""

    def __init__(self, services: Collection[Any]) -> None:
        """`services` have grpclib's `__mapping__`. Must be called inside a running event loop."""
        super().__init__(services, codec=WireCodec())
        self._mapping = cast("dict[str, Method]", _Methods(self._mapping))
        self._connections: set[_Connection] = set()
        self._unary_calls: set[asyncio.Task[None]] = set()
        self._stream_calls: set[asyncio.Task[None]] = set()
        self._last_unary = float("-inf")
        self._draining = False

    @property
    def open_streams(self) -> int:
        """Server-streaming calls that clients hold open now."""
        return len(self._stream_calls)

    def _protocol_factory(self) -> H2Protocol:
        self.__gc_step__()
        handler = _Calls(self)
        self._handlers.add(handler)
        return _Connection(self, handler)

    async def quiet(self, timeout_seconds: float) -> None:
        """Waits until no unary call runs or has just ended, at most `timeout_seconds`.

        The kubelet's calls for one container come in pairs: between a preference and its Allocate lies about a millisecond.
        """
        deadline = self._loop.time() + timeout_seconds
        while (now := self._loop.time()) < deadline:
            if self._unary_calls:
                await asyncio.wait(self._unary_calls, timeout=deadline - now)
            elif (rest := self._last_unary + _PAIR_SECONDS - now) > 0:
                await asyncio.sleep(min(rest, deadline - now))
            else:
                return

    def _unary_ended(self, call: "asyncio.Task[None]") -> None:
        self._unary_calls.discard(call)
        self._last_unary = self._loop.time()

    async def drain(self, grace_seconds: float, end_streams: Callable[[], None]) -> None:
        """Stops listening, lets unary calls finish, ends streams through `end_streams`, says goodbye and disconnects.

        Unary calls go first: the kubelet answers the end of ListAndWatch by closing the whole connection, and with it any
        Allocate that still runs there. What has not ended after `grace_seconds` is cancelled.
        """
        if self._server is None or self._draining:
            return
        self._draining = True
        self._server.close()
        deadline = self._loop.time() + grace_seconds
        await self.quiet(grace_seconds)
        end_streams()
        await _settle(self._stream_calls, max(0.1, deadline - self._loop.time()))
        await self.cut()

    async def cut(self) -> None:
        """Ends every connection now; calls that still run are cancelled."""
        self._draining = True
        if self._server is None or self._server_closed_fut is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.goodbye()
        calls = self._unary_calls | self._stream_calls
        for call in calls:
            call.cancel()
        if not self._server_closed_fut.done():
            self._server_closed_fut.set_result(None)
        await _settle(calls, _FLUSH_SECONDS)
        async with asyncio.timeout(_FLUSH_SECONDS):
            await self._server.wait_closed()


async def _settle(calls: set[asyncio.Task[None]], timeout_seconds: float) -> None:
    """Waits until `calls` is empty, calls that come meanwhile included."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    while (running := {call for call in calls if not call.done()}) and (left := deadline - loop.time()) > 0:
        await asyncio.wait(running, timeout=left)


class _Connection(H2Protocol):
    """One client's connection, known to its server while it lives."""

    def __init__(self, server: DrainingServer, handler: Handler) -> None:
        super().__init__(handler, server._config, server._h2_config)
        self._of = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._of._connections.add(self)
        if self._of._draining:
            self.goodbye()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._of._connections.discard(self)
        super().connection_lost(exc)

    def goodbye(self) -> None:
        """GOAWAY, then close; the transport flushes what it holds first."""
        if self.connection.is_closing():
            return
        try:
            self.connection._connection.close_connection(ErrorCodes.NO_ERROR)
            self.connection.flush()
        except ProtocolError:  # the connection is past saying anything
            pass
        self.processor.close("the server is draining")


class _Calls(Handler):
    """Starts the calls of one connection and enters them in the server's books."""

    def __init__(self, server: DrainingServer) -> None:
        super().__init__(server._mapping, server._codec, server._status_details_codec, server.__dispatch__)
        self._of = server

    def accept(self, stream: Stream, headers: list[tuple[str, str]], release_stream: Callable[[], Any]) -> None:
        super().accept(stream, headers, release_stream)
        method = self.mapping.get(dict(headers).get(":path", ""))
        streaming = method is not None and method.cardinality is Cardinality.UNARY_STREAM
        calls = self._of._stream_calls if streaming else self._of._unary_calls
        task = self._tasks[stream]
        calls.add(task)
        task.add_done_callback(calls.discard if streaming else self._of._unary_ended)


class _Methods:
    """grpclib's table of methods, where an unknown one answers UNIMPLEMENTED in a form that grpc-go understands."""

    def __init__(self, methods: dict[str, Method]) -> None:
        self._methods = methods

    def get(self, path: str) -> Method:
        return self._methods.get(path) or Method(_unimplemented(path), Cardinality.STREAM_STREAM, bytes, bytes)


def _unimplemented(path: str) -> Callable[[Any], Any]:
    async def refuse(_stream: object) -> None:
        raise GRPCError(Status.UNIMPLEMENTED, f"unknown method {path}")

    return refuse
