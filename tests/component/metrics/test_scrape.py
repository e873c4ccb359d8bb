"""The whole of it over real HTTP, as Prometheus asks: both formats, compressed, on both of the routes' handlers' one source."""

import gzip
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from gpumgr.agent.node_report import NodeReport
from gpumgr.metrics.exposition import Exposition
from gpumgr.metrics.registry import Metrics
from tests.unit.metrics.pages import full_picture
from tests.unit.metrics.pictures import allocation, view_of

PROMETHEUS = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5"
HOSTILE = ('say "hi"\\', "two\nlines " + "x" * 244)


class Node:
    """The agent's metrics behind a web server, with a picture that the test holds."""

    def __init__(self) -> None:
        self.report: NodeReport | None = full_picture()
        self.metrics = Metrics(node="node-1", version="1", hami_names=True)
        self.exposition = Exposition(self.metrics, lambda: self.report)
        self.url = ""

    async def scrape(self, request: web.Request) -> web.Response:
        headers, body = await self.exposition.scrape(
            request.headers.get("Accept", ""), request.headers.get("Accept-Encoding", "")
        )
        return web.Response(body=body, headers=headers)

    async def names(self, **headers: str) -> set[tuple[str, str]]:
        """(name, pod) of all series."""
        async with aiohttp.ClientSession() as session, session.get(self.url, headers=headers) as answer:
            text = await answer.text()
            modern = answer.content_type == "application/openmetrics-text"
        families: Any = parse_openmetrics(text) if modern else parse_classic(text)  # type: ignore[no-untyped-call]
        return {(each.name, each.labels.get("pod", "")) for family in families for each in family.samples}


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    app = web.Application()
    app.router.add_get("/metrics", node.scrape)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    node.url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    try:
        yield node
    finally:
        await runner.cleanup()


async def test_both_formats_have_the_same_series(node: Node) -> None:
    classic = await node.names()
    modern = await node.names(Accept=PROMETHEUS)
    assert classic == modern
    assert {("gpumgr_container_over_limit_ratio", "web"), ("gpumgr_api_writes_total", "")} <= classic
    assert {("container_gpu_memory_total", ""), ("hami_vgpu_memory_used_bytes", "web")} <= classic
    assert ("process_cpu_seconds_total", "") in classic


async def test_a_pod_of_any_name_comes_through_and_is_gone_with_the_next_page(node: Node) -> None:
    assert node.report is not None
    hostile = view_of(allocation("a", HOSTILE, cores={0: 1}, blocks={0: 1}))
    node.report = replace(node.report, view=hostile)
    for accept in ("", PROMETHEUS):
        assert ("gpumgr_container_memory_allocated_bytes", HOSTILE[1]) in await node.names(Accept=accept)
    node.report = replace(node.report, view=view_of())
    await node.exposition.refresh()
    for accept in ("", PROMETHEUS):
        assert {pod for _, pod in await node.names(Accept=accept)} == {""}


async def test_prometheus_gets_it_compressed(node: Node) -> None:
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(node.url, headers={"Accept": PROMETHEUS, "Accept-Encoding": "gzip"}) as answer,
    ):
        body = await answer.read()
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.headers["Vary"] == "Accept, Accept-Encoding"
    assert gzip.decompress(body).endswith(b"# EOF\n")
    assert len(body) < len(gzip.decompress(body)) / 5


async def test_before_the_driver_was_met_there_is_a_page_too(node: Node) -> None:
    node.report = None
    assert {("gpumgr_nvml_up", ""), ("gpumgr_agent_ready", ""), ("gpumgr_build_info", "")} <= await node.names()
