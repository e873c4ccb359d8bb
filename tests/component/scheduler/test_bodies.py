"""The memory of requests of which nothing has been checked: many connections, long and unfinished bodies."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.kubeapi.replica_requests import ReplicaResources
from gpumgr.scheduler.bodies import Bodies
from gpumgr.scheduler.hami_webhook import MOST_BYTES, PATH, TOTAL_BYTES, webhook_application
from gpumgr.scheduler.lifecycle import certificates
from gpumgr.scheduler.listening import VerbListener
from gpumgr.scheduler.server import make_application
from gpumgr.settings.schema import WebhookSettings

from .conftest import Stage, until
from .test_tls import client, files

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
async def webhook() -> AsyncIterator[VerbListener]:
    listener = VerbListener(webhook_application(ReplicaResources(), WebhookSettings()), None, stop_seconds=1)
    await listener.start("127.0.0.1", 0)
    yield listener
    await listener.stop()


async def test_the_oldest_unfinished_bodies_are_cut_and_whole_ones_are_answered(webhook: VerbListener) -> None:
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


async def test_a_longer_review_is_refused_with_the_limit(webhook: VerbListener) -> None:
    fits = REVIEW + b" " * (MOST_BYTES - len(REVIEW))
    assert (await answer(await begin(webhook.address, PATH, fits, len(fits)))).startswith(b"HTTP/1.1 200")
    refused = await answer(await begin(webhook.address, PATH, fits + b" ", len(fits) + 1))
    assert refused.startswith(b"HTTP/1.1 413")
    assert refused.endswith(b"the AdmissionReview has more than 1048576 bytes; shorten the pod\n")


async def test_what_is_being_answered_is_not_cut() -> None:
    """Also if it alone takes all the room."""
    bodies, entered, leave = Bodies(100, 150), asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        async with bodies.of(request) as body:
            if len(body) == 100:
                entered.set()
                await leave.wait()
            return web.Response(text="done")

    application = web.Application()
    application.add_routes([web.post("/", slow)])
    listener = VerbListener(application, None, stop_seconds=1)
    await listener.start("127.0.0.1", 0)
    long = await begin(listener.address, "/", b"x" * 100, 100)
    await entered.wait()
    assert await answer(await begin(listener.address, "/", b"x" * 60, 70)) == b""
    assert (await answer(await begin(listener.address, "/", b"x" * 50, 50))).endswith(b"done")
    leave.set()
    assert (await answer(long)).endswith(b"done")
    assert bodies.cut == 1
    await listener.stop()


async def test_a_client_that_leaves_amid_its_body_is_no_error(stage: Stage) -> None:
    listener = VerbListener(make_application(stage.extender, max_request_mebibytes=1), None, stop_seconds=1)
    await listener.start("127.0.0.1", 0)
    with capture_logs() as logs:
        _, writer = await begin(listener.address, "/scheduler/filter", b"{", 100)
        await until(lambda: listener._listener.limit.open == 1)
        writer.transport.abort()
        await until(lambda: listener._listener.limit.open == 0)
        await listener.stop()
    assert [each["event"] for each in logs if each["log_level"] != "debug"] == []


async def test_a_connection_takes_little_memory_before_its_client_is_known(tmp_path: Path) -> None:
    listener = VerbListener(
        web.Application(), certificates(files(tmp_path), "127.0.0.1", insecure_loopback=False), stop_seconds=1
    )
    await listener.start("127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*listener.address, ssl=client())
    (slot,) = listener._listener.limit._groups["all"]
    await until(lambda: len(slot.transports) == 2)
    assert len(slot.transports[-1]._ssl_protocol._ssl_buffer) <= 32 << 10  # type: ignore[attr-defined]
    writer.close()
    await listener.stop()
