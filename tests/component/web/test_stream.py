"""/api/stream over real connections: what comes, when nothing comes, and clients that are slow or many."""

import asyncio
import json

import aiohttp
from structlog.testing import capture_logs

from gpumgr.web.http_server import HttpServer
from tests.background import until
from tests.component.web.conftest import Serve
from tests.component.web.scene import Scene, get, page_server, parsed, say


class Reader:
    """Events of one stream, over a connection that reads only when asked."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def open(cls, server: HttpServer, *, limit: int = 1 << 16) -> "Reader":
        # HTTP/1.0: an answer without chunks between the events.
        reader, writer = await asyncio.open_connection(*server.address, limit=limit)
        writer.write(b"GET /api/stream HTTP/1.0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 200 ")
        return cls(reader, writer)

    async def event(self) -> bytes:
        async with asyncio.timeout(30):
            return await self._reader.readuntil(b"\n\n")

    async def state(self) -> object:
        kind, _, data = (await self.event()).partition(b"\n")
        assert kind == b"event: state"
        return json.loads(data.removeprefix(b"data: "))


async def test_the_newest_state_comes_at_once_and_then_each_new_one(server: HttpServer, scene: Scene) -> None:
    scene.states.set(b'{"at": "long ago"}')
    one, two = await Reader.open(server), await Reader.open(server)
    assert await one.state() == await two.state() == {"at": 1}
    for at in range(2, 5):
        scene.states.set(b'{"at": %d}' % at)
        assert await one.state() == await two.state() == {"at": at}
    scene.states.set(b'{"at": "long ago"}')
    assert await one.state() == {"at": "long ago"}
    one.writer.close()
    two.writer.close()


async def test_browsers_get_an_event_stream(client: aiohttp.ClientSession) -> None:
    async with client.get("/api/stream") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
        assert await answer.content.readuntil(b"\n\n") == b'event: state\ndata: {"at": 1}\n\n'
    async with client.head("/api/stream") as answer:
        assert answer.status == 405


async def test_a_comment_keeps_a_quiet_line_open(serve: Serve) -> None:
    one = await Reader.open(await serve(heartbeat_seconds=0.02))
    await one.state()
    assert await one.event() == await one.event() == b":\n\n"
    one.writer.close()


async def test_who_leaves_leaves_no_reader_behind(server: HttpServer, scene: Scene) -> None:
    some = [await Reader.open(server) for _ in range(3)]
    await until(lambda: scene.states.readers == 3)
    some[0].writer.close()
    some[1].writer.transport.abort()
    some[2].writer.write_eof()
    for at in range(2):  # the first write may still reach the kernel
        scene.states.set(b'{"at": %d}' % at)
        await asyncio.sleep(0.05)
    await until(lambda: scene.states.readers == 0)
    some[2].writer.close()


async def test_a_client_that_leaves_while_its_first_state_is_built_is_no_error(server: HttpServer, scene: Scene) -> None:
    asked, built = asyncio.Event(), asyncio.Event()

    async def state() -> bytes:
        asked.set()
        await built.wait()
        return scene.now

    scene.state = state  # type: ignore[method-assign]
    with capture_logs() as logs:
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(get("/api/stream"))
        await asked.wait()
        writer.transport.abort()
        for _ in range(100):  # turns of the loop, in which the server sees the end of the connection
            await asyncio.sleep(0)
        built.set()
        await until(lambda: server.disconnects == 1)
    assert logs == []


async def test_more_streams_than_there_may_be(serve: Serve, scene: Scene) -> None:
    server = await serve()
    some = [await Reader.open(server) for _ in range(64)]
    status, told = parsed(await say(server.address, get("/api/stream")))
    assert (status, told) == (503, {"error": "64 streams are open, which is the limit"})
    some[0].writer.close()
    for at in range(1, 4):  # the first write to the one that has gone may still reach the kernel
        for one in some[1:]:
            assert await one.state() == {"at": at}
        scene.states.set(b'{"at": %d}' % (at + 1))
    await until(lambda: scene.states.readers == 63)
    some[0] = await Reader.open(server)
    for one in some:
        one.writer.close()


async def test_a_slow_client_misses_states_and_delays_no_other_client(server: HttpServer, scene: Scene) -> None:
    slow, quick = await Reader.open(server, limit=1 << 21), await Reader.open(server, limit=1 << 21)
    assert await quick.state() == {"at": 1}
    slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
    padding = "x" * (1 << 20)
    for at in range(2, 32):
        scene.states.set(json.dumps([at, padding]).encode())
        assert await quick.state() == [at, padding]
    slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
    told = [await slow.state()]
    while told[-1] != [31, padding]:
        told.append(await slow.state())
    assert len(told) < 25
    slow.writer.close()
    quick.writer.close()


async def test_a_stop_ends_the_streams_in_order(scene: Scene) -> None:
    server = page_server(scene, stop_seconds=5)
    await server.start()
    async with aiohttp.ClientSession(server.url) as client, client.get("/api/stream") as answer:
        await answer.content.readuntil(b"\n\n")
        stopping = asyncio.ensure_future(server.stop())
        assert await answer.content.read() == b""
        await stopping
    assert scene.states.readers == 0
