"""Which format a scrape gets, when something is rendered, and that the bytes are what Prometheus reads."""

import asyncio
import gzip
import threading
import time

import pytest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from gpumgr.agent.node_report import NodeReport
from gpumgr.web.metrics import WANTED_SECONDS, Exposition, Metrics
from gpumgr.web.responses import accepts

from .pictures import allocation, sample_of, view_of

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


class ExpositionInputs:
    """An exposition with node reports and a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.taken = 0
        self.view = view_of(allocation("a", ("team", "share"), cores={0: 1}))
        self.drawn_on = set[int]()
        metrics = Metrics(node="node-1", version="1", clocks=(time.monotonic, self._wall_clock), process=False)
        self.exposition = Exposition(metrics, self._picture, clock=lambda: self.now)

    def _wall_clock(self) -> float:
        self.drawn_on.add(threading.get_ident())
        return 5000.0

    def _picture(self) -> NodeReport:
        self.taken += 1
        return NodeReport(view=self.view, sample=sample_of(0, 1), sampled_at=self.now, nvml_up=True)

    async def text(self, accept: str = "") -> str:
        return (await self.exposition.scrape(accept, ""))[1].decode()


@pytest.mark.parametrize(
    ("header", "name", "expected"),
    [
        (PROMETHEUS_3, "application/openmetrics-text", True),
        ("text/plain;q=0.5, Application/OpenMetrics-Text", "application/openmetrics-text", True),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "application/openmetrics-text", False),
        ("GZIP;q=0.5, br", "gzip", True),
        ("identity, x-gzip", "gzip", False),
        ("", "gzip", False),
        (";;,;q,=", "gzip", False),
    ],
)
def test_the_format_follows_the_headers(header: str, name: str, expected: bool) -> None:
    assert accepts(header, name) is expected


async def test_both_formats_and_both_encodings_are_equivalent() -> None:
    scene = ExpositionInputs()
    for encoding in ("", "gzip"):
        await scene.exposition.scrape("", encoding)
    await scene.exposition.refresh()
    headers, plain = await scene.exposition.scrape("", "")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "Content-Encoding" not in headers
    headers, packed = await scene.exposition.scrape("", "gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == plain
    headers, text = await scene.exposition.scrape(PROMETHEUS_3, "gzip")
    assert headers["Content-Type"] == openmetrics.CONTENT_TYPE_LATEST
    parsed = parse(gzip.decompress(text).decode())  # type: ignore[no-untyped-call]
    families = {family.name for family in parsed}
    assert {"gpumgr_gpu_info", "gpumgr_allocate_requests", "gpumgr_event_loop_lag_seconds"} <= families
    assert all(f"# TYPE {name}" in plain.decode() for name in families)


async def test_pages_are_drawn_beside_the_event_loop() -> None:
    scene = ExpositionInputs()
    await scene.text()
    await scene.exposition.refresh()
    assert scene.drawn_on
    assert threading.get_ident() not in scene.drawn_on


async def test_only_what_was_scraped_lately_is_rendered() -> None:
    scene = ExpositionInputs()
    await scene.exposition.refresh()
    assert scene.taken == 0
    await scene.text()
    scene.now += WANTED_SECONDS
    await scene.exposition.refresh()
    assert scene.taken == 2
    scene.now += 1
    scene.view = view_of()
    await scene.exposition.refresh()
    assert scene.taken == 2
    assert 'pod="share"' not in await scene.text()


async def test_scrapes_that_come_together_share_one_rendering() -> None:
    scene = ExpositionInputs()
    first, second = await asyncio.gather(scene.text(), scene.text())
    assert first == second
    assert scene.taken == 1


async def test_all_formats_of_a_sample_period_are_of_one_picture() -> None:
    scene = ExpositionInputs()

    async def told() -> list[bool]:
        _, packed = await scene.exposition.scrape("", "gzip")
        assert (await scene.exposition.scrape("", "gzip"))[1] is packed
        texts = (await scene.text(), gzip.decompress(packed).decode(), await scene.text(PROMETHEUS_3))
        assert texts[0] == texts[1]
        return ['pod="share"' in text for text in texts]

    for accept, encoding in (("", ""), ("", "gzip"), (PROMETHEUS_3, "")):
        await scene.exposition.scrape(accept, encoding)
    await scene.exposition.refresh()
    scene.view = view_of()
    assert await told() == [True] * 3
    before = scene.taken
    await scene.exposition.refresh()
    assert await told() == [False] * 3
    assert scene.taken == before + 1


async def test_a_page_is_there_while_the_next_is_drawn() -> None:
    scene = ExpositionInputs()
    before = await scene.text()
    refreshing = asyncio.create_task(scene.exposition.refresh())
    await asyncio.sleep(0)
    assert scene.taken == 2
    assert await scene.text() == before
    assert not refreshing.done()
    await refreshing


async def test_without_a_snapshot_only_live_metrics_are_exported() -> None:
    exposition = Exposition(Metrics(node="node-1", version="1", process=False), lambda: None)
    text = (await exposition.scrape("", ""))[1].decode()
    assert "gpumgr_nvml_up 0\n" in text
    assert "gpumgr_build_info" in text
    assert "gpumgr_gpu_info" not in text
