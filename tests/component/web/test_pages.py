"""Each page through a real client over loopback: what it says, to whom, and in which words it refuses."""

import asyncio
import json
import platform
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import pytest

import gpumgr
from gpumgr.agent.picture import Picture
from gpumgr.errors import InputError
from gpumgr.metrics.exposition import Exposition
from gpumgr.metrics.live import Metrics
from gpumgr.web.pages import PATHS
from gpumgr.web.server import ListenError, WebServer
from tests.unit.metrics.pictures import allocation, sample_of, uuid_of, view_of, whole


class Scene:
    """Sources that the test holds."""

    def __init__(self) -> None:
        self.ailments: list[str] = []
        self.obstacles: list[str] = []
        self.books = view_of(
            allocation("a", ("team", "share"), cores={0: 0b111}, blocks={0: 0b1}), whole("b", ("team", "train"), 1)
        )
        self.before_scrape: Callable[[], Awaitable[object]] | None = None
        self._exposition = Exposition(Metrics(node="node-1", version="1"), lambda: Picture(view=self.books, sample=sample_of(0)))

    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        if self.before_scrape is not None:
            await self.before_scrape()
        return await self._exposition.scrape(accept, accept_encoding)

    def not_alive(self) -> Sequence[str]:
        return self.ailments

    def not_ready(self) -> Sequence[str]:
        return self.obstacles

    def view(self) -> Any:
        return self.books


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
async def server(scene: Scene) -> AsyncIterator[WebServer]:
    server = WebServer(scene, host="127.0.0.1", port=0, stop_seconds=0.2)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: WebServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


@pytest.mark.parametrize("path", ["/metrics", "/metric"])
async def test_metrics_come_as_classic_text_by_default(client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(path) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.headers["Vary"] == "Accept, Accept-Encoding"
        assert 'gpumgr_container_core_allocated_ratio{container="main"' in await answer.text()


async def test_metrics_come_as_openmetrics_and_compressed_when_asked(server: WebServer) -> None:
    headers = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession(server.url, auto_decompress=False) as client,
        client.get("/metrics", headers=headers) as answer,
    ):
        assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert answer.headers["Content-Encoding"] == "gzip"
        assert (await answer.read()).startswith(b"\x1f\x8b")


@pytest.mark.parametrize(("path", "reasons"), [("/healthz", "ailments"), ("/readyz", "obstacles")])
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


async def test_version(client: aiohttp.ClientSession) -> None:
    async with client.get("/version") as answer:
        assert await answer.json() == {
            "version": gpumgr.__version__,
            "python": platform.python_version(),
            "driver": "550.54.15",
            "nvml": "12.550.54.15",
            "cuda": "12.4",
        }


async def test_graph_is_text_for_people(client: aiohttp.ClientSession) -> None:
    async with client.get("/graph") as answer:
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        text = await answer.text()
    assert text.splitlines() == [
        "ROOT:0:0",
        "|--PHB:0:0",
        "|  |--GPU0:0:1",
        f"|  |     NVIDIA A10, {uuid_of(0)}: 97 of 100 cores and 7 of 8 memory blocks free",
        "|  |     team/share/main: 3 cores, 1 memory blocks",
        "|  |--GPU1:0:1",
        f"|  |     NVIDIA A10, {uuid_of(1)}: 0 of 100 cores and 0 of 8 memory blocks free",
        "|  |     team/train/main: 100 cores, 0 memory blocks",
    ]


@pytest.mark.parametrize(
    ("query", "headers"), [("?format=json", {}), ("", {"Accept": "application/json"})], ids=["by query", "by Accept"]
)
async def test_graph_is_data_for_scripts(client: aiohttp.ClientSession, query: str, headers: Mapping[str, str]) -> None:
    async with client.get(f"/graph{query}", headers=headers) as answer:
        assert answer.content_type == "application/json"
        graph = await answer.json()
    assert graph["tree"]["name"] == "ROOT"
    assert graph["missing"] == []
    leaf = graph["tree"]["children"][0]["children"][0]
    assert leaf["name"] == "GPU0"
    assert leaf["gpu"]["cores_free"] == 97
    assert [(h["pod"], h["cores"], h["memory_blocks"]) for h in leaf["gpu"]["holders"]] == [("share", 3, 1)]


async def test_an_unknown_graph_format_is_told(client: aiohttp.ClientSession) -> None:
    async with client.get("/graph?format=svg") as answer:
        assert answer.status == 400
        assert await answer.json() == {"error": "format 'svg' is none of: text, json"}


@pytest.mark.parametrize("path", PATHS)
async def test_head_answers_without_a_body(client: aiohttp.ClientSession, path: str) -> None:
    async with client.head(path) as answer:
        assert answer.status == 200
        assert int(answer.headers["Content-Length"]) > 0
        assert await answer.read() == b""


@pytest.mark.parametrize("path", PATHS)
async def test_pages_can_only_be_read(client: aiohttp.ClientSession, path: str) -> None:
    async with client.post(path, data=b"x") as answer:
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET, HEAD"
        assert await answer.json() == {"error": f"{path} can only be read: use GET, HEAD"}


async def test_elsewhere_is_nothing(client: aiohttp.ClientSession) -> None:
    async with client.get("/") as answer:
        assert answer.status == 404
        assert await answer.json() == {"error": "there is nothing at /", "paths": list(PATHS)}
        assert "Server" not in answer.headers


async def test_a_used_port_is_told_and_nothing_is_left_open(server: WebServer, scene: Scene) -> None:
    host, port = server.address
    second = WebServer(scene, host=host, port=port)
    with pytest.raises(ListenError, match=f"can't listen on 127.0.0.1:{port}: another process listens there") as caught:
        await second.start()
    assert isinstance(caught.value, InputError)
    await second.stop()


async def test_an_address_of_another_machine_is_told(scene: Scene) -> None:
    with pytest.raises(ListenError, match="no such address"):
        await WebServer(scene, host="192.0.2.1", port=0).start()


async def test_stopping_ends_idle_connections_and_a_request_under_way(scene: Scene) -> None:
    server = WebServer(scene, host="127.0.0.1", port=0, stop_seconds=0.05)
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
    await server.stop()


async def test_the_address_is_known_only_while_it_listens(scene: Scene) -> None:
    server = WebServer(scene, host="::1" if _has_ipv6() else "127.0.0.1", port=0)
    with pytest.raises(RuntimeError):
        _ = server.address
    await server.start()
    async with aiohttp.ClientSession() as client, client.get(f"{server.url}/healthz") as answer:
        assert json.loads(await answer.text())["status"] == "ok"
    await server.stop()
    with pytest.raises(RuntimeError):
        _ = server.address


def _has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True
