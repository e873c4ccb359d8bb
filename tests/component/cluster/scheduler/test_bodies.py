"""The memory of requests that are not checked yet: many connections, long and unfinished bodies."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from gpumgr.cluster.scheduler import bodies
from gpumgr.cluster.scheduler.hami_webhook import MOST_BYTES, PATH, TOTAL_BYTES, webhook_application
from gpumgr.cluster.scheduler.server import make_application
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import WebhookSettings
from gpumgr.web.http_server import HttpServer

from .conftest import Stage, until

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


async def test_bodies_take_no_more_together_than_the_limit(webhook: HttpServer) -> None:
    """Clients without a credential send all but the last byte of many bodies."""
    count = 2 * TOTAL_BYTES // MOST_BYTES
    opened = [await begin(webhook.address, PATH, b" " * (MOST_BYTES - 1), MOST_BYTES) for _ in range(count)]
    refused = await asyncio.gather(*map(answer, opened[-4:]))
    assert all(each.startswith(b"HTTP/1.1 503") and b"more than 16 MiB; try again" in each for each in refused)
    for _, writer in opened:
        writer.close()
    await until(lambda: webhook.connections == 0)
    assert (await answer(await begin(webhook.address, PATH, REVIEW, len(REVIEW)))).startswith(b"HTTP/1.1 200")


async def test_a_body_must_arrive_in_time(webhook: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    told = await answer(await begin(webhook.address, PATH, b"{", 2))
    assert told.startswith(b"HTTP/1.1 408")
    assert told.endswith(b"the body did not arrive in 0.05 s\n")


async def test_a_longer_review_is_refused_with_the_limit(webhook: HttpServer) -> None:
    fits = REVIEW + b" " * (MOST_BYTES - len(REVIEW))
    assert (await answer(await begin(webhook.address, PATH, fits, len(fits)))).startswith(b"HTTP/1.1 200")
    refused = await answer(await begin(webhook.address, PATH, fits + b" ", len(fits) + 1))
    assert refused.startswith(b"HTTP/1.1 413")
    assert refused.endswith(b"the AdmissionReview has more than 1048576 bytes; shorten the pod\n")


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
