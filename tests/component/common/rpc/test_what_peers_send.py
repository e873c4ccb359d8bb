"""Peers that send what HTTP/2 does not know or does not allow: no traceback is logged, and all others are served."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import structlog
from grpclib.const import Handler
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, RequestReceived, StreamEnded, StreamReset

from gpumgr.common.rpc.channel import UnixChannel
from gpumgr.common.rpc.server import DrainingServer
from gpumgr.common.rpc.unix_server import unary

ROUTE = "/test.Echo/Say"
REQUEST = {
    ":method": "POST",
    ":scheme": "http",
    ":path": ROUTE,
    ":authority": "localhost",
    "te": "trailers",
    "content-type": "application/grpc+proto",
}
MESSAGE = b"\0\0\0\0\2hi"
RESET = (ErrorCodes.PROTOCOL_ERROR, None)
ANSWERED = (None, MESSAGE)


def frame(kind: int, payload: bytes, *, flags: int = 0, stream: int = 0) -> bytes:
    """Any HTTP/2 frame (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


#: Frames that a server or a client must ignore: of no known type, PRIORITY_UPDATE (RFC 9218), ALTSVC (RFC 7838).
IGNORED = (frame(0xBE, b"what"), frame(0xBE, b"", flags=0xFF, stream=77), frame(0x10, bytes(5)), frame(0xA, b"\0\3a.bh2"))


class Echo:
    def __mapping__(self) -> Mapping[str, Handler]:
        async def say(request: bytes) -> bytes:
            return request

        return {ROUTE: unary("Say", say, structlog.get_logger())}


@pytest.fixture
async def place(folder: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Path]:
    """A server's socket. Nothing is logged with a traceback."""
    caplog.set_level(logging.INFO)
    server = DrainingServer([Echo()])
    await server.start(path=str(folder / "echo.sock"))
    yield folder / "echo.sock"
    async with UnixChannel(folder / "echo.sock") as other:
        assert await other.unary(ROUTE, b"hi", bytes) == b"hi"
    await server.drain(1.0)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.h2 = H2Connection(H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False))
        self.h2.initiate_connection()
        self._events: list[Event] = []

    def send(self, raw: bytes = b"") -> None:
        self._writer.write(self.h2.data_to_send() + raw)

    def ask(self, headers: list[tuple[str, str]], *, end: bool = True) -> int:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, headers)
        self.h2.send_data(stream, MESSAGE, end_stream=end)
        return stream

    async def outcome(self, stream: int) -> tuple[int | None, bytes | None]:
        """The error code of the stream's reset, or the answer."""
        while True:
            data = b""
            for event in self._events:
                match event:
                    case DataReceived(stream_id=number, data=more) if number == stream:
                        data += more or b""
                    case StreamReset(stream_id=number, error_code=code) if number == stream:
                        return code, None
                    case StreamEnded(stream_id=number) if number == stream:
                        return None, data
            received = await self._reader.read(1 << 16)
            assert received, "the connection goes on"
            self._events += self.h2.receive_data(received)

    async def closed(self) -> None:
        with suppress(ConnectionResetError):
            while await self._reader.read(1 << 16):
                pass


@asynccontextmanager
async def connected(place: Path) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_unix_connection(place)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def changed(**values: str | None) -> list[tuple[str, str]]:
    """The headers of a request with other values for `method`, ...; None: without it."""
    return [
        (name, value)
        for name, value in (REQUEST | {f":{key}": each for key, each in values.items()}).items()
        if value is not None
    ]


@pytest.mark.parametrize("ignored", IGNORED, ids=lambda ignored: f"type {ignored[3]:#x}")
async def test_frames_of_unknown_types_are_ignored(place: Path, ignored: bytes) -> None:
    async with connected(place) as client:
        client.send(ignored)
        stream = client.ask(changed())
        client.send(ignored)
        assert await client.outcome(stream) == ANSWERED


@pytest.mark.parametrize(
    "headers",
    [
        changed(method=None),
        changed(scheme=None),
        changed(path=None),
        changed(method=None, scheme=None, path=None),
        [*changed(), (":path", ROUTE)],
        [*changed(), ("note-bin", "no base64 at all")],
    ],
)
@pytest.mark.parametrize("then", ["end", "more", "reset"])
async def test_a_malformed_request_is_an_error_of_its_stream(place: Path, headers: list[tuple[str, str]], then: str) -> None:
    async with connected(place) as client:
        malformed = client.ask(headers, end=then == "end")
        if then == "reset":
            client.h2.reset_stream(malformed)
        following = client.ask(changed())
        client.send()
        if then != "reset":
            assert await client.outcome(malformed) == RESET
        assert await client.outcome(following) == ANSWERED


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 40], ids=["HTTP/1.1", "bytes"])
async def test_garbage_ends_its_own_connection(place: Path, garbage: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(place)
    writer.write(garbage)
    await Client(reader, writer).closed()
    writer.close()


async def test_what_h2_cannot_read_ends_the_connection(place: Path) -> None:
    for headers in (changed(path="/\u00e9"), [*changed(), ("\u00fc", "x")]):
        async with connected(place) as client:
            client.ask(headers)
            client.send()
            await client.closed()


@pytest.mark.parametrize("seed", range(8))
async def test_random_frames(place: Path, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(40):
        async with connected(place) as client:
            for _ in range(source.randrange(1, 6)):
                if source.random() < 0.3:
                    pairs = source.sample(list(REQUEST.items()), source.randrange(1, len(REQUEST)))
                    client.h2.send_headers(client.h2.get_next_available_stream_id(), pairs, end_stream=source.random() < 0.5)
                client.send(
                    frame(source.randrange(16), source.randbytes(source.choice((0, 4, 5, 8, 40))), stream=source.randrange(4))
                )
            if source.random() < 0.5:
                await asyncio.sleep(0)


async def test_a_client_ignores_unknown_frames_too(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        h2 = H2Connection(H2Configuration(client_side=False))
        h2.initiate_connection()
        events: list[Event] = []
        while not any(isinstance(each, StreamEnded) for each in events):
            events += h2.receive_data(await reader.read(1 << 16))
        stream = next(each.stream_id for each in events if isinstance(each, RequestReceived))
        assert stream is not None
        h2.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc+proto")])
        h2.send_data(stream, MESSAGE)
        h2.send_headers(stream, [("grpc-status", "0")], end_stream=True)
        writer.write(b"".join(IGNORED) + h2.data_to_send())
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_unix_server(serve, folder / "peer.sock")
    async with server:
        async with UnixChannel(folder / "peer.sock") as channel:
            assert await channel.unary(ROUTE, b"", bytes) == b"hi"
        await ended.wait()
    assert [record for record in caplog.records if record.exc_info] == []
