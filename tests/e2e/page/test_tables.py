"""The table of containers: its filter, its order, its portions."""

import pytest
from playwright.async_api import Browser, expect

from tests.e2e.browser import Stage
from tests.node_reports import NOW, PODS
from tests.unit.web.metrics.pictures import name_of

from .documents import column, document, opened, refusal

pytestmark = pytest.mark.asyncio(loop_scope="package")


FILTERED = {
    "team/": ["team/train", "team/web"],
    "RANK": ["search/rank"],
    "GPU3": ["search/rank"],
    "gpu 3": ["search/rank"],
    "search mps": ["search/rank"],
    "hami": ["batch/night", "search/embed", "team/train"],
    "main": sorted("/".join(pod) for pod in PODS),
    "nowhere": [],
}


async def test_the_filter_narrows_containers_and_decisions(browser: Browser, stage: Stage) -> None:
    async with opened(
        browser, stage, document(entries=[refusal(number=n, pod=pod) for n, pod in enumerate(PODS, start=1)])
    ) as page:
        for text, pods in FILTERED.items():
            await page.get_by_label("Filter").fill(text)
            await expect(page.locator("#rows tr")).to_have_count(len(pods))
            assert await column(page, 0) == pods
            if text == "RANK":
                await expect(page.locator("#feed li")).to_have_count(1)
                await expect(page.locator("#count")).to_have_text("1 of 5 match")
        await expect(page.locator("#norows")).to_have_text("No container matches the filter.")
        await page.get_by_label("Filter").fill("")
        await expect(page.locator("#rows tr")).to_have_count(5)


@pytest.mark.parametrize(("gone", "shown"), [(None, "GPU2"), (2, f"GPU {name_of(2)}")], ids=["by index", "without an index"])
async def test_a_card_filters_the_table_by_its_gpu(browser: Browser, stage: Stage, gone: int | None, shown: str) -> None:
    async with opened(browser, stage, document([("team", f"pod-{n:02}") for n in range(60)], gone=gone), containers=60) as page:
        await page.locator(f"#gpu-{name_of(2)}").get_by_role("button", name="4 more in the table").click()
        await expect(page.locator("#rows tr")).to_have_count(8)
        assert set(await column(page, 2)) == {shown}
        if gone is None:
            await expect(page.get_by_label("Filter")).to_have_value(shown)


async def test_every_column_sorts_both_ways(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage) as page:
        assert await column(page, 0) == sorted("/".join(pod) for pod in PODS)
        for number, head in enumerate(await page.locator("th").all()):
            if not await head.is_visible():
                continue
            for _ in range(2):
                await head.get_by_role("button").click()
                way = await head.get_attribute("aria-sort")
                assert await page.locator("th[aria-sort]").count() == 1
                shown = await column(page, number)
                if number in (0, 1, 2, 10, 12):
                    assert shown == sorted(shown, reverse=way == "descending"), (number, way)
        await page.get_by_role("button", name="Memory", exact=True).click()
        assert (await column(page, 7))[0] == "80.0 GiB"
        await page.get_by_role("button", name="Since").click()
        assert await column(page, 11) == ["0 s", "60 s", "2 min", "3 min", "4 min"]


async def test_large_tables_are_shown_in_portions(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage, document([("team", f"pod-{n:04}") for n in range(1600)]), containers=200) as page:
        await expect(page.locator("#count")).to_have_text("1,600")
        await page.get_by_role("button", name="Show all 1,600").click()
        await expect(page.locator("#rows tr")).to_have_count(1600)
        await page.get_by_label("Filter").fill("pod-1234")
        await expect(page.locator("#rows tr")).to_have_count(1)


@pytest.mark.parametrize("width", [320, 1280])
async def test_turns_have_columns_where_the_limiter_limits(browser: Browser, stage: Stage, width: int) -> None:
    async with opened(browser, stage, viewport={"width": width, "height": 740}) as page:
        waited = page.get_by_role("button", name="Time waited")
        await expect(waited).to_be_hidden()
        shown = document()
        for row, held in zip(shown["containers"], (None, 0.0, 0.238), strict=False):
            row["held_ratio"], row["waited_ratio"] = held, held and 0.61
        stage.show({**shown, "at": NOW + 1})
        await waited.click()
        assert sorted(await column(page, 5)) == ["", "", "", "0", "24"]
        assert (await column(page, 6))[:2] == ["61 %", "0 %"]
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        assert await page.evaluate("(box => box.scrollWidth - box.clientWidth)(document.querySelector('.tablebox'))") <= 0
