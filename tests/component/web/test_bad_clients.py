"""Hostile and faulty clients: each gets a status and a message, and the server continues."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from gpumgr.web.handlers import PATHS
from gpumgr.web.http_server import HttpServer
from tests.component.web.scene import get, parsed, say


@pytest.fixture(autouse=True)
async def _goes_on_in_silence(server: HttpServer, caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    with capture_logs() as logs:
        yield
        assert parsed(await say(server.address, get("/healthz")))[0] == 200
    assert (logs, caplog.records) == ([], [])


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"\x00\x00\x00\x00\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: nonsense\r\n\r\n",
        b"POST /api/gpus/0/drain HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"<html>" * 10_000,
        get("/" + "x" * 20_000),
        get("/metrics?" + "x=1&" * 5000),
        get("/metrics", "Cookie: " + "x" * 20_000),
        get("/metrics", *(f"X-{number}: 1" for number in range(10_000))),
    ],
)
async def test_what_is_no_http_or_too_long_is_a_bad_request(server: HttpServer, garbage: bytes) -> None:
    answer = await say(server.address, garbage)
    assert answer.split()[1] in (b"400", b"403")
    assert b"Traceback" not in answer


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/page/index.html",
        "/metrics/",
        "/api/gpus/0/explode",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/page/../../../../etc/passwd",
        "//etc/passwd",
        "/%00",
        "/\\..\\x",
    ],
)
async def test_other_paths_lead_to_nothing_and_to_no_file(server: HttpServer, path: str) -> None:
    status, told = parsed(await say(server.address, get(path)))
    assert (status, told["paths"]) == (404, list(PATHS))
    assert told["error"].startswith("there is nothing at ")


HUGE = 100 << 20


async def upload(server: HttpServer, head: str, chunk: bytes) -> tuple[int, bytes]:
    """Sends chunks until the answer is there: how many bytes that took, and the answer."""
    reader, writer = await asyncio.open_connection(*server.address)
    answer = asyncio.ensure_future(reader.readuntil(b"}"))
    sent = 0
    writer.write(head.encode())
    while sent < HUGE and not answer.done():
        writer.write(chunk)
        await writer.drain()
        sent += len(chunk)
    told = await answer
    writer.close()
    return sent, told


@pytest.mark.parametrize(
    ("head", "chunk"),
    [
        (f"Content-Length: {HUGE}", bytes(0x10000)),
        ("Transfer-Encoding: chunked", b"10000\r\n" + bytes(0x10000) + b"\r\n"),
        (f"Content-Length: {HUGE}\r\nExpect: 100-continue", bytes(0x10000)),
    ],
    ids=["by its length", "in chunks", "that asks first"],
)
@pytest.mark.parametrize("request_line", ["POST /metrics", "GET /healthz", "GET /nowhere"])
async def test_a_huge_body_is_refused_while_it_comes(server: HttpServer, request_line: str, head: str, chunk: bytes) -> None:
    sent, answer = await upload(server, f"{request_line} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n", chunk)
    assert sent < HUGE
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert parsed(answer) == (413, {"error": "the body has more than 4096 bytes"})


@pytest.mark.parametrize("path", ["/metrics", "/nowhere"])
async def test_an_unknown_expectation_is_refused(server: HttpServer, path: str) -> None:
    assert (await say(server.address, get(path, "Expect: a miracle"))).split()[1] == b"417"


@pytest.mark.parametrize(
    ("header", "body"),
    [("Content-Encoding: gzip", b"\x1f\x8b" + bytes(100)), ("X-Packed: no", bytes(4096))],
    ids=["packed", "small"],
)
async def test_a_body_that_nobody_reads_is_no_harm(server: HttpServer, header: str, body: bytes) -> None:
    """A packed one is not unpacked."""
    answer = await say(server.address, get("/healthz", header, f"Content-Length: {len(body)}") + body)
    assert parsed(answer)[0] == 200
