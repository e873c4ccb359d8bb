"""One client's connection: aiohttp's request handler with a connection limit, a TLS handshake and errors in JSON."""

import asyncio
import asyncio.sslproto
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from gpumgr.web.access import Origin
from gpumgr.web.connection_limit import ConnectionLimit, Slot
from gpumgr.web.responses import add_common_headers, failure

_log = structlog.get_logger(__name__)

# asyncio allocates this buffer for each connection before the handshake, so before it is known who the client is. With its default of
# 256 KiB, 4096 connections take 1 GiB.
asyncio.sslproto.SSLProtocol.max_size = 32 << 10

#: The limits of a request's first line and of each header; and the number of headers.
_MAX_LINE_BYTES: Final = 8190
_MAX_HEADERS: Final = 64
#: aiohttp's message for more headers.
_TOO_MANY_HEADERS: Final = "Too many headers received"
#: The rest of a refused body is read for so long; a client that still sends might never read the response otherwise.
_LINGER_SECONDS: Final = 2.0
#: After a response to a half-closed client: a further request that has arrived already is in progress by then.
_HALF_CLOSED_SECONDS: Final = 0.05
_TLS_SHUTDOWN_SECONDS: Final = 2.0
#: Idle connections are cut by the connection limit, not by aiohttp's timer.
_NEVER_SECONDS: Final = 1e9


@dataclass(slots=True, kw_only=True)
class Listener:
    """What the connections of one listening address share.

    `tls` returns the context for the next connection; None: plain HTTP. `origin_of` maps the socket's family and the peer's address
    to the origin. `disconnects` counts clients that closed the connection before the response was complete.
    """

    limit: ConnectionLimit
    tls: Callable[[], Awaitable[ssl.SSLContext]] | None
    origin_of: Callable[[int, Any], Origin]
    disconnects: int = 0
    handshakes: set[asyncio.Task[None]] = field(default_factory=set)


class Connection(web.RequestHandler):
    """A protocol for asyncio's servers. It takes its slot when the connection is accepted, before the TLS handshake."""

    def __init__(self, server: web.Server, listener: Listener) -> None:
        self._event_loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=self._event_loop,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=_NEVER_SECONDS,
            lingering_time=_LINGER_SECONDS,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
            auto_decompress=False,
        )
        self._listener = listener
        self._slot: Slot | None = None
        #: Data that arrives between the end of the TLS handshake and the call of aiohttp's connection_made.
        self._early = b""
        self._tls = self._http = False
        #: Data has arrived since the last response.
        self._data_since_response = False
        #: Ends the stream that is being sent.
        self._end_stream: Callable[[], None] | None = None
        self.origin: Origin = "remote"
        self.certified = False
        #: The client of the current request may read any page, not only metrics and probes; the access middleware sets it.
        self.trusted = False

    # -- calls of the middleware and of the stream -------------------------------------------------------------------------

    def request_received(self) -> None:
        """A whole request has arrived."""
        self._enter("responding")

    def response_sent(self) -> None:
        self._end_stream, self._data_since_response = None, False
        self._enter("idle")
        if self._slot is not None and self._slot.half_closed:
            self._event_loop.call_later(_HALF_CLOSED_SECONDS, self._close_if_idle)

    def stream_started(self, end_stream: Callable[[], None]) -> None:
        """`end_stream` is called when the client has gone, at once if it shut down its side with the request."""
        self._end_stream = end_stream
        self._enter("streaming")
        if self._slot is None or self._slot.half_closed:
            end_stream()

    def _enter(self, stage: Any) -> None:
        if self._slot is not None:
            self._slot.enter(stage, self._event_loop.time())

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        connected: socket.socket = transport.get_extra_info("socket")
        self.origin = self._listener.origin_of(connected.family, transport.get_extra_info("peername"))
        slot = Slot(transport, self._event_loop.time(), peer=self._remote_address(transport))
        if not self._listener.limit.acquire(slot, self._event_loop.time()):
            transport.abort()
            return
        self._slot = slot
        tls = self._listener.tls
        if tls is None:
            self._serve(transport)
            return
        self._tls = True
        handshake = self._event_loop.create_task(self._handshake(transport, tls), name="web_tls_handshake")
        self._listener.handshakes.add(handshake)
        handshake.add_done_callback(self._listener.handshakes.discard)

    def _remote_address(self, transport: asyncio.Transport) -> str | None:
        """None: the client is on this host. The kubelet's probes have the node's own address."""
        here, peer = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        return None if self.origin != "remote" or not peer or (here and here[0] == peer[0]) else str(peer[0])

    async def _handshake(self, transport: asyncio.Transport, tls: Callable[[], Awaitable[ssl.SSLContext]]) -> None:
        # Until the handshake takes over nothing is read. A pause in connection_made has no effect in Python 3.11.2.
        transport.pause_reading()
        context = await tls()
        if transport.is_closing():  # it was cut while the files were read; a handshake would not notice that
            return
        try:
            secured = await self._event_loop.start_tls(
                transport, self, context, server_side=True, ssl_shutdown_timeout=_TLS_SHUTDOWN_SECONDS
            )
        except OSError:  # ssl.SSLError is one
            secured = None
        if secured is None:  # also if the connection was cut during the handshake
            self.connection_lost(None)
            return
        assert self._slot is not None
        self._slot.transports.append(secured)
        self.certified = bool(secured.get_extra_info("peercert"))
        self._serve(secured)

    def _serve(self, transport: asyncio.Transport) -> None:
        assert self._slot is not None
        for layer in self._slot.transports:
            # The next response waits until the client has read this one, however many requests it pipelines.
            layer.set_write_buffer_limits(high=1)  # with 0 TLS waits for more than there is
        self._http = True
        super().connection_made(transport)
        if self._early:
            self.data_received(self._early)
            self._early = b""

    def data_received(self, data: bytes) -> None:
        if not self._http:
            self._early += data
            return
        if self._slot is not None and self._slot.stage == "idle":
            self._enter("receiving")
        self._data_since_response = True
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the other direction open for a client that has sent its request; the connection limit bounds it.

        TLS has no half-closed state, and a stream's client that shuts down its side has gone.
        """
        if self._slot is None:
            return False
        self._slot.half_closed = True
        return self._data_since_response and not self._tls and self._slot.stage != "streaming"

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._slot is not None:
            self._listener.limit.release(self._slot)
        super().connection_lost(exc)
        if self._end_stream is not None:
            self._end_stream()

    def _close_if_idle(self) -> None:
        """Unless the next of several pipelined requests is in progress."""
        if self._slot is not None and self._slot.stage == "idle" and self.transport is not None:
            self.transport.close()

    # -- errors outside of the pages ---------------------------------------------------------------------------------------

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The response to a request that can't be parsed. `message` quotes the request.

        Raises ConnectionError, which ends the connection, if the client has gone or the response has begun.
        """
        if isinstance(exc, ConnectionError):
            self._listener.disconnects += 1
            _log.debug("client_disconnected", path=request.path)
            raise exc
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun already")
        if isinstance(exc, LineTooLong):
            return _final(431, f"the request's first line or a header has more than {_MAX_LINE_BYTES} bytes")
        if isinstance(exc, BadHttpMessage) and exc.message == _TOO_MANY_HEADERS:
            return _final(431, f"the request has more than {_MAX_HEADERS} headers")
        if status < 500:
            return _final(status, "this is not a valid HTTP/1.1 request")
        _log.error("page_failed", path=request.path, error=str(exc) or message, kind=type(exc).__name__)
        return _final(status, "the agent failed to respond; see its log")

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Replaces the plain text with which aiohttp refuses an unknown `Expect` before the middleware is called."""
        if isinstance(resp, web.HTTPException):
            known = resp.status != HTTPStatus.EXPECTATION_FAILED
            resp = _final(resp.status, resp.reason if known else "the only supported Expect is 100-continue")
        return await super().finish_response(request, resp, start_time)


def _final(status: int, sentence: str) -> web.Response:
    """A response after which the connection is closed: where the next request begins is not known."""
    response = failure(status, sentence)
    add_common_headers(response)
    response.force_close()
    return response
