"""The scheduler's page in a real browser, with 5,000 nodes of eight GPUs."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from gpumgr.cluster.core.index import ClusterIndex
from gpumgr.cluster.core.node import GpuState, NodeState
from gpumgr.cluster.core.quota import Quotas
from gpumgr.cluster.core.request import ContainerRequest, PlacedPod, PodRequest
from gpumgr.cluster.scheduler.objects import WatchedNode, WatchedPod, parse_watched_pod
from gpumgr.cluster.scheduler.pages import ClusterPages, application_of
from gpumgr.common.units import Amounts
from gpumgr.placement.devices import Level, Topology
from gpumgr.settings.schema import HttpSettings
from gpumgr.web.http_server import PageServer
from tests.e2e.browser import visit

from .documents import DIM_TEXT, shows

pytestmark = pytest.mark.asyncio(loop_scope="package")

NODES, GPUS = 5000, 8
MODELS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA L40S")
TOPOLOGY = Topology(levels=((Level.SYS,) * GPUS,) * GPUS, nvlinks=((0,) * GPUS,) * GPUS)
SHARE = PodRequest((ContainerRequest(cores_per_gpu=60, memory_mebibytes=4096),))
UNNAMED = """[...document.querySelectorAll("button, input, select")]
  .filter((each) => !(each.labels || []).length && !each.textContent.trim()).map((each) => each.outerHTML)"""
HOSTILE = "<img src=x onerror='window.harmed = 1'>"


def name_of(node: int) -> str:
    return f"gpu-node-{node:04}"


class NoApiServer:
    """Holds the pods that /api/why reads."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}

    async def read(self, _method: str, path: str) -> dict[str, Any]:
        return self.pods[path.rpartition("/")[2]]


@dataclass
class Watched:
    """As ClusterWatches, without watches."""

    index: ClusterIndex
    synced: bool = True
    problem: str | None = None
    nodes: dict[str, WatchedNode] = field(default_factory=dict)
    pending: dict[str, WatchedPod] = field(default_factory=dict)
    quotas: Quotas = field(default_factory=Quotas)

    def parse_pod(self, item: dict[str, Any]) -> WatchedPod:
        return parse_watched_pod(item)


class ClusterStage:
    """Every second GPU is used by 60 %; node 7 is not ready, node 9 has a cordoned and an unhealthy GPU."""

    def __init__(self) -> None:
        self.server, self.index = NoApiServer(), ClusterIndex()
        self.watched = Watched(self.index)
        for node in range(NODES):
            self.put(node)
        self.wait("large", PodRequest((ContainerRequest(gpus=9, cores_per_gpu=100),)))
        self.wait("scattered", PodRequest((ContainerRequest(gpus=5, cores_per_gpu=100),)))
        self.wait(HOSTILE, SHARE)
        pages = ClusterPages(self.server, self.watched, "binpack")  # type: ignore[arg-type]
        self.web = PageServer(partial(application_of, pages.routes(), self.watched), HttpSettings(port=0))  # type: ignore[arg-type]

    def put(self, node: int) -> None:
        name = name_of(node)
        gpus = tuple(
            GpuState(
                uuid=f"GPU-{node}-{gpu}",
                model=MODELS[node % 3],
                memory_mebibytes=40960,
                healthy=(node, gpu) != (9, 1),
                cordoned=(node, gpu) == (9, 0),
            )
            for gpu in range(GPUS)
        )
        state = NodeState(name=name, gpus=gpus, topology=TOPOLOGY)
        self.index.set_node(state)
        self.watched.nodes[name] = WatchedNode(uid=name, state=state, inventory="used", ready=node != 7)
        for gpu in range(0, GPUS, 2):
            shares = (((f"GPU-{node}-{gpu}", Amounts(60, 4096)),),)
            self.index.bind(PlacedPod(uid=f"uid-{node}-{gpu}", node=name, request=SHARE, shares=shares))

    def wait(self, name: str, request: PodRequest) -> None:
        self.watched.pending[name] = WatchedPod(uid=name, namespace="team", name=name, request=request, containers=("main",))


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def many() -> AsyncIterator[ClusterStage]:
    stage = ClusterStage()
    await stage.web.start()
    yield stage
    await stage.web.stop()


async def loaded(page: Page) -> Page:
    await expect(page.locator("#live")).to_have_text("live")
    await expect(page.locator("#stats")).to_contain_text("40,000")
    return page


async def pixels(page: Page) -> int:
    """How many different colours the map has."""
    found: int = await page.evaluate("""() => {
      const map = document.getElementById("cells"), data = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
      return new Set(new Uint32Array(data.buffer)).size;
    }""")
    return found


async def test_the_map_has_all_nodes_and_the_filter_narrows_it(browser: Browser, many: ClusterStage) -> None:
    async with visit(browser, many.web.url) as seen:
        page = await loaded(seen.page)
        await expect(page.locator("#count")).to_have_text("5,000 nodes")
        assert await pixels(page) > 3
        assert await page.locator("*").count() < 500, "the map is drawn, not made of elements"
        for label, value, text in (
            ("Filter", "node-123 h100", "4 of 5,000 nodes, 32 GPUs"),
            ("Filter", "nowhere", "0 of 5,000 nodes, 0 GPUs"),
        ):
            await page.get_by_label(label).fill(value)
            await expect(page.locator("#count")).to_have_text(text)
        await expect(page.locator("#nomap")).to_have_text("No node matches the filter.")
        await page.get_by_label("Filter").fill("")
        await page.get_by_label("Model").select_option("NVIDIA L40S")
        await expect(page.locator("#count")).to_have_text("1,666 of 5,000 nodes, 13,328 GPUs")
        await page.get_by_label("Model").select_option("")
        for state, count in (("closed", "1 of"), ("trouble", "1 of"), ("full", "0 of"), ("free", "5,000")):
            await page.get_by_label("State").select_option(state)
            await expect(page.locator("#count")).to_contain_text(count)
        assert seen.said == []
        assert await seen.violations() == []


async def test_a_node_is_reached_by_keys_and_by_pointer(browser: Browser, many: ClusterStage) -> None:
    async with visit(browser, many.web.url) as seen:
        page = await loaded(seen.page)
        await page.locator("#map").focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#detail")).to_contain_text("gpu-node-0000")
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#aloud")).to_contain_text("gpu-node-0001: GPU 0 60 cores used; GPU 1 0 cores used")
        await page.keyboard.press("End")
        await expect(page.locator("#detail")).to_contain_text("gpu-node-4999")
        assert await page.locator("#map").evaluate("map => map.scrollTop") > 1000
        await page.get_by_label("Filter").fill("node-0009")
        await page.locator("#map").hover(position={"x": 30, "y": 20})
        await expect(page.locator("#detail li")).to_have_text(
            [
                "GPU 0 60 of 100 cores, 4 of 40 GiB, cordoned",
                "GPU 1 0 of 100 cores, 0 of 40 GiB, unhealthy",
                *[
                    f"GPU {gpu} {'0' if gpu % 2 else '60'} of 100 cores, {'0' if gpu % 2 else '4'} of 40 GiB"
                    for gpu in range(2, 8)
                ],
            ]
        )


async def test_waiting_pods_have_their_reasons(browser: Browser, many: ClusterStage) -> None:
    container = {"name": "main", "resources": {"limits": {"tencent.com/vcuda-core": "500"}}}
    many.server.pods["scattered"] = {
        "metadata": {"name": "scattered", "namespace": "team", "uid": "scattered"},
        "spec": {"containers": [container]},
        "status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/5000 nodes are available"}]},
    }
    async with visit(browser, many.web.url) as seen:
        page = await loaded(seen.page)
        rows = page.locator("#pods tr")
        await expect(rows).to_have_count(3)
        await expect(rows.filter(has_text="team/large")).to_contain_text("No node has enough in total")
        scattered = rows.filter(has_text="team/scattered")
        await expect(scattered).to_contain_text("Nodes have enough in total, but not on GPUs that it can use")
        await expect(rows.filter(has_text=HOSTILE)).to_contain_text("GPUs are free")
        assert await page.evaluate("[window.harmed, document.images.length]") == [None, 0]
        await scattered.get_by_role("button").click()
        await expect(scattered.locator("li").first).to_contain_text("nodes: fewer than 5 entirely free GPUs")
        await expect(scattered.locator("li").last).to_have_text("kube-scheduler: 0/5000 nodes are available")


async def test_changes_are_shown(browser: Browser, many: ClusterStage) -> None:
    async with visit(browser, many.web.url) as seen:
        page = await loaded(seen.page)
        await page.get_by_label("Filter").fill("node-0008")
        await page.get_by_label("State").select_option("partial")
        await expect(page.locator("#count")).to_contain_text("1 of")
        many.wait("late", SHARE)
        for gpu in range(0, GPUS, 2):
            many.index.remove(f"uid-8-{gpu}")
        await expect(page.locator("#pods tr")).to_have_count(4)
        await expect(page.locator("#count")).to_contain_text("0 of")
        del many.watched.pending["late"]


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_text_has_contrast_and_controls_have_names(browser: Browser, many: ClusterStage, theme: Any) -> None:
    async with visit(browser, many.web.url, color_scheme=theme) as seen:
        page = await loaded(seen.page)
        assert await page.evaluate(DIM_TEXT) == []
        assert await page.evaluate(UNNAMED) == []
        await page.get_by_role("button", name="theme").click()
        await expect(page.locator("html")).to_have_attribute("data-theme", "dark" if theme == "light" else "light")
        assert await page.evaluate(DIM_TEXT) == []


async def test_a_narrow_page_does_not_scroll_sideways(browser: Browser, many: ClusterStage) -> None:
    async with visit(browser, many.web.url, viewport={"width": 390, "height": 844}) as seen:
        page = await loaded(seen.page)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390


async def test_a_scheduler_that_does_not_answer_is_reported(browser: Browser, many: ClusterStage) -> None:
    async with visit(browser, many.web.url) as seen:
        page = await loaded(seen.page)
        await page.route("**/api/cluster*", lambda route: route.fulfill(status=503, json={"error": "not now"}))
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await shows(page.locator("#live"), "stale", "not now")
