"""The details of a pod, opened by its name: with mouse, keyboard and screen reader, for any name, known or unknown."""

from typing import Any

import pytest
from msgspec.structs import replace
from playwright.async_api import Browser, Page, expect

from gpumgr.agent.api import to_json_data
from gpumgr.ledger.history import Candidate, HistoryEntry
from gpumgr.placement.pods import ContainerSpec, PodKey, PodView
from gpumgr.web.state import pod_details
from tests.e2e.browser import Stage, visit
from tests.node_reports import NOW, PODS, report
from tests.unit.web.metrics.pictures import name_of

from .documents import DIM_TEXT, HOSTILE, document, loaded, opened, refusal, shows

pytestmark = pytest.mark.asyncio(loop_scope="package")

LATE: PodKey = ("team", "late")
WEB: PodKey = ("team", "web")


def refused() -> HistoryEntry:
    """With the events of the GPUs, also of one without an index of the driver."""
    room = tuple(
        Candidate(
            gpu=name_of(n), index=n or None, cores_free=10 * n, memory_mebibytes_free=1024, note="cordoned" if n == 2 else None
        )
        for n in range(3)
    )
    return replace(refusal(7, LATE), container="main", candidates=room)


def told(
    pod: PodKey, *entries: HistoryEntry, phase: str = "Running", pods: tuple[PodKey, ...] = PODS, **about: Any
) -> dict[str, Any]:
    view = PodView(
        namespace=pod[0],
        name=pod[1],
        uid="uid-1",
        phase=phase,
        containers=(ContainerSpec(name="main", cores=9, memory_blocks=16),),
        **about,
    )
    found = pod_details(report(pods), view, *pod, list(entries))
    assert found is not None
    return to_json_data(found)


async def test_a_pods_name_opens_its_details(browser: Browser, stage: Stage) -> None:
    granted = replace(refusal(3, WEB, why="the least free room that fits"), what="granted", size=9, gpus=(name_of(1),), code="")
    stage.remember(told(WEB, granted))
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        await page.locator("#rows").get_by_role("link", name="team/web").click()
        dialog = page.get_by_role("dialog", name="team/web")
        await expect(dialog).to_be_visible()
        await shows(dialog.locator("dl"), "PodRunning", "Requestsmain: 9 cores, 16 memory blocks", "UIDuid-1")
        await shows(dialog.locator("ul.feed li"), "5 of 9 cores, 2.0 of 4.0 GiB; limited by mps", "GPU1")
        await expect(dialog.locator("ol li")).to_contain_text("9 cores on GPU1")
        await expect(dialog.get_by_role("link", name="Details as JSON")).to_have_attribute("href", "api/pods/team/web")
        await expect(dialog).to_contain_text("As of ")
        await dialog.get_by_role("button", name="Close").click()
        await expect(dialog).to_be_hidden()
        assert await seen.violations() == []
        assert seen.said == []


async def test_details_have_the_turns_of_the_limiter(browser: Browser, stage: Stage) -> None:
    limited = told(WEB)
    limited["allocations"][0].update(held_ratio=0.238, waited_ratio=0.61, mechanisms=["limiter"])
    stage.remember(limited)
    async with opened(browser, stage) as page:
        await page.locator("#rows").get_by_role("link", name="team/web").click()
        dialog = page.get_by_role("dialog", name="team/web")
        sentence = "; held the GPU 24 % of the last seconds, waited 61 % for its turn; limited by limiter"
        await expect(dialog.locator("ul.feed li")).to_contain_text(sentence)


async def test_details_of_a_refusal_list_what_each_gpu_had_free(browser: Browser, stage: Stage) -> None:
    stage.remember(told(LATE, refused(), phase="Failed", reason="UnexpectedAdmissionError", message="Allocate failed"))
    async with opened(browser, stage, document(entries=[refused()])) as page:
        dialog = page.get_by_role("dialog", name="team/late")
        for place in ("#problems", "#feed"):
            await page.locator(place).get_by_role("link", name="team/late").click()
            await shows(dialog, "Failed: UnexpectedAdmissionError: Allocate failed", "No GPU now.")
            await expect(dialog.locator("ol > li.refused")).to_contain_text("no GPU has 60 cores free")
            await dialog.get_by_text("What was free on 3 GPUs").click()
            gpus = dialog.locator("details li")
            await expect(gpus).to_have_text(
                ["GPU0: 0 cores, 4 memory blocks", "GPU1: 10 cores, 4 memory blocks", "GPU2: 20 cores, 4 memory blocks; cordoned"]
            )
            await page.keyboard.press("Escape")
            await expect(dialog).to_be_hidden()


async def test_details_open_and_close_by_keyboard(browser: Browser, stage: Stage) -> None:
    stage.remember(told(WEB))
    async with opened(browser, stage) as page:
        link = page.locator("#rows").get_by_role("link", name="team/web")
        await expect(link).to_have_attribute("aria-haspopup", "dialog")
        await link.focus()
        await page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="team/web")
        await expect(dialog.get_by_role("button", name="Close")).to_be_focused()
        stage.show(document(used_gib=3.0, at=NOW + 1))
        await expect(page.locator(f"#gpu-{name_of(1)}")).to_contain_text("3.0 of 4.0 GiB")
        await expect(dialog).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        await expect(link).to_be_focused()


async def test_a_late_response_does_not_replace_later_details(browser: Browser, stage: Stage) -> None:
    stage.remember(told(WEB), told(("team", "train")))
    late = """const ask = window.fetch;
        window.fetch = (address, ...how) => String(address).endsWith("team/train")
            ? new Promise((go) => { window.answer = () => go(ask(address, ...how)); })
            : ask(address, ...how);"""
    async with opened(browser, stage, before=late) as page:
        rows = page.locator("#rows")
        await rows.get_by_role("link", name="team/train").first.click()
        await rows.get_by_role("link", name="team/web").click()
        await expect(page.get_by_role("dialog", name="team/web")).to_be_visible()
        await answer_at_last(page)
        await expect(page.get_by_role("dialog", name="team/web")).to_be_visible()
        await page.evaluate("document.querySelector('#rows a[href$=train]').click()")  # the next one, as the dialog is closed
        await page.keyboard.press("Escape")
        await answer_at_last(page)
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def answer_at_last(page: Page) -> None:
    async with page.expect_response("**/api/pods/team/train") as answered:
        await page.evaluate("window.answer()")
    await (await answered.value).finished()
    await page.evaluate("new Promise((go) => setTimeout(go, 200))")


async def test_a_new_tab_shows_the_json(browser: Browser, stage: Stage) -> None:
    stage.remember(told(WEB))
    async with opened(browser, stage) as page:
        async with page.context.expect_page() as tab:
            await page.locator("#rows").get_by_role("link", name="team/web").click(modifiers=["ControlOrMeta"])
        await expect((await tab.value).locator("body")).to_contain_text('"namespace"')
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_details_of_an_unknown_pod(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage) as page:
        await page.locator("#rows").get_by_role("link", name="team/web").click()
        await expect(page.get_by_role("dialog", name="team/web")).to_contain_text("nothing is known of the pod team/web.")


async def test_hostile_names_are_text_in_the_details(browser: Browser, stage: Stage) -> None:
    for pod in HOSTILE[:-2]:  # the last two have no address: braces, and a way out of the folder
        entries = [refusal(pod=pod, why=pod[1])]
        stage.remember(told(pod, *entries, pods=HOSTILE, message=pod[1]))
        stage.show(document(HOSTILE, entries=entries))
        async with visit(browser, stage.url, viewport={"width": 320, "height": 740}) as seen:
            page = await loaded(seen, len(HOSTILE))
            await page.locator("#feed").get_by_role("link").click()
            dialog = page.get_by_role("dialog")
            await expect(dialog.locator("ol li p").nth(1)).to_have_text(pod[1], use_inner_text=False)
            assert await dialog.locator("h2").text_content() == "/".join(pod)
            assert await page.evaluate("[window.harmed, document.images.length, document.scripts.length]") == [None, 0, 1]
            assert await page.evaluate("[document.documentElement.scrollWidth, story.scrollWidth - story.clientWidth]") == [
                320,
                0,
            ]
            assert seen.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_details_have_enough_contrast(browser: Browser, stage: Stage, scheme: str) -> None:
    stage.remember(told(WEB, refused()))
    async with opened(browser, stage, color_scheme=scheme) as page:
        await page.locator("#rows").get_by_role("link", name="team/web").click()
        await expect(page.get_by_role("dialog", name="team/web")).to_be_visible()
        assert await page.evaluate(DIM_TEXT) == []
