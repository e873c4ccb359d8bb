"""Accepts connections on listening sockets and brings each, past the doorman, to its protocol; with TLS after a handshake.

asyncio's own servers tell a protocol of a connection only after its handshake: whoever never ends one would be counted by nobody.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Final

import structlog

from gpumgr.web.door.doorman import Doorman, Visit

_log = structlog.get_logger(__name__)

BACKLOG: Final = 128
#: Of one listener in one turn of the loop.
_ACCEPTED_AT_ONCE: Final = 32
#: TLS's own goodbye.
_GOODBYE_SECONDS: Final = 2.0
#: Out of file descriptors or memory: the pause until the next try.
_PAUSE_SECONDS: Final = 1.0
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: What came and went before it could be accepted; see accept(2).
_GONE: Final = frozenset({errno.EAGAIN, errno.EINTR, errno.ECONNABORTED, errno.EPROTO})

MakeProtocol = Callable[[Visit, Doorman], asyncio.Protocol]
#: A client's address; None: it is on this host.
Peer = Callable[[socket.socket], str | None]
#: The TLS context for the next connection; None: plain.
Security = Callable[[], ssl.SSLContext | None]


class Reception:
    """`handshake_seconds` bounds the TLS handshake. Must be used inside one running event loop."""

    def __init__(self, make_protocol: MakeProtocol, *, peer: Peer, handshake_seconds: float) -> None:
        self._make_protocol, self._peer, self._handshake_seconds = make_protocol, peer, handshake_seconds
        self._listeners: dict[socket.socket, asyncio.TimerHandle | None] = {}
        self._opening: set[asyncio.Task[None]] = set()

    @property
    def listeners(self) -> tuple[socket.socket, ...]:
        return tuple(self._listeners)

    def open(self, listener: socket.socket, security: Security, doorman: Doorman) -> None:
        """Takes the bound, listening socket over and accepts from now on whom its doorman admits."""
        listener.setblocking(False)
        self._listeners[listener] = None
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, security, doorman)

    def close(self) -> None:
        """Nobody comes in any more; who is inside stays."""
        loop = asyncio.get_running_loop()
        for listener, pause in self._listeners.items():
            if pause is not None:
                pause.cancel()
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def _accept(self, listener: socket.socket, security: Security, doorman: Doorman) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connected, _ = listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(listener, security, doorman, error)
                elif error.errno not in _GONE:
                    _log.warning("accept_failed", error=error.strerror)
                return
            self._receive(connected, security, doorman)

    def _pause(self, listener: socket.socket, security: Security, doorman: Doorman, error: OSError) -> None:
        """The listener stays readable, so the loop would spin."""
        _log.error("accept_paused", error=error.strerror, seconds=_PAUSE_SECONDS)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._listeners[listener] = loop.call_later(_PAUSE_SECONDS, self.open, listener, security, doorman)

    def _receive(self, connected: socket.socket, security: Security, doorman: Doorman) -> None:
        connected.setblocking(False)
        opening, now = _Opening(connected), asyncio.get_running_loop().time()
        visit = Visit(opening, now, peer=self._peer(connected))
        if not doorman.admit(visit, now):
            connected.close()
            return
        opening.task = asyncio.create_task(self._open(visit, opening, security(), doorman), name="web_connection")
        self._opening.add(opening.task)
        opening.task.add_done_callback(self._opening.discard)

    async def _open(self, visit: Visit, opening: "_Opening", context: ssl.SSLContext | None, doorman: Doorman) -> None:
        opening.begun = True
        bounds = {"ssl_handshake_timeout": self._handshake_seconds, "ssl_shutdown_timeout": _GOODBYE_SECONDS} if context else {}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(visit, doorman), opening.connected, ssl=context, **bounds
            )
        except OSError:  # no handshake came about, or the peer is gone
            doorman.leave(visit)


class _Opening:
    """The line of a visit until its transport is there."""

    def __init__(self, connected: socket.socket) -> None:
        self.connected = connected
        self.task: asyncio.Task[None] | None = None
        self.begun = False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if not self.begun:
            self.connected.close()
