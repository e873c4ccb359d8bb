"""How the page follows the agent: state by state, over a stream that may break, and not while the page is hidden."""

import asyncio

import pytest
from msgspec.structs import replace
from playwright.async_api import Browser, expect

from gpumgr.kube.publisher.events import timestamp
from tests.e2e.browser import Stage, visit
from tests.node_reports import NOW, PODS
from tests.unit.web.metrics.pictures import name_of

from .documents import BEAT_SECONDS, document, loaded, opened, refusal

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_a_new_state_updates_the_page_in_place(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage) as page:
        await expect(page.locator("#live")).to_have_text("live")
        await page.evaluate("window.kept = [...document.querySelectorAll('#rows tr, .card, .seg, #picture')]")
        stage.show(document((*PODS, ("team", "new")), entries=[refusal()], used_gib=3.0, at=NOW + 1))
        await expect(page.locator("#rows tr")).to_have_count(6)
        await expect(page.locator(f"#gpu-{name_of(1)}")).to_contain_text("3.0 of 4.0 GiB")
        await expect(page.locator("#aloud")).to_have_text("Refused: team/late. no GPU has 60 cores free")
        assert await page.evaluate("window.kept.length > 20 && window.kept.every((node) => node.isConnected)")
        stage.show(document(PODS[:2], at=NOW + 2))
        await expect(page.locator("#rows tr")).to_have_count(2)


async def test_states_are_shown_after_the_clock_was_set_back(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage) as page:
        await expect(page.locator("#live")).to_have_text("live")
        stage.show(document(PODS[:2], at=NOW - 30))
        await expect(page.locator("#rows tr")).to_have_count(2)


async def test_an_entry_with_the_number_of_a_lost_one_is_another_entry(browser: Browser, stage: Stage) -> None:
    """An agent that was killed before it saved its last entries uses their numbers again."""
    async with opened(browser, stage, document(entries=[refusal()])) as page:
        name = page.locator("#feed a")
        await expect(name).to_have_attribute("href", "api/pods/team/late")
        stage.show(document(entries=[replace(refusal(), pod=None, pod_uid="uid-9", at=NOW)], at=NOW + 1))
        await expect(name).to_have_text("pod uid uid-9")
        await expect(name).not_to_have_attribute("href", "api/pods/team/late")
        await expect(page.locator("#feed time")).to_have_attribute("datetime", f"{timestamp(NOW)[:-1]}.000Z")


async def test_many_updates_leave_the_document_as_large_as_before(browser: Browser, stage: Stage) -> None:
    """Pods come and go, GPUs are lost and come back: the document is as large in the end as it was."""
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        await expect(page.locator("#live")).to_have_text("live")
        size = "document.querySelectorAll('*').length"
        before = await page.evaluate(size)
        for turn in range(1, 31):
            pods = [("team", f"pod-{turn}-{n}") for n in range(3 + turn % 5)]
            entries = [refusal(number=turn + n, pod=pods[0]) for n in range(3)]
            stage.show(document(pods, entries=entries, gone=3 if turn % 4 == 0 else None, at=NOW + turn))
            await expect(page.locator("#rows tr")).to_have_count(len(pods))
            await expect(page.locator("#rows")).to_contain_text(f"pod-{turn}-0")
        stage.show(document(at=NOW + 40))
        await expect(page.locator("#rows")).to_contain_text("team/train")
        await page.wait_for_function(f"{size} === {before}")
        assert seen.said == []


async def test_repeated_problems_are_listed_once(browser: Browser, stage: Stage) -> None:
    """One pod refused twice with two messages, two refused containers without a name, one piece of an allocation sent twice."""
    again = [refusal(number=1), refusal(number=2, why="no GPU has 40 memory blocks free")]
    nameless = [replace(refusal(number=n, why=f"sentence {n}"), pod=None) for n in (3, 4)]
    for entries in (again, nameless):
        state = document(entries=entries)
        state["containers"].append(state["containers"][0])
        async with opened(browser, stage, state, containers=len(PODS) + 1) as page:
            for turn in range(1, 5):
                stage.show({**state, "at": NOW + turn})
                await expect(page.locator("#problems")).to_contain_text(f"{60 + turn} s ago")
                await expect(page.locator("#problems li").filter(has_text="refused")).to_have_count(2)
                await expect(page.locator("#rows tr")).to_have_count(len(PODS) + 1)
            for entry in entries:
                await expect(page.locator("#problems")).to_contain_text(entry.why)


async def test_a_lost_stream_is_reported_and_opened_again(browser: Browser) -> None:
    stage = Stage(beat_seconds=BEAT_SECONDS)
    await stage.open()
    stage.show(document())
    try:
        async with visit(browser, stage.url) as seen:
            page = await loaded(seen)
            await expect(page.locator("#stale")).to_be_hidden()
            await stage.close()
            await expect(page.locator("#live")).to_contain_text("stale for")
            await expect(page.locator("#stale")).to_contain_text("the agent can't be reached")
            await expect(page.locator("#aloud")).to_contain_text("The connection to the agent is lost")
            stage.show(document(PODS[:3], entries=[refusal()], at=NOW + 9))
            await stage.open()
            await loaded(seen, 3)
            await expect(page.locator("#aloud")).to_contain_text("Refused: team/late")
            await expect(page.locator("#live")).to_have_text("live")
            await expect(page.locator("#stale")).to_be_hidden()
    finally:
        await stage.close()


async def test_a_hidden_page_closes_its_stream(browser: Browser, stage: Stage) -> None:
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""

    async def readers(count: int) -> None:
        async with asyncio.timeout(60):
            while stage.readers != count:  # noqa: ASYNC110 (it is the server's count, of what a browser does)
                await asyncio.sleep(0.01)

    await readers(0)
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        await readers(1)
        await page.evaluate(hide, True)
        await readers(0)
        stage.show(document(PODS[:2], at=NOW + 1))
        await page.evaluate(hide, False)
        await loaded(seen, 2)
        await expect(page.locator("#live")).to_have_text("live")
