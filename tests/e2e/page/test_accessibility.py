"""Whom the page reaches: by keyboard, by screen reader, on any width, in either theme, with enough contrast, without motion."""

import re
from itertools import pairwise

import pytest
from playwright.async_api import Browser, expect

from gpumgr.agent.api import Cordon
from tests.e2e.browser import Stage, visit
from tests.node_reports import NOW, PODS
from tests.unit.web.metrics.pictures import name_of, uuid_of

from .documents import DIM_TEXT, HOSTILE, document, loaded, opened, refusal

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("width", [320, 360, 768, 1024, 1920])
async def test_no_horizontal_scrolling_at_any_width(browser: Browser, stage: Stage, width: int) -> None:
    shown = document((*PODS, *HOSTILE), entries=[refusal(pod=pod, why="y" * 300) for pod in HOSTILE], gone=5, used_gib=4.5)
    async with opened(
        browser, stage, shown, containers=len(PODS) + len(HOSTILE), viewport={"width": width, "height": 740}
    ) as page:
        assert await page.evaluate("document.documentElement.scrollWidth") == width


async def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser, stage: Stage) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with visit(browser, stage.url, color_scheme="dark") as seen:
        page = await loaded(seen)
        body = expect(page.locator("body"))
        dark = await page.evaluate(ground)
        await page.emulate_media(color_scheme="light")
        await body.not_to_have_css("background-color", dark)
        light = await page.evaluate(ground)
        await page.get_by_role("button", name="Dark theme").click()
        await body.to_have_css("background-color", dark)
        await page.reload()
        await loaded(seen)
        await body.to_have_css("background-color", dark)
        await page.get_by_role("button", name="Light theme").click()
        await body.to_have_css("background-color", light)


async def test_reduced_motion_switches_animations_off(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage, reduced_motion="reduce") as page:
        moving = "[...document.querySelectorAll('*')].filter((node) => parseFloat(getComputedStyle(node).transitionDuration) > 0).length"
        assert await page.evaluate(moving) == 0
        assert await page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


async def test_every_control_gets_a_visible_focus_by_keyboard(browser: Browser, stage: Stage) -> None:
    stage.show(document([("team", f"pod-{n:02}") for n in range(40)], entries=[refusal()]))
    mark = """[...document.querySelectorAll("a[href], button, input, [tabindex='0']")].filter((node) => node.checkVisibility())
        .map((node, n) => node.dataset.mark = `${n} ${node.id || node.getAttribute("href") || node.textContent}`)"""
    focused = """() => {
        const node = document.activeElement, style = getComputedStyle(node);
        return [node.dataset.mark, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
    }"""
    async with opened(browser, stage, containers=40) as page:
        wanted = await page.evaluate(mark)
        reached: dict[str, bool] = {}
        for _ in wanted:
            await page.keyboard.press("Tab")
            what, visible = await page.evaluate(focused)
            reached[what] = visible
        assert list(reached) == wanted
        assert [what for what, visible in reached.items() if not visible] == []
        assert [what.split()[1] for what in wanted[:3]] == ["#main", "filter", "theme"]


async def test_a_gpu_of_the_topology_links_to_its_card(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage) as page:
        link = page.get_by_role("link", name="GPU6: well, free")
        await link.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator(f"#gpu-{name_of(6)}")).to_be_in_viewport()
        await expect(page.locator(f"#gpu-{name_of(6)}")).to_be_focused()


async def test_landmarks_and_labels_for_screen_readers(browser: Browser, stage: Stage) -> None:
    async with opened(
        browser, stage, document([("team", f"pod-{n:02}") for n in range(40)], entries=[refusal()]), containers=40
    ) as page:
        for role in ("banner", "main", "search", "contentinfo", "status"):
            await expect(page.get_by_role(role)).to_have_count(1)
        await expect(page.get_by_role("heading", level=1)).to_have_text("node-1")
        levels = await page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((node) => Number(node.tagName[1]))")
        assert all(deeper - before <= 1 for before, deeper in pairwise(levels))
        nameless = """[...document.querySelectorAll("a[href], button, input, [role=img], [role=region], nav, article")].filter((node) =>
            !(node.getAttribute("aria-label") || node.labels?.[0]?.textContent || node.textContent.trim()
              || document.getElementById(node.getAttribute("aria-labelledby"))?.textContent)).length"""
        assert await page.evaluate(nameless) == 0
        labelled = """[...document.querySelectorAll("[aria-labelledby], [for]")].filter((node) =>
            !document.getElementById(node.getAttribute("aria-labelledby") || node.getAttribute("for"))).length"""
        assert await page.evaluate(labelled) == 0
        await expect(page.get_by_role("table")).to_have_accessible_name(re.compile("granted and used amounts"))
        assert await page.locator("th:not([scope=col])").count() == 0
        assert await page.evaluate("document.documentElement.lang") == "en"
        twice = """[...document.querySelectorAll("[id]")].map((node) => node.id).filter((id, n, all) => all.indexOf(id) !== n)"""
        assert await page.evaluate(twice) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_text_has_enough_contrast(browser: Browser, stage: Stage, scheme: str) -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1, and 3 to 1 for large text."""
    shown = document(entries=[refusal()], gone=5, failed={1: "XID 79"}, cordons={uuid_of(2): Cordon(since=NOW)}, used_gib=4.5)
    async with opened(browser, stage, shown, color_scheme=scheme) as page:
        await expect(page.locator("#live")).to_have_text("live")
        await page.get_by_label("Filter").fill("")
        assert await page.evaluate(DIM_TEXT) == []
