"""The memory of requests that are not checked yet: many connections, long and unfinished bodies."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import cast

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.cluster.scheduler.hami_webhook import MOST_BYTES, PATH, TOTAL_BYTES, webhook_application
from gpumgr.cluster.scheduler.server import make_application
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import WebhookSettings
from gpumgr.web import bodies as bodies_module
from gpumgr.web.bodies import Bodies
from gpumgr.web.http_server import HttpServer
from tests.background import until

from .conftest import Clock, Stage

REVIEW = json.dumps({"request": {"uid": "u1", "object": {"spec": {"containers": []}}}}).encode()
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def begin(address: tuple[str, int], path: str, body: bytes, size: int) -> Opened:
    """Sends the headers of a body of `size` bytes, and `body`."""
    reader, writer = await asyncio.open_connection(*address)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def answer(opened: Opened) -> bytes:
    """Nothing if the connection was closed without an answer."""
    try:
        return await opened[0].read()
    except ConnectionError:
        return b""
    finally:
        opened[1].close()


@pytest.fixture
async def webhook() -> AsyncIterator[HttpServer]:
    listener = HttpServer(webhook_application(ReplicaResources(), WebhookSettings()), host="127.0.0.1", port=0)
    await listener.start()
    yield listener
    await listener.stop()


async def test_unfinished_bodies_are_cut_and_whole_ones_are_answered(webhook: HttpServer) -> None:
    """Clients without a credential send all but the last byte of many bodies."""
    size = MOST_BYTES
    count = 2 * TOTAL_BYTES // size
    with capture_logs() as logs:
        opened = [await begin(webhook.address, PATH, b" " * (size - 1), size) for _ in range(count)]
        cut = await asyncio.gather(*map(answer, opened[: TOTAL_BYTES // size]))
        assert cut == [b""] * len(cut)
        reviewed = await answer(await begin(webhook.address, PATH, REVIEW, len(REVIEW)))
    assert reviewed.startswith(b"HTTP/1.1 200")
    (logged,) = [each for each in logs if each["event"] == "requests_cut"]
    assert (logged["path"], logged["last_peer"]) == (PATH, "127.0.0.1")
    for _, writer in opened:
        writer.close()


async def test_a_body_must_arrive_in_time(webhook: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "BODY_SECONDS", 0.05)
    reader, writer = await begin(webhook.address, PATH, b"{", 2)
    told = await reader.readuntil(b"the body did not arrive in 0.05 s\n")
    assert told.startswith(b"HTTP/1.1 408")
    writer.close()


async def test_a_longer_review_is_refused_with_the_limit(webhook: HttpServer) -> None:
    fits = REVIEW + b" " * (MOST_BYTES - len(REVIEW))
    assert (await answer(await begin(webhook.address, PATH, fits, len(fits)))).startswith(b"HTTP/1.1 200")
    refused = await answer(await begin(webhook.address, PATH, fits + b" ", len(fits) + 1))
    assert refused.startswith(b"HTTP/1.1 413")
    assert refused.endswith(b"the AdmissionReview has more than 1048576 bytes; shorten the pod\n")


class Sender:
    """A request; its body arrives as the test says."""

    path, remote = "/", "10.0.0.1"

    def __init__(self, bodies: Bodies) -> None:
        self._chunks, self.answered = asyncio.Queue[bytes](), asyncio.Event()
        self.answered.set()
        self.content, self.transport, self.cut = self, self, False
        self.whole = asyncio.create_task(self._read(bodies))

    async def iter_any(self) -> AsyncIterator[bytes]:
        while chunk := await self._chunks.get():
            yield chunk

    def abort(self) -> None:
        self.cut = True

    async def send(self, size: int) -> None:
        """0: the end."""
        self._chunks.put_nowait(b"x" * size)
        for _ in range(3):
            await asyncio.sleep(0)

    async def _read(self, bodies: Bodies) -> int:
        async with bodies.of(cast(web.BaseRequest, self)) as body:
            await self.answered.wait()
            return len(body)


async def test_what_is_being_answered_is_not_cut() -> None:
    """Also if it alone takes all the room."""
    bodies = Bodies(100, 150)
    long, cut, fits = Sender(bodies), Sender(bodies), Sender(bodies)
    long.answered.clear()
    for sender, sizes in ((long, (100, 0)), (cut, (60, 0)), (fits, (50, 0))):
        for size in sizes:
            await sender.send(size)
    with pytest.raises(ConnectionError):
        await cut.whole
    long.answered.set()
    assert (await fits.whole, await long.whole) == (50, 100)
    assert [each.cut for each in (long, cut, fits)] == [False, True, False]


async def test_many_large_bodies_do_not_cut_a_small_one_that_began_before() -> None:
    clock = Clock()
    bodies = Bodies(1000, 10_000, lambda: clock.now)
    small = Sender(bodies)
    await small.send(10)
    clock.now += 0.1
    large = [Sender(bodies) for _ in range(50)]
    for each in large:
        await each.send(999)
    assert not small.cut
    assert [each.cut for each in large] == [True] * 40 + [False] * 10
    for each in (small, *large):
        await each.send(0)
    assert await small.whole == 10
    results = await asyncio.gather(*(each.whole for each in large), return_exceptions=True)
    assert [isinstance(each, ConnectionError) for each in results] == [each.cut for each in large]


async def test_many_small_bodies_that_stay_do_not_cut_a_larger_one() -> None:
    clock = Clock()
    bodies = Bodies(1000, 10_000, lambda: clock.now)
    small = [Sender(bodies) for _ in range(1000)]
    for each in small:
        await each.send(10)
    clock.now += 1
    for _ in range(3):
        large = Sender(bodies)
        await large.send(500)
        await large.send(500)
        await large.send(0)
        assert await large.whole == 1000
    assert sum(each.cut for each in small) == 100
    for each in small:
        each.whole.cancel()


async def test_a_body_that_is_cut_by_its_last_bytes_is_not_used() -> None:
    bodies = Bodies(100, 150, lambda: 0.0)  # of equal age
    first, second = Sender(bodies), Sender(bodies)
    await first.send(70)
    await second.send(90)
    await second.send(0)
    with pytest.raises(ConnectionError):
        await second.whole
    await first.send(0)
    assert await first.whole == 70
    assert (first.cut, second.cut) == (False, True)


async def calls_for_a_chunk(connections: int) -> int:
    bodies, calls = Bodies(1000, 10_000), 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    senders = [Sender(bodies) for _ in range(connections)]
    for each in senders:
        await each.send(1)
    sys.setprofile(count)
    try:
        await senders[0].send(1)
    finally:
        sys.setprofile(None)
    for each in senders:
        each.whole.cancel()
    return calls


async def test_the_work_for_a_chunk_does_not_grow_with_the_connections() -> None:
    assert await calls_for_a_chunk(1000) < 2 * await calls_for_a_chunk(10)


async def test_a_client_that_leaves_amid_its_body_is_no_error(stage: Stage) -> None:
    listener = HttpServer(make_application(stage.extender, max_request_mebibytes=1), host="127.0.0.1", port=0)
    await listener.start()
    with capture_logs() as logs:
        _, writer = await begin(listener.address, "/scheduler/filter", b"{", 100)
        await until(lambda: listener.connections == 1)
        writer.transport.abort()
        await until(lambda: listener.connections == 0)
        await listener.stop()
    assert [each["event"] for each in logs if each["log_level"] != "debug"] == []
