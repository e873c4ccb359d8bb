"""Connections that last too long or are too many, on a server with short timeouts."""

import asyncio
import contextlib
import gc
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpumgr.web.connection import Connection
from gpumgr.web.connection_limit import Timeouts
from gpumgr.web.server import WebServer
from tests.component.web.conftest import Serve
from tests.component.web.scene import TLS, Scene, get, parsed, say, until

LONG = 3600.0
KEPT = get("/healthz").replace(b"Connection: close\r\n", b"")
#: What the server may hold open besides connections: listeners, the loop's own, a certificate being read.
OTHER_FILES = 64
#: Connections that were cut a moment ago.
LEAVING = 8


def timeouts(**seconds: float) -> Timeouts:
    """Endless but for these."""
    endless = {"request_seconds": LONG, "idle_seconds": LONG, "unread_seconds": LONG, "half_closed_seconds": LONG}
    return Timeouts(**{**endless, **seconds}, check_seconds=0.02)


async def hang_up_of(server: WebServer, *said: bytes) -> bytes:
    """What the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection(*server.address)
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        for part in said:
            writer.write(part)
            await writer.drain()
        while more := await reader.read(1 << 16):
            answer += more
    writer.close()
    return answer


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"G",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf",
    ],
    ids=["nothing", "a letter", "half a header", "half a body"],
)
async def test_a_request_must_come_whole(serve: Serve, said: bytes) -> None:
    server = await serve(timeouts=timeouts(request_seconds=0.05))
    assert await hang_up_of(server, said) == b""


async def test_a_client_that_disconnects_is_counted_and_is_no_error(serve: Serve) -> None:
    server = await serve()
    with capture_logs() as logs:
        for number in range(3):
            _, writer = await asyncio.open_connection(*server.address)
            writer.write(b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf")
            await writer.drain()
            await asyncio.sleep(0.05)  # the handler waits for the rest of the body
            writer.transport.abort()
            await until(lambda number=number: server.disconnects == number + 1)  # type: ignore[misc]
    assert {(line["event"], line["log_level"]) for line in logs} == {("client_disconnected", "debug")}
    assert server.connections == 0


async def test_a_slow_loris_wins_no_time_by_its_drops(serve: Serve) -> None:
    server = await serve(timeouts=timeouts(request_seconds=0.2))
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"GET /healthz HTTP/1.1\r\n")
    with contextlib.suppress(ConnectionError):
        while not lost(reader):
            writer.write(b"X-Drop: 1\r\n")
            await asyncio.sleep(0.02)
    writer.close()
    assert server.connections == 0


async def test_an_idle_connection_is_closed(serve: Serve) -> None:
    server = await serve(timeouts=timeouts(idle_seconds=0.05))
    assert (await hang_up_of(server, KEPT)).count(b"200 OK") == 1


async def test_a_second_request_must_come_whole_too(serve: Serve) -> None:
    server = await serve(timeouts=timeouts())
    reader, writer = await opened(server)
    server._tcp_listener.limit._timeouts = timeouts(request_seconds=0.05)  # from now on
    await asyncio.sleep(0.1)
    writer.write(b"GET /")
    with contextlib.suppress(ConnectionResetError):
        assert b"HTTP" not in await reader.read()
    writer.close()


async def test_a_handshake_must_come_about(serve: Serve) -> None:
    server = await serve(**TLS, timeouts=timeouts(request_seconds=0.05))
    assert await hang_up_of(server) == b""
    assert await hang_up_of(server, b"\x16\x03\x01") == b""
    assert server.connections == 0


@pytest.mark.parametrize("security", [{}, TLS], ids=["plain", "tls"])
async def test_an_answer_must_be_taken(serve: Serve, scene: Scene, security: dict[str, Any]) -> None:
    scene.now = bytes(12 << 20)
    server = await serve(**security, timeouts=timeouts(unread_seconds=0.05))
    secured = ssl._create_unverified_context() if security else None
    reader, writer = await asyncio.open_connection(*server.address, ssl=secured, limit=1024)
    writer.write(get("/api/state").replace(b"Connection: close\r\n", b""))
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    await until(lambda: server.connections == 0)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        assert len(await reader.read()) < len(scene.now)
    writer.close()


async def opened(server: WebServer, said: bytes = KEPT) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has its first answer, or the head of its stream."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(said)
    head = await reader.readuntil(b"\r\n\r\n")
    if b"Content-Length: " in head:
        await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
    return reader, writer


def lost(reader: asyncio.StreamReader) -> bool:
    return reader.at_eof() or reader.exception() is not None


async def test_when_it_is_full_the_oldest_idle_one_makes_room(serve: Serve, scene: Scene) -> None:
    server = await serve(max_connections=8)
    held = [await opened(server) for _ in range(8)]
    stream = await opened(server, get("/api/stream"))
    await until(lambda: lost(held[0][0]))
    assert not any(lost(reader) for reader, _ in held[1:])
    assert (server.connections, server.connections_refused) == (8, 0)
    others = [await opened(server) for _ in range(20)]
    scene.states.set(b"{}")
    await stream[0].readuntil(b"data: {}\n\n")
    assert (server.connections, server.connections_refused) == (8, 0)
    for _, writer in [*held, *others, stream]:
        writer.close()


async def test_when_all_are_busy_a_new_one_is_refused_at_once(serve: Serve) -> None:
    server = await serve(max_connections=8)
    streams = [await opened(server, get("/api/stream")) for _ in range(8)]
    for _ in range(3):
        assert await hang_up_of(server) == b""
    assert (server.connections, server.connections_refused) == (8, 3)
    streams[0][1].close()
    await until(lambda: server.connections == 7)
    assert parsed(await say(server.address, get("/healthz")))[0] == 200
    for _, writer in streams:
        writer.close()


async def test_a_request_under_way_is_busy(serve: Serve, scene: Scene) -> None:
    server = await serve(max_connections=8)
    go, under_way = asyncio.Event(), []

    async def wait() -> None:
        under_way.append(1)
        await go.wait()

    scene.before_scrape = wait
    asked = [asyncio.ensure_future(say(server.address, get("/metrics"))) for _ in range(8)]
    await until(lambda: len(under_way) == 8)
    assert await hang_up_of(server) == b""
    go.set()
    assert {answer.split()[1] for answer in await asyncio.gather(*asked)} == {b"200"}


@pytest.fixture
def open_files() -> Iterator[int]:
    """How many this process may have open, as many as may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def crowd(server: WebServer, many: int, say_first: bytes) -> list[socket.socket]:
    loop, clients = asyncio.get_running_loop(), []
    for _ in range(many):
        client = socket.socket()
        client.setblocking(False)
        await loop.sock_connect(client, server.address)
        with contextlib.suppress(ConnectionError):
            client.send(say_first)
        clients.append(client)
    return clients


@pytest.mark.parametrize(("security", "first"), [({}, b""), ({}, b"GET / HT"), (TLS, b"\x16\x03")], ids=["silent", "slow", "tls"])
async def test_ten_thousand_connections(serve: Serve, open_files: int, security: dict[str, Any], first: bytes) -> None:
    server = await serve(**security, unix_socket=None, max_connections=64)
    before = files_open()
    many = min(10_000 if not first else 2_000, open_files - before - 256)
    clients = await crowd(server, many, first)
    try:
        await until(lambda: server.connections <= 64)
        await until(lambda: files_open() - before - many <= 64 + OTHER_FILES)
        await until(lambda: connections_alive() <= 64 + LEAVING)
        if not security:
            assert parsed(await say(server.address, get("/healthz")))[0] == 200
        assert server.connections_refused == 0
    finally:
        for client in clients:
            client.close()


def connections_alive() -> int:
    gc.collect()
    return sum(isinstance(each, Connection) for each in gc.get_objects())


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_without_file_descriptors_it_pauses_and_comes_back(
    serve: Serve, open_files: int, caplog: pytest.LogCaptureFixture
) -> None:
    del open_files
    server = await serve()
    held = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    client.setblocking(False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_open() + 8, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(socket.socket())
        with caplog.at_level("ERROR", logger="asyncio"):
            await asyncio.get_running_loop().sock_connect(client, server.address)
            await until(lambda: bool(caplog.records))
        assert "socket.accept() out of system resource" in caplog.text
    finally:
        for each in held:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    client.send(get("/healthz"))
    async with asyncio.timeout(10):
        assert (await asyncio.get_running_loop().sock_recv(client, 1000)).startswith(b"HTTP/1.1 200")
    client.close()
