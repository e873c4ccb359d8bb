"""The page at /, as the package has it."""

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from gpumgr.web.http_server import HttpServer
from gpumgr.web.responses import PAGE, IndexPage, page_policy


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


def test_the_file_is_read_once_and_must_be_there(tmp_path: Path) -> None:
    """So a running agent serves its own page while its package is replaced, and none starts without its page."""
    file = tmp_path / "index.html"
    with pytest.raises(FileNotFoundError):
        IndexPage(file)
    file.write_text("<p>one</p>")
    page = IndexPage(file)
    file.unlink()
    assert page.plain == gzip.decompress(page.packed) == b"<p>one</p>"


def sha(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def rules(html: str) -> dict[str, str]:
    return {name: value for rule in page_policy(html).split("; ") for name, _, value in [rule.partition(" ")]}


def test_the_policy_allows_what_stands_in_the_file() -> None:
    script = '\nconst a = "&amp;"; // <b>\n"<style>no</style>";\n'
    found = rules(f"<html><style>b{{}}</style><STYLE>i{{}}</STYLE><p>text</p><script>{script}</script></html>")
    assert found["script-src"] == sha(script)
    assert found["style-src"] == f"{sha('b{}')} {sha('i{}')}"


def test_the_policy_allows_nothing_else() -> None:
    assert rules("<p>text</p>") == {
        "default-src": "'none'",
        "script-src": "'none'",
        "style-src": "'none'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_browsers_hash_scripts_with_plain_newlines() -> None:
    assert rules("<script>a\r\nb</script>")["script-src"] == sha("a\nb")
