"""A gRPC server with an orderly end. grpclib's own `close` sends nothing to connected clients and continues to serve them."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from socket import socket
from typing import Any, Final, cast

from grpclib.config import Configuration
from grpclib.const import Cardinality
from grpclib.const import Handler as Method
from grpclib.metadata import decode_metadata
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import RequestReceived
from h2.exceptions import ProtocolError

from gpumgr.common.aio import wait_at_most
from gpumgr.common.rpc.channel import PeerConnection, WireCodec
from gpumgr.common.rpc.grpclib_private import OpenServer, h2_of, replace_flush, replace_request_received

#: At the end: how long clients may take to close their connections, and then to read what was sent.
_CLOSE_SECONDS: Final = 0.5
_FLUSH_SECONDS: Final = 2.0
#: How long after a call the second call of a pair may still follow (see `wait_idle`).
_PAIR_SECONDS: Final = 0.05
_PSEUDO_HEADERS: Final = (":method", ":scheme", ":path")


class DrainingServer(OpenServer):
    """At its end running calls finish, streams end, and clients get a GOAWAY."""

    def __init__(
        self,
        services: Collection[Any],
        *,
        end_streams: Callable[[], None] = lambda: None,
        config: Configuration | None = None,
        flush_seconds: float = _FLUSH_SECONDS,
    ) -> None:
        """Create it inside a running event loop. Each of `services` has grpclib's method `__mapping__`. `end_streams` ends their streaming
        calls. At the end, a client that does not read is disconnected after `flush_seconds`."""
        super().__init__(services, codec=WireCodec(), config=config)
        self.end_streams, self._flush_seconds = end_streams, flush_seconds
        self.connections: set[ServedConnection] = set()
        self._none_connected = asyncio.Event()
        self._none_connected.set()
        self._unary_calls: set[asyncio.Task[Any]] = set()
        self._stream_calls: set[asyncio.Task[Any]] = set()
        self._last_unary = float("-inf")
        self.draining = False
        self.methods = {path: self._counted(method) for path, method in self.methods.items()}

    @property
    def open_streams(self) -> int:
        # An ended call stays in the set until the event loop's next step. If ended calls counted, a loop that awaits `wait_streams` while
        # streams are open would never let the event loop take this step.
        return sum(not call.done() for call in self._stream_calls)

    @property
    def idle(self) -> bool:
        """Whether no unary call runs, and none has ended within the last _PAIR_SECONDS."""
        return not self._unary_calls and self._last_unary + _PAIR_SECONDS <= asyncio.get_running_loop().time()

    async def listen_on(self, sock: socket) -> None:
        """Replaces the listening socket by the bound `sock`. Existing connections and calls continue."""
        earlier, self.listener = self.listener, None
        try:
            await self.start(sock=sock)
        except BaseException:
            self.listener = earlier
            raise
        if earlier is not None:
            earlier.close()

    async def wait_idle(self, timeout_seconds: float) -> None:
        """Waits until the server is `idle`. The kubelet calls GetPreferredAllocation, and about a millisecond later Allocate: a server that
        ends between these calls would fail the second one."""
        await asyncio.sleep(0)  # calls that have just arrived begin in this step of the event loop
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while not self.idle and (now := loop.time()) < deadline:
            if self._unary_calls:
                await asyncio.wait(self._unary_calls, timeout=deadline - now)
            else:
                await asyncio.sleep(min(max(0.0, self._last_unary + _PAIR_SECONDS - now), deadline - now))

    async def wait_streams(self, timeout_seconds: float) -> None:
        await _settle(self._stream_calls, timeout_seconds)

    async def wait_disconnected(self, timeout_seconds: float) -> None:
        await wait_at_most(self._none_connected, timeout_seconds)

    async def drain(self, grace_seconds: float) -> None:
        """Stops listening, lets unary calls finish, ends streams, sends GOAWAY and disconnects. Cancels what still runs after
        `grace_seconds`.

        Unary calls must end before streams: when ListAndWatch ends, the kubelet closes the connection, and with it a running Allocate.
        """
        if self.listener is None or self.draining:
            return
        self.draining = True
        self.listener.close()
        deadline = asyncio.get_running_loop().time() + grace_seconds
        await self.wait_idle(grace_seconds)
        self.end_streams()
        await _settle(self._stream_calls, max(0.1, deadline - asyncio.get_running_loop().time()))
        await self.close_now()

    async def close_now(self) -> None:
        """Ends every connection and cancels running calls. Clients close their connections once they have read everything.

        A client that does not close its connection is disconnected after `_CLOSE_SECONDS`. If the client does not read either, the
        connection stays open because of unsent data, and is aborted `flush_seconds` later.
        """
        self.draining = True
        if self.listener is None:
            return
        for connection in list(self.connections):
            connection.end()
        self.close()
        await _settle(self._unary_calls | self._stream_calls, self._flush_seconds)
        await wait_at_most(self._none_connected, _CLOSE_SECONDS)
        for connection in self.connections:
            connection.transport.close()
        await wait_at_most(self._none_connected, self._flush_seconds)
        for connection in self.connections:
            connection.transport.abort()
        await self._none_connected.wait()

    def connected(self, connection: "ServedConnection") -> None:
        self.connections.add(connection)
        self._none_connected.clear()

    def disconnected(self, connection: "ServedConnection") -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._none_connected.set()

    def connection(self, made: H2Protocol) -> H2Protocol:
        return ServedConnection(self, made, made.h2_config)

    def _counted(self, method: Method) -> Method:
        """Wraps a method so that the task of each running call is recorded."""
        streaming = method.cardinality is Cardinality.UNARY_STREAM
        calls = self._stream_calls if streaming else self._unary_calls

        async def serve(stream: Any) -> None:
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            calls.add(task)
            task.add_done_callback(calls.discard if streaming else self._unary_ended)
            await method.func(stream)

        return method._replace(func=serve)

    def _unary_ended(self, call: "asyncio.Task[Any]") -> None:
        self._unary_calls.discard(call)
        self._last_unary = asyncio.get_running_loop().time()


async def _settle(calls: set[asyncio.Task[Any]], timeout_seconds: float) -> None:
    """Waits until all `calls` have ended, also calls that are added in the meantime."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    while (running := {call for call in calls if not call.done()}) and (left := deadline - loop.time()) > 0:
        await asyncio.wait(running, timeout=left)


class ServedConnection(PeerConnection):
    """Sends all output of one step of the event loop in one write. grpclib would write headers, message and trailers of each answer
    with a system call of its own."""

    def __init__(self, server: DrainingServer, made: H2Protocol, h2_config: H2Configuration) -> None:
        super().__init__(made.handler, made.config, h2_config)
        self.server = server
        self._flush_is_due = False
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", transport)
        self._flush_now = replace_flush(self.connection, self._flush_soon)
        self._accept = replace_request_received(self.processor, self._request_received)
        self.server.connected(self)
        if self.server.draining:
            self.end()

    def data_received(self, data: bytes) -> None:
        if not self._ended:
            super().data_received(data)

    def _request_received(self, event: RequestReceived) -> None:
        """Resets only the stream of a malformed request (RFC 9113, section 8.1.1)."""
        if _is_well_formed(event.headers):
            self._accept(event)
            return
        with suppress(ProtocolError):  # the client has reset the stream itself
            h2_of(self.connection).reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.server.disconnected(self)
        super().connection_lost(exc)

    def end(self) -> None:
        """Sends GOAWAY after the data that the transport still holds. If a call runs, it is cancelled and the connection closed.

        Otherwise only the sending side is closed: a client that writes to a closed socket gets an error, and may drop the last answers.
        """
        if self._ended or self.transport.is_closing():
            return
        self._ended = True
        with suppress(ProtocolError):  # nothing more can be sent on this connection
            h2_of(self.connection).close_connection(ErrorCodes.NO_ERROR)
            self._flush_now()
        if self.processor.streams:
            self.processor.close("the server is draining")
        else:
            self.transport.write_eof()

    def _flush_soon(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if not self.connection.is_closing():
            self._flush_now()


def _is_well_formed(headers: Any) -> bool:
    """Whether each pseudo-header is there once (RFC 9113, section 8.3.1), and all metadata can be read."""
    names = [name for name, _ in headers]
    try:
        decode_metadata(headers)
    except ValueError:  # a header with the suffix -bin that is not base64
        return False
    return all(names.count(each) == 1 for each in _PSEUDO_HEADERS)
