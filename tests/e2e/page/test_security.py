"""The page with hostile names and in restrictive browsers; it sends requests to the agent only."""

from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, expect

from gpumgr.cluster.scheduler.pages import PAGE as CLUSTER_PAGE
from gpumgr.web.responses import PAGE
from tests.e2e.browser import Stage, visit

from .documents import HOSTILE, column, document, loaded, refusal

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_hostile_names_are_text(browser: Browser, stage: Stage) -> None:
    entries = [refusal(number=n, pod=pod, why=pod[1]) for n, pod in enumerate(HOSTILE, start=1)]
    stage.show(document(HOSTILE, entries=entries, failed={1: HOSTILE[0][1]}, used_gib=4.5))
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen, len(HOSTILE))
        names = {"/".join(pod) for pod in HOSTILE}
        assert {name.removesuffix("over its memory") for name in await column(page, 0)} == names
        await expect(page.locator("#feed li")).to_have_count(len(HOSTILE))
        assert await page.locator("#feed p:nth-child(3)").all_text_contents() == [pod[1] for pod in reversed(HOSTILE)]
        assert await page.evaluate("[window.harmed, document.images.length, document.scripts.length]") == [None, 0, 1]
        addresses = await page.evaluate("[...document.querySelectorAll('#rows a')].map((link) => new URL(link.href).origin)")
        assert set(addresses) == {stage.url}
        assert await seen.violations() == []
        assert seen.said == []


async def test_the_page_loads_nothing_from_other_hosts(browser: Browser, stage: Stage) -> None:
    async with visit(browser, stage.url) as seen:
        await loaded(seen)
        await expect(seen.page.locator("#live")).to_have_text("live")
        assert {urlsplit(url).netloc for url in seen.requests if not url.startswith("data:")} == {urlsplit(stage.url).netloc}
        assert {urlsplit(url).path for url in seen.requests if url.startswith("http")} == {"/", "/api/state", "/api/stream"}
        assert await seen.violations() == []
        assert seen.said == []


async def test_without_storage_only_the_theme_is_not_kept(browser: Browser, stage: Stage) -> None:
    forbid = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('forbidden'); } });"
    async with visit(browser, stage.url, before=forbid) as seen:
        page = await loaded(seen)
        await page.get_by_role("button", name="Dark theme").click()
        await expect(page.get_by_role("button", name="Light theme")).to_be_visible()
        assert seen.said == []


async def test_without_scripts_the_page_links_to_the_text(browser: Browser, stage: Stage) -> None:
    async with visit(browser, stage.url, java_script_enabled=False) as seen:
        await expect(seen.page.locator("noscript a")).to_have_attribute("href", "graph?format=text")


@pytest.mark.parametrize(
    ("html", "most_bytes"),
    [(PAGE.read_text(encoding="utf-8"), 81_920), (CLUSTER_PAGE.read_text(encoding="utf-8"), 32_768)],
    ids=["agent", "scheduler"],
)
async def test_the_page_is_one_small_file(html: str, most_bytes: int) -> None:
    assert len(html.encode()) < most_bytes
    assert (html.count("<style"), html.count("<script")) == (1, 1)
    body = html[html.index("<body>") :]
    assert " style=" not in body
    assert not any(f" on{event}=" in body for event in ("click", "input", "load", "error", "change"))
    assert html.replace("http://www.w3.org/2000/svg", "").count("://") == 0  # SVG's name is the only address
    assert "innerHTML" not in html
