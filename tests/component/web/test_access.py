"""Who gets which page over real connections: from this host, from beyond it, with and without a token."""

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from gpumgr.common.errors import SettingsError
from gpumgr.web.handlers import PATHS
from gpumgr.web.http_server import HttpServer
from tests.component.web.conftest import HangingFiles, Serve
from tests.component.web.scene import REMOTE, TLS, Scene, get, page_server, parsed, say, status_of

READABLE = [path.format(namespace="team", pod="share") for path in PATHS if not path.startswith(("/api/gpus", "/api/stream"))]


async def statuses(server: HttpServer, **caller: Any) -> dict[str, int]:
    return {path: await status_of(server, path, **caller) for path in READABLE}


async def test_this_host_reads_everything_and_others_metrics_and_probes(serve: Serve) -> None:
    server = await serve()
    assert set((await statuses(server, source="127.0.0.1")).values()) == {200}
    found = await statuses(server, source=REMOTE)
    assert {path for path, status in found.items() if status == 200} == {"/metrics", "/metric", "/healthz", "/readyz"}
    assert {status for status in found.values() if status != 200} == {403}
    forged = get("/api/state", "X-Forwarded-For: 127.0.0.1", "Forwarded: for=127.0.0.1")
    status, told = parsed(await say(server.address, forged, source=REMOTE))
    assert (status, "set http.token_file or http.client_ca_file" in told["error"]) == (403, True)
    assert parsed(await say(server.address, get("/metrics").replace(b"GET", b"POST", 1), source=REMOTE))[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/api/pods/a/b/c",
        "/metrics/..%2fapi/state",
        "/%61pi/state",
        "//graph",
        "/metrics/../graph",
        "/metrics/%2e%2e/graph",
        "/METRICS",
    ],
)
async def test_from_beyond_no_spelling_of_a_path_opens_more(server: HttpServer, path: str) -> None:
    status, told = parsed(await say(server.address, get(path), source=REMOTE))
    assert status == 403
    assert set(told) == {"error"}


async def test_a_token_opens_the_pages(serve: Serve, token_file: Path) -> None:
    server = await serve(token_file=token_file)
    found = await statuses(server, source=REMOTE, token="s3cret")
    assert set(found.values()) == {200}
    found = await statuses(server, source=REMOTE, token="wrong")
    assert {path for path, status in found.items() if status == 200} == {"/healthz", "/readyz"}
    answer = await say(server.address, get("/metrics"), source=REMOTE)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b'\r\nWWW-Authenticate: Bearer realm="gpumgr"\r\n' in answer


async def test_a_new_token_counts_at_once_and_an_empty_file_denies_all_requests(serve: Serve, tmp_path: Path) -> None:
    file, new = tmp_path / "token", tmp_path / "new"
    file.write_text("one")
    server = await serve(token_file=file)

    async def opens(token: str) -> bool:
        return await status_of(server, "/graph", source=REMOTE, token=token) == 200

    new.write_text("second\n")
    os.replace(new, file)
    assert not await opens("one")
    assert await opens("second")
    with capture_logs() as logs:
        file.write_text("")
        assert not await opens("second")
        assert not await opens("second")
        file.unlink()
        assert not await opens("second")
    assert [line["event"] for line in logs] == ["token_unusable", "token_unusable"]
    file.write_text("third")
    assert await opens("third")


async def test_a_stream_ends_when_its_token_is_revoked(serve: Serve, scene: Scene, token_file: Path) -> None:
    server = await serve(token_file=token_file)
    connector = aiohttp.TCPConnector(local_addr=(REMOTE, 0))
    async with (
        aiohttp.ClientSession(server.url, connector=connector, headers={"Authorization": "Bearer s3cret"}) as client,
        client.get("/api/stream") as stream,
    ):
        await stream.content.readuntil(b"\n\n")
        scene.states.set(b'{"at": 2}')
        assert await stream.content.readuntil(b"\n\n") == b'event: state\ndata: {"at": 2}\n\n'
        os.unlink(token_file)
        scene.states.set(b'{"at": 3}')
        async with asyncio.timeout(30):
            assert await stream.content.read() == b""


async def test_a_file_system_that_hangs_stops_no_other_request_and_denies_tokens_until_it_answers(
    serve: Serve, token_file: Path, hanging_files: HangingFiles
) -> None:
    server = await serve(token_file=token_file)

    async def answers(source: str) -> int:
        return await status_of(server, "/graph", source=source, token="s3cret")

    assert await answers(REMOTE) == 200
    hanging_files.hang()
    with capture_logs() as logs:
        waiting = asyncio.create_task(answers(REMOTE))
        await hanging_files.until_read()
        assert await answers("127.0.0.1") == 200
        assert (await waiting, await answers(REMOTE)) == (401, 401)
        assert [line["event"] for line in logs] == ["token_unusable"]
        assert f"{token_file} can't be read: the file system does not answer" in logs[0]["error"]
        hanging_files.release()
        async with asyncio.timeout(30):
            while await answers(REMOTE) != 200:
                pass
        assert logs[-1]["event"] == "token_read_again"


def asked_as(host: str, path: str = "/") -> bytes:
    return get(path).replace(b"Host: localhost", b"Host: " + host.encode())


async def test_a_browser_can_be_led_here_by_no_foreign_name(serve: Serve, tmp_path: Path) -> None:
    server = await serve(unix_socket=tmp_path / "agent.sock", names=("node-1",))
    for path in ("/api/state", "/metrics", "/healthz", "/nowhere"):
        status, told = parsed(await say(server.address, asked_as("evil.example:80", path)))
        assert (status, set(told)) == (403, {"error"})
        assert "not a name of this host" in told["error"]
    for host in ("localhost:1234", "node-1", "127.0.0.1:15990", "[::1]:15990"):
        assert parsed(await say(server.address, asked_as(host, "/api/state")))[0] == 200
    assert parsed(await say(server.address, asked_as("gpumgr.svc", "/healthz"), source=REMOTE))[0] == 200
    connector = aiohttp.UnixConnector(str(tmp_path / "agent.sock"))
    async with aiohttp.ClientSession("http://evil.example", connector=connector) as root, root.get("/api/state") as answer:
        assert answer.status == 200


async def test_unauthenticated_clients_get_the_number_of_reasons_only(serve: Serve, scene: Scene, token_file: Path) -> None:
    path = "/readyz"
    scene.obstacles.append("/var/lib/kubelet/device-plugins/kubelet.sock is not there")
    whole = {"status": "failing", "reasons": ["/var/lib/kubelet/device-plugins/kubelet.sock is not there"]}
    for settings in ({}, {"token_file": token_file}):
        server = await serve(**settings)
        assert parsed(await say(server.address, get(path))) == (503, whole)
        assert parsed(await say(server.address, get(path), source=REMOTE)) == (503, {"status": "failing", "reason_count": 1})
    wrong, right = (get(path, f"Authorization: Bearer {token}") for token in ("wrong", "s3cret"))
    assert parsed(await say(server.address, wrong, source=REMOTE)) == (503, {"status": "failing", "reason_count": 1})
    assert parsed(await say(server.address, right, source=REMOTE)) == (503, whole)
    scene.obstacles.clear()
    assert parsed(await say(server.address, get(path), source=REMOTE)) == (200, {"status": "ok", "reason_count": 0})


async def test_a_token_over_plain_http_is_warned_of_where_others_can_see_it(
    serve: Serve, token_file: Path, tmp_path: Path
) -> None:
    async def warnings(**settings: Any) -> list[dict[str, Any]]:
        with capture_logs() as logs:
            await serve(**settings)
        return [dict(line) for line in logs if line["event"] == "token_in_plain_http"]

    (warning,) = await warnings(address="0.0.0.0", token_file=token_file)
    assert (warning["log_level"], warning["addresses"]) == ("warning", ["0.0.0.0"])
    assert "http.tls_cert_file" in warning["remedy"]
    assert await warnings(address="127.0.0.1", token_file=token_file, unix_socket=tmp_path / "agent.sock") == []
    assert await warnings(address="0.0.0.0", token_file=token_file, **TLS) == []
    assert await warnings(address="0.0.0.0") == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't be read: No such file or directory; name a file that the agent may read, or set http.token_file to null"),
        (b"", "is empty; write a token into it"),
        (b" \n\n", "is empty; write a token into it"),
        (b"two words", "one line of visible ASCII"),
        ("schlüssel".encode(), "one line of visible ASCII"),
        (b"x" * 20_000, "more than 16384 bytes"),
    ],
)
async def test_a_token_file_that_can_not_be_used_ends_the_start(
    scene: Scene, tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        page_server(scene, token_file=file)
    assert str(caught.value).startswith(f"http.token_file {file} ")
    assert words in str(caught.value)


async def test_a_pipe_is_no_token_file_and_blocks_no_request(scene: Scene, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    with pytest.raises(SettingsError, match="is not a regular file"):
        page_server(scene, token_file=tmp_path / "token")
