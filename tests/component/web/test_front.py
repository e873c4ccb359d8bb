"""The page at /, as the package has it."""

import gzip
import re
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from gpumgr.web.http_server import HttpServer
from gpumgr.web.responses import PAGE, IndexPage
from tests.component.web.conftest import Serve


async def fetch(server: HttpServer, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    chosen = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession(server.url, auto_decompress=False, skip_auto_headers=["Accept-Encoding"]) as client,
        client.get("/", headers=chosen) as answer,
    ):
        return answer.status, answer.headers, await answer.read()


async def test_the_page_is_the_packages_file(server: HttpServer) -> None:
    status, headers, body = await fetch(server)
    assert status == 200
    assert body == PAGE.read_bytes()
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Content-Encoding" not in headers


async def test_the_page_comes_packed_to_whom_it_may(server: HttpServer) -> None:
    _, headers, body = await fetch(server, Accept_Encoding="br, gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert headers["Vary"] == "Accept-Encoding"
    assert gzip.decompress(body) == PAGE.read_bytes()
    assert int(headers["Content-Length"]) == len(body) < len(PAGE.read_bytes())


async def test_the_page_may_load_nothing_and_stand_in_no_frame(server: HttpServer) -> None:
    _, headers, body = await fetch(server)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == len(re.findall(rb"<(script|style)\b", body))


async def test_another_file_is_read_once_at_the_start(serve: Serve, tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text("<p>one</p>")
    server = await serve(page=page)
    page.write_text("<p>two</p>")
    assert (await fetch(server))[2] == b"<p>one</p>"


def test_a_package_without_its_page_is_broken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        IndexPage(tmp_path / "index.html")
