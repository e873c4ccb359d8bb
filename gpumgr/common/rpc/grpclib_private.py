"""The only module that uses private parts of grpclib. tests/component/common/rpc/test_grpclib_private.py fails when grpclib changes one of
them."""

from asyncio import AbstractServer, Transport
from collections.abc import Callable
from typing import Any, TypeAlias

from grpclib.client import Channel
from grpclib.const import Handler as Method
from grpclib.protocol import Connection, EventsProcessor, H2Protocol
from grpclib.server import Server, Stream
from h2.connection import H2Connection
from h2.events import RequestReceived

ServerStream: TypeAlias = Stream[Any, Any]


class OpenServer(Server):
    """grpclib's server, with public access to what gpumgr needs of its private parts."""

    @property
    def methods(self) -> dict[str, Method]:
        """Path -> method."""
        return self._mapping

    @methods.setter
    def methods(self, methods: dict[str, Method]) -> None:
        self._mapping = methods

    @property
    def listener(self) -> AbstractServer | None:
        """None before `start`. Set it to None to call `start` again."""
        return self._server

    @listener.setter
    def listener(self, listener: AbstractServer | None) -> None:
        self._server = listener

    def connection(self, made: H2Protocol) -> H2Protocol:
        """Returns the protocol that replaces grpclib's `made`."""
        return made

    def _protocol_factory(self) -> H2Protocol:
        return self.connection(super()._protocol_factory())


class OpenChannel(Channel):
    """grpclib's client, with public access to what gpumgr needs of its private parts."""

    @property
    def authority(self) -> str:
        """The header `:authority`, with the value that the kubelet also sends. grpclib would send "127.0.0.1:50051" for a unix socket."""
        return "localhost"

    def connection(self, made: H2Protocol) -> H2Protocol:
        """Returns the protocol that replaces grpclib's `made`."""
        return made

    def _protocol_factory(self) -> H2Protocol:
        return self.connection(super()._protocol_factory())

    def _get_authority(self, host: str, port: int) -> str:  # noqa: ARG002 (grpclib's signature)
        return self.authority


def transport_of(stream: ServerStream) -> Transport:
    return stream.peer._transport


def h2_of(connection: Connection) -> H2Connection:
    return connection._connection


def replace_flush(connection: Connection, flush: Callable[[], None]) -> Callable[[], None]:
    """Replaces the function that sends the output of h2. Returns grpclib's function."""
    original = connection.flush
    connection.flush = flush  # type: ignore[method-assign]
    return original


def replace_request_received(
    processor: EventsProcessor, received: Callable[[RequestReceived], None]
) -> Callable[[RequestReceived], None]:
    """Makes `received` handle each new request. Returns grpclib's function, which starts the call."""
    original = processor.process_request_received
    processor.processors[RequestReceived] = received
    return original
