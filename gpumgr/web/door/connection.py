"""One client's connection: aiohttp's, which tells the doorman what goes on and says errors in JSON."""

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from gpumgr.web.answers import dress, failure
from gpumgr.web.door.access import Whence, whence
from gpumgr.web.door.doorman import Doorman, Visit

_log = structlog.get_logger(__name__)

#: A request's first line and each of its headers; and how many of these.
_MOST_LINE_BYTES: Final = 8190
_MOST_HEADERS: Final = 64
#: aiohttp's words for that.
_TOO_MANY_HEADERS: Final = "Too many headers received"
#: What is still sent of a body that was refused is read away for so long, or the client might never see why.
_LINGER_SECONDS: Final = 2.0
#: After an answer, to a client that said all before it: so soon the next request would be under way if there were one.
_LAST_ANSWER_SECONDS: Final = 0.05
#: The doorman's look ends idle connections, not aiohttp's own timer.
_NEVER_SECONDS: Final = 1e9


class Connection(web.RequestHandler):
    """`seen_from` tells from the socket's family and the peer's address where a client is."""

    def __init__(
        self, server: web.Server, doorman: Doorman, visit: Visit, seen_from: Callable[[int, Any], Whence] = whence
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=_NEVER_SECONDS,
            lingering_time=_LINGER_SECONDS,
            max_line_size=_MOST_LINE_BYTES,
            max_field_size=_MOST_LINE_BYTES,
            max_headers=_MOST_HEADERS,
            auto_decompress=False,
        )
        self._doorman, self._visit, self._seen_from = doorman, visit, seen_from
        self._clock = loop.time
        self._tls = False
        #: Something has come since the last answer.
        self._heard = False
        #: Ends the stream that is being sent.
        self._hang_up: Callable[[], None] | None = None
        self.whence: Whence = "beyond"
        self.certified = False
        #: Whoever asks now may read any page, and not just metrics and probes; the guard says so.
        self.trusted = False

    # -- what the guard and the stream tell --------------------------------------------------------------------------------

    def asked(self) -> None:
        """A whole request has come."""
        self._visit.became("answering", self._clock())

    def answered(self) -> None:
        self._hang_up, self._heard = None, False
        self._visit.became("idle", self._clock())
        if self._visit.half_closed:
            self._loop.call_later(_LAST_ANSWER_SECONDS, self._end)

    def streaming(self, hang_up: Callable[[], None]) -> None:
        """`hang_up` is called when the client is gone; it is if it said with its request that nothing more will come."""
        self._hang_up = hang_up
        self._visit.became("streaming", self._clock())
        if self._visit.half_closed:
            hang_up()

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._visit.ended:
            transport.abort()
            return
        line = _Line(transport)
        line.send_nothing_ahead()
        self._visit.line = line
        connected: socket.socket = transport.get_extra_info("socket")
        self.whence = self._seen_from(connected.family, transport.get_extra_info("peername"))
        self._tls = transport.get_extra_info("sslcontext") is not None
        self.certified = bool(transport.get_extra_info("peercert"))
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._visit.stage == "idle":
            self._visit.became("asking", self._clock())
        self._heard = True
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True: the client has said all and may wait for the answer, so the other direction stays open; the doorman ends it.

        Whoever reads a stream and says that is gone. TLS knows no such state.
        """
        self._visit.half_closed = True
        return self._heard and not self._tls and self._visit.stage != "streaming"

    def connection_lost(self, exc: BaseException | None) -> None:
        self._doorman.leave(self._visit)
        super().connection_lost(exc)
        if self._hang_up is not None:
            self._hang_up()

    def _end(self) -> None:
        """Unless it is answering the next of several requests that came at once."""
        if self._visit.stage == "idle" and self.transport is not None:
            self.transport.close()

    # -- errors outside of the pages ---------------------------------------------------------------------------------------

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What aiohttp answers when a request can't be read, or when sending a page failed. `message` quotes the request."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        if isinstance(exc, LineTooLong):
            return _last(431, f"the request's first line or a header has more than {_MOST_LINE_BYTES} bytes")
        if isinstance(exc, BadHttpMessage) and exc.message == _TOO_MANY_HEADERS:
            return _last(431, f"the request has more than {_MOST_HEADERS} headers")
        if status < 500:
            return _last(status, "this is no HTTP/1.1 request that can be understood")
        _log.error("page_failed", path=request.path, error=str(exc) or message, kind=type(exc).__name__)
        return _last(status, "the agent failed to answer; its log says why")

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """What aiohttp refuses before the guard is asked, it would say in plain text: an `Expect` that it doesn't know."""
        if isinstance(resp, web.HTTPException):
            known = resp.status != HTTPStatus.EXPECTATION_FAILED
            resp = _last(resp.status, resp.reason if known else "of Expect only 100-continue is understood")
        return await super().finish_response(request, resp, start_time)


class _Line:
    """Of a visit. Beneath TLS's transport is another, for which asyncio has no public name, and there most unread bytes lie."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        beneath = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
        self._layers = (transport, beneath) if isinstance(beneath, asyncio.Transport) else (transport,)

    def send_nothing_ahead(self) -> None:
        """The next answer waits until the client has taken this one (with TLS the one before), however many it asked for at once."""
        for layer in self._layers:
            layer.set_write_buffer_limits(high=1)  # 0 makes TLS's wait for more to take than there is

    def get_write_buffer_size(self) -> int:
        return sum(layer.get_write_buffer_size() for layer in self._layers)

    def abort(self) -> None:
        self._transport.abort()


def _last(status: int, sentence: str) -> web.Response:
    """Where the next request would begin is not known, so none is taken."""
    answer = failure(status, sentence)
    dress(answer)
    answer.force_close()
    return answer
