"""Connections that are too many, and those on which nothing happens for too long."""

import asyncio
import asyncio.sslproto
import contextlib
import gc
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from structlog.testing import capture_logs

from gpumgr.web import http_server, responses
from gpumgr.web.http_server import HttpServer
from tests.background import until
from tests.component.web.conftest import Serve
from tests.component.web.scene import TLS, Scene, by_unix, get, parsed, say

LONG = 3600.0
ENDLESS = {"request_seconds": LONG, "idle_seconds": LONG, "unread_seconds": LONG}
KEPT = get("/healthz").replace(b"Connection: close\r\n", b"")
PLACES = 8


async def hang_up_of(server: HttpServer, *said: bytes) -> bytes:
    """What the server sends until it closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        return await say(server.address, *said)
    return b""


async def opened(server: HttpServer, said: bytes = KEPT) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has its first answer, or the head of its stream."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(said)
    head = await reader.readuntil(b"\r\n\r\n")
    if b"Content-Length: " in head:
        await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
    return reader, writer


@pytest.mark.parametrize("security", [{}, TLS], ids=["plain", "tls"])
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_a_first_request_must_come_whole(serve: Serve, security: dict[str, Any], said: bytes) -> None:
    server = await serve(**security, **{**ENDLESS, "request_seconds": 0.05})
    assert b"200 OK" not in await hang_up_of(server, said)
    await until(lambda: server.connections == 0)


async def test_a_body_must_come_whole(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "BODY_SECONDS", 0.05)
    server = await serve(**ENDLESS)
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf")
    told = await reader.readuntil(b"}")
    writer.close()
    assert parsed(told) == (408, {"error": "the body did not arrive in 0.05 s"})


async def test_a_slow_loris_wins_no_time_by_its_drops(serve: Serve) -> None:
    server = await serve(**{**ENDLESS, "request_seconds": 0.2})
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"GET /healthz HTTP/1.1\r\n")
    with contextlib.suppress(ConnectionError):
        while not (reader.at_eof() or reader.exception()):
            writer.write(b"X-Drop: 1\r\n")
            await asyncio.sleep(0.02)
    writer.close()
    await until(lambda: server.connections == 0)


@pytest.mark.parametrize("begun", [b"", b"GET /"], ids=["nothing", "half a request"])
async def test_an_idle_connection_is_closed(serve: Serve, begun: bytes) -> None:
    server = await serve(**{**ENDLESS, "idle_seconds": 0.05})
    assert (await hang_up_of(server, KEPT, begun)).count(b"200 OK") == 1


@pytest.mark.parametrize("security", [{}, TLS], ids=["plain", "tls"])
async def test_a_connection_with_a_request_outlives_the_limit_of_its_first_one(
    serve: Serve, scene: Scene, security: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test moves the clock of the event loop, so that a busy machine can't exceed the limit before the request."""
    server = await serve(**security, **{**ENDLESS, "request_seconds": 60.0})
    secured = ssl._create_unverified_context() if security else None
    reader, writer = await asyncio.open_connection(*server.address, ssl=secured)
    writer.write(get("/api/stream"))
    await reader.readuntil(b"\r\n\r\n")
    silent, other = await asyncio.open_connection(*server.address, ssl=secured)
    await until(lambda: len(server._silent) == 1)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + 60)
    with contextlib.suppress(ConnectionResetError):
        assert await silent.read() == b""
    scene.states.set(b"{}")
    await reader.readuntil(b"data: {}\n\n")
    for each in (writer, other):
        each.close()


@pytest.mark.parametrize("path", ["/api/state", "/api/stream"])
@pytest.mark.parametrize("security", [{}, TLS], ids=["plain", "tls"])
async def test_an_answer_must_be_read(serve: Serve, scene: Scene, security: dict[str, Any], path: str) -> None:
    """Linux ends the connection (TCP_USER_TIMEOUT)."""
    scene.now = bytes(12 << 20)
    server = await serve(**security, **{**ENDLESS, "unread_seconds": 0.2}, heartbeat_seconds=0.05)
    secured = ssl._create_unverified_context() if security else None
    reader, writer = await asyncio.open_connection(*server.address, ssl=secured, limit=1024)
    writer.write(get(path).replace(b"Connection: close\r\n", b""))
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    await until(lambda: server.connections == 0)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        assert len(await reader.read()) < len(scene.now)
    writer.close()


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
    assert logs == []
    await until(lambda: server.connections == 0)


async def test_a_client_that_went_before_its_request_is_looked_at_is_no_error() -> None:
    application = web.Application()
    server = HttpServer(application, host="127.0.0.1", port=0)
    request = make_mocked_request("GET", "/")
    request.protocol.transport = None
    with capture_logs() as logs, pytest.raises(ConnectionResetError):
        await application.middlewares[0](request, web.Request.json)
    assert (server.disconnects, logs) == (1, [])


async def until_found(scene: Scene, true: Callable[[], bool]) -> None:
    """The server finds at a write of a stream that its client has gone."""
    async with asyncio.timeout(30):
        at = 1
        while not true():
            scene.states.set(b'{"at": %d}' % (at := at + 1))
            await asyncio.sleep(0.02)


async def test_connections_above_the_limit_are_refused_at_once_but_for_root(serve: Serve, scene: Scene, tmp_path: Path) -> None:
    server = await serve(max_connections=PLACES, unix_socket=tmp_path / "agent.sock", **ENDLESS)
    held = [await opened(server, get("/api/stream")) for _ in range(PLACES)]
    for _ in range(3):
        assert await hang_up_of(server) == b""
    assert (server.connections, server.connections_refused) == (PLACES, 3)
    async with by_unix(tmp_path / "agent.sock") as root, root.get("/healthz") as answer:
        assert answer.status == 200
    held[0][1].close()
    await until_found(scene, lambda: server.connections == PLACES - 1)
    assert parsed(await say(server.address, get("/healthz")))[0] == 200
    for _, writer in held[1:]:
        writer.close()


@pytest.fixture
def open_files() -> Iterator[int]:
    """How many this process may have open, as many as may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("security", "first"), [({}, b""), ({}, b"GET / HT"), (TLS, b"\x16\x03")], ids=["silent", "slow", "tls"])
async def test_thousands_of_connections(serve: Serve, open_files: int, security: dict[str, Any], first: bytes) -> None:
    """They take no more than the limit, and the server goes on when they have timed out."""
    server = await serve(**security, max_connections=64, request_seconds=2.0)
    before, loop = files_open(), asyncio.get_running_loop()
    clients = []
    for _ in range(min(2_000, open_files - before - 256)):
        client = socket.socket()
        client.setblocking(False)
        await loop.sock_connect(client, server.address)
        with contextlib.suppress(ConnectionError):
            client.send(first)
        clients.append(client)
    try:
        await until(lambda: server.connections_refused > 0 and files_open() - before - len(clients) <= 64 + 64)
        assert server.connections <= 64
        await until(lambda: server.connections == 0)
        if not security:
            assert parsed(await say(server.address, get("/healthz")))[0] == 200
    finally:
        for client in clients:
            client.close()


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_without_file_descriptors_it_pauses_and_comes_back(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_PAUSE_SECONDS", 0.05)
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
        with capture_logs() as logs:
            await asyncio.get_running_loop().sock_connect(client, server.address)
            await until(lambda: bool(logs))
        assert (logs[0]["event"], logs[0]["error"]) == ("connection_not_accepted", "Too many open files")
    finally:
        for each in held:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    client.send(get("/healthz"))
    async with asyncio.timeout(30):
        assert (await asyncio.get_running_loop().sock_recv(client, 1000)).startswith(b"HTTP/1.1 200")
    client.close()


async def test_a_connection_takes_little_memory_before_its_client_is_known(serve: Serve) -> None:
    server = await serve(**TLS)
    _, writer = await asyncio.open_connection(*server.address)

    def buffers() -> list[bytearray]:
        return [each._ssl_buffer for each in gc.get_objects() if isinstance(each, asyncio.sslproto.SSLProtocol)]  # type: ignore[attr-defined]

    await until(lambda: server.connections == 1 and bool(buffers()))
    assert all(len(each) <= 32 << 10 for each in buffers())
    writer.close()
