"""A full server: the kubelet's probes and root's own socket are answered in any case."""

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from gpumgr.web.connection import Connection
from gpumgr.web.connection_limit import Timeouts
from gpumgr.web.server import WebServer
from tests.component.web.conftest import Serve
from tests.component.web.scene import REMOTE, TLS, Scene, by_unix, get, parsed, say, until

PLACES = 16
#: No connection is closed for slowness while a test runs, and checks are frequent.
ENDLESS = Timeouts(request_seconds=3600, idle_seconds=3600, unread_seconds=3600, half_closed_seconds=3600, check_seconds=0.02)
KEPT = get("/api/state").replace(b"Connection: close\r\n", b"")
STREAM = get("/api/stream")
#: More than the kernel holds for a client that takes nothing.
LARGE = b'{"a": "' + b"x" * (1 << 19) + b'"}'


@pytest.fixture
async def clients() -> AsyncIterator[list[asyncio.StreamWriter]]:
    opened: list[asyncio.StreamWriter] = []
    yield opened
    for writer in opened:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


async def come(
    clients: list[asyncio.StreamWriter], server: WebServer, said: bytes, *, source: str = "127.0.0.1", secured: bool = False
) -> asyncio.StreamReader:
    """A client with little room for what it is sent, which takes nothing more by itself once that is full."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    client.bind((source, 0))
    await asyncio.get_running_loop().sock_connect(client, server.address)
    context, name = (ssl._create_unverified_context(), "localhost") if secured else (None, None)
    reader, writer = await asyncio.open_connection(sock=client, ssl=context, server_hostname=name, limit=1024)
    clients.append(writer)
    writer.write(said)
    return reader


async def status_by(path: Path) -> int:
    async with by_unix(path) as root, root.get("/healthz") as answer:
        return answer.status


@pytest.mark.parametrize("security", [{}, TLS], ids=["plain", "tls"])
async def test_connections_that_read_no_answers_are_closed(
    serve: Serve, scene: Scene, clients: list[asyncio.StreamWriter], path: Path, security: dict[str, Path]
) -> None:
    scene.now = LARGE
    server = await serve(**security, unix_socket=path, max_connections=PLACES, timeouts=ENDLESS)
    for _ in range(PLACES):
        reader = await come(clients, server, KEPT * 20, secured=bool(security))
        await reader.readuntil(b"\r\n")
    await until(lambda: server.connections >= PLACES)
    for _ in range(3):
        async with aiohttp.ClientSession(server.url) as probe, probe.get("/healthz", ssl=not security) as answer:
            assert answer.status == 200
        assert await status_by(path) == 200
    assert server.connections_refused == 0


async def test_root_comes_in_where_all_others_are_busy(serve: Serve, clients: list[asyncio.StreamWriter], path: Path) -> None:
    server = await serve(unix_socket=path, max_connections=PLACES, timeouts=ENDLESS)
    for _ in range(PLACES):
        await (await come(clients, server, STREAM)).readuntil(b"\r\n\r\n")
    assert await say(server.address, b"") == b""
    assert server.connections_refused == 1
    assert await status_by(path) == 200


async def test_connections_to_the_unix_socket_do_not_displace_the_probes(serve: Serve, path: Path) -> None:
    server = await serve(unix_socket=path, max_connections=PLACES, timeouts=ENDLESS)
    held = [await asyncio.open_unix_connection(str(path)) for _ in range(100)]
    await until(lambda: server.connections >= 64)
    assert parsed(await say(server.address, get("/healthz")))[0] == 200
    assert server.connections_refused == 0
    for _, writer in held:
        writer.close()


async def test_remote_connections_do_not_fill_the_server(serve: Serve, clients: list[asyncio.StreamWriter]) -> None:
    server = await serve(max_connections=PLACES, timeouts=ENDLESS)
    readers = [await come(clients, server, b"GET /", source=REMOTE) for _ in range(PLACES)]
    async with asyncio.timeout(10):
        for reader in readers[: -PLACES // 4]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
    assert server.connections == PLACES // 4
    assert parsed(await say(server.address, get("/healthz")))[0] == 200
    assert parsed(await say(server.address, get("/healthz"), source=REMOTE))[0] == 200


async def test_of_many_requests_at_once_one_answer_is_made_ahead(
    serve: Serve, scene: Scene, clients: list[asyncio.StreamWriter]
) -> None:
    scene.now = bytes(60_000)
    server = await serve(timeouts=ENDLESS)
    await come(clients, server, KEPT * 400)
    while not unread_bytes():
        assert parsed(await say(server.address, get("/healthz")))[0] == 200
    for _ in range(5):  # the kernel may take more of them between two reads
        assert parsed(await say(server.address, get("/healthz")))[0] == 200
        assert unread_bytes() < 61_000


def unread_bytes() -> int:
    """What lies in this process for the clients of its server."""
    found = [each.transport for each in gc.get_objects() if isinstance(each, Connection) and each.transport is not None]
    return sum(transport.get_write_buffer_size() for transport in found)


async def test_the_node_s_own_address_counts_as_this_host(serve: Serve, clients: list[asyncio.StreamWriter]) -> None:
    server = await serve(host=REMOTE, max_connections=PLACES, timeouts=ENDLESS)
    for _ in range(PLACES):
        await come(clients, server, b"GET /", source=REMOTE)
    await until(lambda: server.connections >= PLACES)
    status, _ = parsed(await say(server.address, get("/healthz"), source=REMOTE))
    assert status == 200
