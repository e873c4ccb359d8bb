"""Who gets which page over real connections: from this host, from beyond it, with and without a token."""

import os
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs

from gpumgr.errors import SettingsError
from gpumgr.web.pages import PATHS
from gpumgr.web.server import WebServer
from tests.component.web.conftest import Serve
from tests.component.web.scene import BEYOND, Scene, get, parsed, say

READABLE = [path.format(namespace="team", pod="share") for path in PATHS if not path.startswith(("/api/gpus", "/api/stream"))]


async def statuses(server: WebServer, *, source: str, token: str | None = None, paths: list[str] = READABLE) -> dict[str, int]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connector = aiohttp.TCPConnector(local_addr=(source, 0))
    async with aiohttp.ClientSession(server.url, connector=connector, headers=headers) as client:
        found = {}
        for path in paths:
            async with client.get(f"{path}?seconds=1" if path == "/debug/profile" else path) as answer:
                found[path] = answer.status
                assert answer.status == 200 or set(await answer.json()) == {"error"}
        return found


async def test_this_host_reads_everything(serve: Serve) -> None:
    assert set((await statuses(await serve(), source="127.0.0.1")).values()) == {200}


async def test_from_beyond_only_metrics_and_probes(serve: Serve) -> None:
    found = await statuses(await serve(), source=BEYOND)
    assert {path for path, status in found.items() if status == 200} == {"/metrics", "/metric", "/healthz", "/readyz"}
    assert {status for status in found.values() if status != 200} == {403}


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/api/pods/a/b/c",
        "/metrics/..%2fdebug/stacks",
        "/%64ebug/stacks",
        "//graph",
        "/metrics/../graph",
        "/metrics/%2e%2e/graph",
        "/METRICS",
    ],
)
async def test_from_beyond_no_spelling_of_a_path_opens_more(server: WebServer, path: str) -> None:
    status, told = parsed(await say(server.address, get(path), source=BEYOND))
    assert status == 403
    assert set(told) == {"error"}


async def test_the_closed_door_says_how_to_open_it_and_the_kubelet_gets_in(serve: Serve) -> None:
    server = await serve()
    connector = aiohttp.TCPConnector(local_addr=(BEYOND, 0))
    async with aiohttp.ClientSession(server.url, connector=connector) as client:
        async with client.get("/api/state", headers={"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"}) as answer:
            assert answer.status == 403
            assert "set http.token_file or http.client_ca_file" in (await answer.json())["error"]
        async with client.post("/metrics") as answer:
            assert answer.status == 403


async def test_a_token_opens_what_is_no_debug_page(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    server = await serve(token_file=file)
    found = await statuses(server, source=BEYOND, token="s3cret")
    assert {path for path, status in found.items() if status != 200} == {"/debug/stacks", "/debug/profile"}
    found = await statuses(server, source=BEYOND, token="wrong")
    assert {path for path, status in found.items() if status == 200} == {"/healthz", "/readyz"}
    assert {found["/metrics"], found["/"], found["/debug/stacks"]} == {401, 403}
    assert set((await statuses(server, source="127.0.0.1", paths=["/", "/metrics"])).values()) == {200}


async def test_without_a_token_the_client_is_asked_for_one(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret")
    server = await serve(token_file=file)
    async with (
        aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(local_addr=(BEYOND, 0))) as client,
        client.get("/metrics") as answer,
    ):
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"] == 'Bearer realm="gpumgr"'


async def test_a_new_token_counts_at_once_and_an_empty_file_lets_nobody_in(serve: Serve, tmp_path: Path) -> None:
    file, new = tmp_path / "token", tmp_path / "new"
    file.write_text("one")
    server = await serve(token_file=file)

    async def opens(token: str) -> bool:
        return (await statuses(server, source=BEYOND, token=token, paths=["/graph"]))["/graph"] == 200

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
        WebServer(scene, host="127.0.0.1", port=0, token_file=file)
    assert str(caught.value).startswith(f"http.token_file {file} ")
    assert words in str(caught.value)


async def test_a_pipe_is_no_token_file_and_blocks_nobody(scene: Scene, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    with pytest.raises(SettingsError, match="is not a plain file"):
        WebServer(scene, host="127.0.0.1", port=0, token_file=tmp_path / "token")
