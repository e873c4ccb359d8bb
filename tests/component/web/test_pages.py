"""Each page through a real client over loopback: content, access and error messages."""

import asyncio
import platform
from unittest.mock import Mock

import aiohttp
import pytest
from structlog.testing import capture_logs

import gpumgr
from gpumgr.agent.api import PodDetails, to_json_data
from gpumgr.common.errors import InputError
from gpumgr.web.graph import graph_text
from gpumgr.web.handlers import PATHS
from gpumgr.web.http_server import HttpServer
from gpumgr.web.listening import ListenError
from tests.component.web.scene import Scene, page_server

#: The pages that answer at once to a path without names in it.
PLAIN = [path for path in PATHS if "{" not in path and path != "/api/stream"]


@pytest.mark.parametrize("path", ["/metrics", "/metric"])
async def test_metrics_come_as_classic_text_by_default(client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(path) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.headers["Vary"] == "Accept, Accept-Encoding"
        assert "gpumgr_container_core_allocated_ratio{" in await answer.text()


async def test_metrics_come_as_openmetrics_and_compressed_on_request(server: HttpServer) -> None:
    headers = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession(server.url, auto_decompress=False) as client,
        client.get("/metrics", headers=headers) as answer,
    ):
        assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert answer.headers["Content-Encoding"] == "gzip"
        assert (await answer.read()).startswith(b"\x1f\x8b")


@pytest.mark.parametrize(("path", "reasons"), [("/readyz", "obstacles"), ("/readyz?only=driver", "driverless")])
async def test_probes_answer_with_their_reasons(client: aiohttp.ClientSession, scene: Scene, path: str, reasons: str) -> None:
    async with client.get(path) as answer:
        assert answer.status == 200
        assert await answer.json() == {"status": "ok", "reasons": []}
    getattr(scene, reasons).append("tencent.com/vcuda-core is not registered with the kubelet")
    async with client.get(path) as answer:
        assert answer.status == 503
        assert answer.headers["Cache-Control"] == "no-store"
        assert await answer.json() == {
            "status": "failing",
            "reasons": ["tencent.com/vcuda-core is not registered with the kubelet"],
        }
    for other in ("/healthz", "/readyz" if path.endswith("driver") else "/readyz?only=driver"):
        async with client.get(other) as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok", "reasons": []})


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/graph", {"graph": graph_text(Scene().agent_state)}),
        ("/usage", {"usage": {"uid-a": {"project": "team"}}}),
        (
            "/version",
            {
                "version": gpumgr.__version__,
                "python": platform.python_version(),
                "driver": "550.54.15",
                "nvml": "12.550.54.15",
                "cuda": "12.4",
            },
        ),
        ("/api/state", {"at": 1}),
        ("/api/pods/team/share", to_json_data(PodDetails(namespace="team", pod="share", uid="uid-a"))),
    ],
)
async def test_documents_are_shown_as_the_sources_have_them(client: aiohttp.ClientSession, path: str, shown: object) -> None:
    async with client.get(path) as answer:
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
        assert await answer.json() == shown


async def test_graph_can_be_text(client: aiohttp.ClientSession, scene: Scene) -> None:
    async with client.get("/graph?format=text") as answer:
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert await answer.text() == graph_text(scene.agent_state)


@pytest.mark.parametrize(
    ("query", "numbers"), [("", [3, 2, 1]), ("?limit=2", [3, 2]), ("?pod=team/share", [3, 1]), ("?pod=team/share&limit=1", [3])]
)
async def test_history_comes_newest_first(client: aiohttp.ClientSession, query: str, numbers: list[int]) -> None:
    async with client.get(f"/api/history{query}") as answer:
        entries = await answer.json()
    assert [entry["number"] for entry in entries] == numbers
    assert [candidate["index"] for entry in entries for candidate in entry["candidates"]] == ([0] if 1 in numbers else [])


async def test_a_long_history_is_written_beside_the_loop(client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    on_thread = Mock(wraps=asyncio.to_thread)
    monkeypatch.setattr(asyncio, "to_thread", on_thread)
    async with client.get("/api/history?limit=1000") as answer:
        assert len(await answer.json()) == 3
    assert on_thread.call_count == 1


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/api/pods/team/gone", "nothing is known of the pod team/gone"),
        ("/graph?format=svg", "format=svg is not known; allowed: text, json"),
        ("/readyz?only=luck", "only=luck is not known; allowed: driver"),
        ("/api/history?limit=0", "limit is not a whole number from 1 to 1000"),
        ("/api/history?limit=1001", "limit is not a whole number from 1 to 1000"),
        ("/api/history?limit=%2B5", "limit is not a whole number from 1 to 1000"),
        ("/api/history?limit=" + "9" * 5000, "limit is not a whole number from 1 to 1000"),
        ("/api/history?pod=share", "pod 'share' is not of the form NAMESPACE/NAME"),
        ("/api/history?pod=/share", "pod '/share' is not of the form NAMESPACE/NAME"),
    ],
)
async def test_a_wrong_query_is_refused(client: aiohttp.ClientSession, path: str, error: str) -> None:
    async with client.get(path) as answer:
        assert answer.status == (404 if path.startswith("/api/pods") else 400)
        assert await answer.json() == {"error": error}


@pytest.mark.parametrize("path", PLAIN)
async def test_pages_can_only_be_read(client: aiohttp.ClientSession, path: str) -> None:
    async with client.head(path) as answer:
        assert answer.status == 200
        assert int(answer.headers["Content-Length"]) > 0
        assert await answer.read() == b""
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "PROPFIND"):
        async with client.request(method, path, data=b"x") as answer:
            assert answer.status == 405
            assert answer.headers["Allow"] == "GET, HEAD"
            assert await answer.json() == {"error": f"{path} does not take {method}: use GET, HEAD"}


@pytest.mark.parametrize("path", ["/metrics", "/nowhere", "/api/state"])
async def test_every_answer_is_guarded_against_guesses_and_frames(client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(path) as answer:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert answer.headers["Server"] == "gpumgr"


async def test_a_page_that_fails_is_logged_and_not_shown_to_the_client(client: aiohttp.ClientSession, scene: Scene) -> None:
    async def fail() -> None:
        raise ValueError("a secret detail")

    scene.before_scrape = fail
    with capture_logs() as logs:
        async with client.get("/metrics") as answer:
            assert answer.status == 500
            assert await answer.json() == {"error": "the server failed to respond; see its log"}
    assert [(line["event"], line["path"], line["error"]) for line in logs] == [
        ("page_failed", "/metrics", "ValueError('a secret detail')")
    ]


async def test_a_used_port_is_reported_and_nothing_is_left_open(server: HttpServer, scene: Scene) -> None:
    _, port = server.address
    second = page_server(scene, port=port)
    with pytest.raises(ListenError, match=f"can't listen on 127.0.0.1:{port}: .*[aA]ddress already in use") as caught:
        await second.start()
    assert isinstance(caught.value, InputError)
    await second.stop()


async def test_stopping_ends_idle_connections_and_a_request_under_way(scene: Scene) -> None:
    server = page_server(scene, stop_seconds=0.05)
    with pytest.raises(RuntimeError):
        _ = server.address
    await server.start()
    host, port = server.address
    reached, never = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        reached.set()
        await never.wait()

    async with aiohttp.ClientSession(server.url) as client:
        async with client.get("/healthz") as answer:
            await answer.read()
        scene.before_scrape = hang
        stuck = asyncio.ensure_future(client.get("/metrics"))
        await reached.wait()
        await server.stop()
        with pytest.raises(aiohttp.ClientError):
            await stuck
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, port)
    with pytest.raises(RuntimeError):
        _ = server.address
    await server.stop()
