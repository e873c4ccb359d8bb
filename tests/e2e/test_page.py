"""The page at / in a real browser: what it shows, how it follows, and what it does with names that mean harm."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from gpumgr.agent.cordons import Cordon
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.picture import OutboxState, Picture
from gpumgr.agent.writer import AgentView
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ids import ALL_CORES, Cards
from gpumgr.allocator.ledger import Allocation, Ledger
from gpumgr.allocator.pods import PodKey
from gpumgr.topology.devices import Level, NodeSample, NodeSnapshot, Topology
from gpumgr.units import BLOCK_BYTES
from gpumgr.usage.picture import ContainerUse, GpuUse, NodeUse
from gpumgr.web.front import PAGE
from gpumgr.web.state import state_document
from tests.unit.metrics.pictures import name_of, sample_of, snapshot_of, uuid_of

from .browser import Stage, Visit, chromium, visit

pytestmark = pytest.mark.asyncio(loop_scope="module")

Document = dict[str, Any]
GIB = 1 << 30
NOW = 1_800_000_000.0
HOSTILE: tuple[PodKey, ...] = (
    ("team", "<script>window.harmed = 1</script>"),
    ("team", '"><img src=x onerror="window.harmed = 1">'),
    ("team", "line\nbreak \t and 'quotes' \"twice\""),
    ("n" * 63, "x" * 253),
    ("team", "\u202egpj.exe \u062e\u062f\u0645\u0629"),
    ("team", "&lt;b&gt;&amp;${7*7}{{7*7}}"),
    ("..", "../../metrics?a=b#c"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.open()
    yield stage
    await stage.close()


@pytest.fixture
def stage(open_stage: Stage) -> Stage:
    open_stage.show(document())
    return open_stage


def node(count: int) -> NodeSnapshot:
    """GPUs on NVSwitch, half of them on each of two sockets."""
    half = count // 2
    levels = tuple(tuple(Level.NODE if a // half == b // half else Level.SYS for b in range(count)) for a in range(count))
    links = tuple(tuple(0 if a == b else 18 for b in range(count)) for a in range(count))
    plain = snapshot_of(count)
    gpus = tuple(replace(gpu, memory_bytes=80 * GIB, numa_node=gpu.index // half) for gpu in plain.gpus)
    return replace(plain, gpus=gpus, topology=Topology(levels, links))


def shares(pods: Iterable[PodKey], *, count: int = 8) -> list[Allocation]:
    """One share of 9 cores and 4 GiB each, round the GPUs; the first has all of GPU0."""
    found = []
    for n, pod in enumerate(pods):
        gpu, place = name_of(n % count), n // count
        found.append(
            Allocation(
                id=f"{n:016x}",
                pod=pod,
                uid=f"uid-{n}",
                container="main",
                cores={gpu: ((1 << 9) - 1) << 9 * (place % 11) if n else ALL_CORES},
                blocks={gpu: ((1 << 16) - 1) << 16 * place} if n else {},
                gpus=(gpu,),
                granted_at=NOW - 60 * n,
                why="the least free room that fits",
                mechanisms=("mps",) if n % 2 else ("hami-core",),
            )
        )
    return found


PODS: tuple[PodKey, ...] = (("team", "train"), ("team", "web"), ("search", "embed"), ("search", "rank"), ("batch", "night"))


def document(
    pods: Iterable[PodKey] = PODS,
    *,
    entries: Iterable[Entry] = (),
    count: int = 8,
    used_gib: float = 2.0,
    gone: int | None = None,
    failed: Mapping[int, str] | None = None,
    at: float = NOW,
    **about: Any,
) -> Document:
    """The state of a node on which each pod but the first has a share, and every share uses so much. `gone`: a GPU that the driver
    does not show any more."""
    allocations = shares(pods, count=count)
    snapshot = node(count)
    cards = Inventory(snapshot=snapshot).meet(Cards())
    shown = [n for n in range(count) if n != gone]
    left = Topology(
        tuple(tuple(snapshot.topology.levels[a][b] for b in shown) for a in shown),
        tuple(tuple(snapshot.topology.nvlinks[a][b] for b in shown) for a in shown),
    )
    inventory = Inventory(
        snapshot=replace(snapshot, gpus=tuple(snapshot.gpus[n] for n in shown), topology=left),
        failed={uuid_of(n): why for n, why in (failed or {}).items()},
    )
    view = AgentView(
        ledger=Ledger(cards, {a.id: a for a in allocations}),
        inventory=inventory,
        node=inventory.view(cards, policy="binpack", visible_blocks={}),
    )
    used = round(used_gib * GIB)
    uses = {
        (a.id, a.gpus[0]): ContainerUse(
            allocation=a.id,
            gpu=a.gpus[0],
            uuid=cards.by_name[a.gpus[0]].uuid,
            cores=9,
            memory_bytes=used,
            utilization_ratio=0.05,
            processes={100 + n: used},
        )
        for n, a in enumerate(allocations)
    }
    strange = (
        {name_of(4): GpuUse(uuid=uuid_of(4), stranger_memory_bytes=int(1.2 * GIB), stranger_processes=1)} if count > 4 else {}
    )
    picture = Picture(
        view=view,
        node="node-1",
        at=at,
        registered={"tencent.com/vcuda-core": True, "tencent.com/vcuda-memory": True},
        sample=NodeSample(gpus={uuid: replace(s, memory_used_bytes=30 * GIB) for uuid, s in sample_of(*shown).gpus.items()}),
        sampled_at=0.0,
        nvml_up=True,
        use=NodeUse(taken_at=0.0, containers=uses, gpus=strange),
        over=frozenset(a.id for a in allocations if a.blocks and used > 16 * BLOCK_BYTES),
        enforcement=(("mps", "cores and memory"),),
        outbox=OutboxState(waiting=2),
        reasons={uuid_of(n): "xid" for n in failed or {}},
    )
    return state_document(replace(picture, **about), list(entries), clock=lambda: 0.4)


def refusal(number: int = 1, pod: PodKey = ("team", "late"), why: str = "no GPU has 60 cores free") -> Entry:
    return Entry(number=number, at=NOW - 60, what="refused", id="c", pod=pod, kind="core", size=60, why=why, code="no_fit")


async def rows(page: Page) -> list[list[str]]:
    found: list[list[str]] = await page.evaluate(
        "[...document.querySelectorAll('#rows tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return found


async def column(page: Page, number: int) -> list[str]:
    return [row[number] for row in await rows(page)]


async def loaded(seen: Visit, containers: int = len(PODS)) -> Page:
    await expect(seen.page.locator("#rows tr")).to_have_count(containers)
    return seen.page


async def test_a_look_tells_who_sits_where_and_what_is_wrong(browser: Browser, stage: Stage) -> None:
    stage.show(document(entries=[refusal()], used_gib=4.5))
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        await expect(page).to_have_title("(5) node-1 · gpumgr")
        await expect(page.locator("#verdict")).to_have_text("Ready")
        await expect(page.locator("#live")).to_have_text("live")
        card = page.locator(f"#gpu-{name_of(1)}")
        await expect(card).to_contain_text("GPU1")
        await expect(card).to_contain_text("team/web")
        await expect(card).to_contain_text("9 of 100 granted, 25 used")
        await expect(card).to_contain_text("5 of 9 cores, 4.5 of 4.0 GiB")
        await expect(card).to_contain_text("over its memory")
        await expect(card).to_contain_text("40 °C")
        await expect(
            card.get_by_role("img", name="Memory of GPU1: 4.0 of 80 GiB granted, 30 used; held by team/web (main)")
        ).to_be_visible()
        await expect(page.locator(f"#gpu-{name_of(4)}")).to_contain_text("1.2 GiB in nobody's account (1 process)")
        problems = page.locator("#problems li")
        await expect(problems.filter(has_text="refused")).to_contain_text("team/late 60 s ago: no GPU has 60 cores free")
        await expect(problems.filter(has_text="over limit").last).to_contain_text("has 4.0 GiB on GPU1, uses 4.5 GiB")
        await expect(page.locator("#feed li.refused")).to_contain_text("60 cores, no_fit")
        health = page.locator("#health")
        for fact in ("550.54.15, CUDA 12.4", "0.4 s ago", "2 waiting, 0 dropped", "mps keeps cores and memory", "registered"):
            await expect(health).to_contain_text(fact)
        whole = (await rows(page))[-2]
        assert whole[:7] == ["team/train", "main", "GPU0", "whole", "5", "80.0 GiB", "4.5 GiB"]


async def test_a_quiet_node_says_that_nothing_is_wrong(browser: Browser, stage: Stage) -> None:
    stage.show(document(count=2, entries=[replace(refusal(), at=NOW - 1000)]))
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        await expect(page.locator("#fine")).to_have_text("Nothing. All GPUs are well, nothing was refused in the last 15 min.")
        await expect(page.locator("#problems li")).to_have_count(0)
        await expect(page).to_have_title("node-1 · gpumgr")


async def test_nothing_is_loaded_from_elsewhere_and_nothing_complains(browser: Browser, stage: Stage) -> None:
    async with visit(browser, stage.url) as seen:
        await loaded(seen)
        await expect(seen.page.locator("#live")).to_have_text("live")
        assert {urlsplit(url).netloc for url in seen.requests if not url.startswith("data:")} == {urlsplit(stage.url).netloc}
        assert {urlsplit(url).path for url in seen.requests if url.startswith("http")} == {"/", "/api/state", "/api/stream"}
        assert await seen.violations() == []
        assert seen.said == []


async def test_a_new_state_changes_the_page_in_place(browser: Browser, stage: Stage) -> None:
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        await page.evaluate("window.kept = [...document.querySelectorAll('#rows tr, .card, .seg, #picture')]")
        stage.show(document((*PODS, ("team", "new")), entries=[refusal()], used_gib=3.0, at=NOW + 1))
        await expect(page.locator("#rows tr")).to_have_count(6)
        await expect(page.locator(f"#gpu-{name_of(1)}")).to_contain_text("3.0 of 4.0 GiB")
        await expect(page.locator("#aloud")).to_have_text("Refused: team/late. no GPU has 60 cores free")
        assert await page.evaluate("window.kept.length > 20 && window.kept.every((node) => node.isConnected)")
        stage.show(document(PODS[:2], at=NOW + 2))
        await expect(page.locator("#rows tr")).to_have_count(2)


async def test_a_long_life_leaves_nothing_behind(browser: Browser, stage: Stage) -> None:
    """Pods come and go, GPUs are lost and come back: the document is as large in the end as it was."""
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
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
        assert await page.evaluate(size) == before
        assert seen.said == []


@pytest.mark.parametrize(
    ("text", "pods"),
    [
        ("team/", ["team/train", "team/web"]),
        ("RANK", ["search/rank"]),
        ("GPU3", ["search/rank"]),
        ("gpu 3", ["search/rank"]),
        ("search mps", ["search/rank"]),
        ("hami", ["batch/night", "search/embed", "team/train"]),
        ("main", sorted("/".join(pod) for pod in PODS)),
        ("nowhere", []),
    ],
)
async def test_the_filter_narrows_containers_and_decisions(browser: Browser, stage: Stage, text: str, pods: list[str]) -> None:
    stage.show(document(entries=[refusal(number=n, pod=pod) for n, pod in enumerate(PODS, start=1)]))
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        await page.get_by_label("Filter").fill(text)
        await expect(page.locator("#rows tr")).to_have_count(len(pods))
        assert await column(page, 0) == pods
        if text == "RANK":
            await expect(page.locator("#feed li")).to_have_count(1)
            await expect(page.locator("#count")).to_have_text("1 of 5 match")
        if not pods:
            await expect(page.locator("#norows")).to_have_text("No container matches the filter.")
        await page.get_by_label("Filter").fill("")
        await expect(page.locator("#rows tr")).to_have_count(5)


async def test_a_card_leads_to_its_rows_in_the_table(browser: Browser, stage: Stage) -> None:
    stage.show(document([("team", f"pod-{n:02}") for n in range(60)]))
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen, 60)
        await page.locator(f"#gpu-{name_of(2)}").get_by_role("button", name="4 more in the table").click()
        await expect(page.locator("#rows tr")).to_have_count(8)
        assert set(await column(page, 2)) == {"GPU2"}
        await expect(page.get_by_label("Filter")).to_have_value("GPU2")


async def test_every_column_sorts_both_ways_and_says_so(browser: Browser, stage: Stage) -> None:
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        assert await column(page, 0) == sorted("/".join(pod) for pod in PODS)
        for number, head in enumerate(await page.locator("th").all()):
            for _ in range(2):
                await head.get_by_role("button").click()
                way = await head.get_attribute("aria-sort")
                assert await page.locator("th[aria-sort]").count() == 1
                shown = await column(page, number)
                if number in (0, 1, 2, 8, 10):
                    assert shown == sorted(shown, reverse=way == "descending"), (number, way)
        await page.get_by_role("button", name="Memory", exact=True).click()
        assert (await column(page, 5))[0] == "80.0 GiB"
        await page.get_by_role("button", name="Since").click()
        assert await column(page, 9) == ["0 s", "60 s", "2 min", "3 min", "4 min"]


async def test_thousands_of_rows_come_in_portions(browser: Browser, stage: Stage) -> None:
    stage.show(document([("team", f"pod-{n:04}") for n in range(1600)]))
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen, 200)
        await expect(page.locator("#count")).to_have_text("1,600")
        await page.get_by_role("button", name="Show all 1,600").click()
        await expect(page.locator("#rows tr")).to_have_count(1600)
        await page.get_by_label("Filter").fill("pod-1234")
        await expect(page.locator("#rows tr")).to_have_count(1)


async def test_a_lost_gpu_and_a_cordoned_one_are_marked_in_words(browser: Browser, stage: Stage) -> None:
    stage.show(document())
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        cordon = {uuid_of(2): Cordon(reason="a new riser", since=NOW - 600, draining=True)}
        stage.show(document(gone=5, failed={1: "XID 79: it has fallen off the bus"}, cordons=cordon, at=NOW + 1))
        await expect(page.locator(f"#gpu-{name_of(1)} .tag")).to_have_text("failed (XID)")
        await expect(page.locator(f"#gpu-{name_of(1)} .why")).to_have_text("XID 79: it has fallen off the bus")
        await expect(page.locator(f"#gpu-{name_of(2)} .tag")).to_have_text("draining")
        await expect(page.locator(f"#gpu-{name_of(2)} .why")).to_contain_text("a new riser")
        await expect(page.locator(f"#gpu-{name_of(5)} .tag")).to_have_text("not shown")
        await expect(page.locator("#aloud")).to_contain_text("GPU1 takes nothing new: XID 79: it has fallen off the bus")
        picture = page.locator("#picture")
        label = await picture.get_attribute("aria-label") or ""
        assert "socket (NODE), NUMA 0: GPU0 GPU1 GPU2 GPU3" in label
        assert f"Not well: GPU1 failed (XID), GPU2 draining, GPU {name_of(5)} not shown." in label
        assert "NVLink fabric: 7 GPUs joined all to all, 18 links each." in label
        await expect(picture.locator(".box.bad")).to_have_count(2)
        await expect(picture.locator(".wire.bad")).to_have_count(1)
        stage.show(document(at=NOW + 2))
        await expect(page.locator("#aloud")).to_contain_text("GPU1 is back")


async def test_links_that_are_no_fabric_are_drawn_one_by_one(browser: Browser, stage: Stage) -> None:
    state = document()
    state["nvlinks"] = [{"a": 0, "b": 1, "links": 2}, {"a": 0, "b": 3, "links": 1}, {"a": 4, "b": 7, "links": 1}]
    stage.show(state)
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        await expect(page.locator("#picture .wire")).to_have_count(3)
        assert await page.locator("#picture .wire title").all_text_contents() == [
            "GPU0 and GPU1: 2 NVLinks",
            "GPU0 and GPU3: 1 NVLink",
            "GPU4 and GPU7: 1 NVLink",
        ]


async def test_a_node_without_a_driver_says_so(browser: Browser, stage: Stage) -> None:
    inventory = Inventory()
    view = AgentView(
        ledger=Ledger(Cards()), inventory=inventory, node=inventory.view(Cards(), policy="binpack", visible_blocks={})
    )
    stage.show(state_document(Picture(view=view, node="node-1", at=NOW, not_ready=("no driver was found yet",)), []))
    async with visit(browser, stage.url) as seen:
        await expect(seen.page.locator("#verdict")).to_have_text("Not ready")
        await expect(seen.page.locator("#problems")).to_contain_text("no driver was found yet")
        await expect(seen.page.locator("#nogpus")).to_contain_text("No driver was found yet")
        await expect(seen.page.locator("#norows")).to_have_text("No container holds a GPU.")
        assert seen.said == []


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


@pytest.mark.parametrize("width", [320, 360, 768, 1024, 1920])
async def test_no_width_makes_the_page_scroll_sideways(browser: Browser, stage: Stage, width: int) -> None:
    stage.show(document((*PODS, *HOSTILE), entries=[refusal(pod=pod, why="y" * 300) for pod in HOSTILE], gone=5, used_gib=4.5))
    async with visit(browser, stage.url, viewport={"width": width, "height": 740}) as seen:
        page = await loaded(seen, len(PODS) + len(HOSTILE))
        assert await page.evaluate("document.documentElement.scrollWidth") == width


async def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser, stage: Stage) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with visit(browser, stage.url, color_scheme="dark") as seen:
        page = await loaded(seen)
        dark = await page.evaluate(ground)
        await page.emulate_media(color_scheme="light")
        light = await page.evaluate(ground)
        assert dark != light
        await page.get_by_role("button", name="Dark theme").click()
        assert await page.evaluate(ground) == dark
        await page.reload()
        await loaded(seen)
        assert await page.evaluate(ground) == dark
        await page.get_by_role("button", name="Light theme").click()
        assert await page.evaluate(ground) == light


async def test_a_browser_that_forbids_storage_loses_only_the_choice(browser: Browser, stage: Stage) -> None:
    forbid = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('forbidden'); } });"
    async with visit(browser, stage.url, before=forbid) as seen:
        page = await loaded(seen)
        await page.get_by_role("button", name="Dark theme").click()
        await expect(page.get_by_role("button", name="Light theme")).to_be_visible()
        assert seen.said == []


async def test_who_wants_less_motion_gets_none(browser: Browser, stage: Stage) -> None:
    async with visit(browser, stage.url, reduced_motion="reduce") as seen:
        page = await loaded(seen)
        moving = "[...document.querySelectorAll('*')].filter((node) => parseFloat(getComputedStyle(node).transitionDuration) > 0).length"
        assert await page.evaluate(moving) == 0
        assert await page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


async def test_without_scripts_the_page_names_the_text(browser: Browser, stage: Stage) -> None:
    async with visit(browser, stage.url, java_script_enabled=False) as seen:
        await expect(seen.page.locator("noscript a")).to_have_attribute("href", "graph?format=text")


async def test_the_keyboard_reaches_everything_and_the_focus_can_be_seen(browser: Browser, stage: Stage) -> None:
    stage.show(document([("team", f"pod-{n:02}") for n in range(40)], entries=[refusal()]))
    mark = """[...document.querySelectorAll("a[href], button, input, [tabindex='0']")].filter((node) => node.checkVisibility())
        .map((node, n) => node.dataset.mark = `${n} ${node.id || node.getAttribute("href") || node.textContent}`)"""
    focused = """() => {
        const node = document.activeElement, style = getComputedStyle(node);
        return [node.dataset.mark, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
    }"""
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen, 40)
        wanted = await page.evaluate(mark)
        reached: dict[str, bool] = {}
        for _ in wanted:
            await page.keyboard.press("Tab")
            what, visible = await page.evaluate(focused)
            reached[what] = visible
        assert list(reached) == wanted
        assert [what for what, visible in reached.items() if not visible] == []
        assert [what.split()[1] for what in wanted[:3]] == ["#main", "filter", "theme"]


async def test_a_gpu_of_the_topology_leads_to_its_card(browser: Browser, stage: Stage) -> None:
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen)
        link = page.get_by_role("link", name="GPU6: well, free")
        await link.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator(f"#gpu-{name_of(6)}")).to_be_in_viewport()
        assert await page.evaluate("document.activeElement.id") == f"gpu-{name_of(6)}"


async def test_a_screen_reader_finds_its_way(browser: Browser, stage: Stage) -> None:
    stage.show(document([("team", f"pod-{n:02}") for n in range(40)], entries=[refusal()]))
    async with visit(browser, stage.url) as seen:
        page = await loaded(seen, 40)
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
        await expect(page.get_by_role("table")).to_have_accessible_name(re.compile("what they were granted"))
        assert await page.locator("th:not([scope=col])").count() == 0
        assert await page.evaluate("document.documentElement.lang") == "en"
        twice = """[...document.querySelectorAll("[id]")].map((node) => node.id).filter((id, n, all) => all.indexOf(id) !== n)"""
        assert await page.evaluate(twice) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_text_can_be_read(browser: Browser, stage: Stage, scheme: str) -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1, and 3 to 1 for large text."""
    stage.show(document(entries=[refusal()], gone=5, failed={1: "XID 79"}, cordons={uuid_of(2): Cordon(since=NOW)}, used_gib=4.5))
    async with visit(browser, stage.url, color_scheme=scheme) as seen:
        page = await loaded(seen)
        await page.get_by_label("Filter").fill("")
        assert await page.evaluate(_DIM_TEXT) == []


_DIM_TEXT = """() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter((child) => child.nodeType === 3).map((child) => child.data.trim()).join("");
    if (!text || !node.checkVisibility() || node.closest(".sr, .jump, noscript, title")) continue;
    const style = getComputedStyle(node), below = [];
    for (let at = node; at; at = at.parentElement) below.unshift(getComputedStyle(at).backgroundColor);
    const box = node.ownerSVGElement && node.parentElement.querySelector(".box");
    if (box) below.push(getComputedStyle(box).fill);
    const ground = rgb(below), ink = rgb([...below, node.ownerSVGElement ? style.fill : style.color]);
    const [a, b] = [light(ground), light(ink)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) found.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""


async def test_a_stream_that_breaks_is_told_and_comes_back(browser: Browser) -> None:
    stage = Stage()
    await stage.open()
    stage.show(document())
    try:
        async with visit(browser, stage.url) as seen:
            page = await loaded(seen)
            await expect(page.locator("#stale")).to_be_hidden()
            await stage.close()
            await expect(page.locator("#live")).to_contain_text("stale since")
            await expect(page.locator("#stale")).to_contain_text("the agent can't be reached")
            await expect(page.locator("#aloud")).to_contain_text("The connection to the agent is lost")
            stage.show(document(PODS[:3], at=NOW + 9))
            await stage.open()
            await loaded(seen, 3)
            await expect(page.locator("#live")).to_have_text("live")
            await expect(page.locator("#stale")).to_be_hidden()
    finally:
        await stage.close()


async def test_a_hidden_page_holds_no_stream(browser: Browser, stage: Stage) -> None:
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""

    async def readers(count: int) -> None:
        for _ in range(1000):
            if stage.readers == count:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{stage.readers} streams are open, not {count}")

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


async def test_the_page_is_one_small_file() -> None:
    html = PAGE.read_text(encoding="utf-8")
    assert len(html.encode()) < 65_536
    assert (html.count("<style"), html.count("<script")) == (1, 1)
    body = html[html.index("<body>") :]
    assert " style=" not in body
    assert not any(f" on{event}=" in body for event in ("click", "input", "load", "error", "change"))
    assert "http://www.w3.org/" in html  # SVG's name, the only address in it
    assert html.replace("http://www.w3.org/2000/svg", "").count("://") == 0
    assert "innerHTML" not in html
