"""The contents of the page: containers per GPU, errors, and the links between GPUs."""

import re

import pytest
from msgspec.structs import replace
from playwright.async_api import Browser, expect

from gpumgr.agent.api import Cordon, to_json_data
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Ledger
from gpumgr.web.state import node_state
from tests.e2e.browser import Stage, visit
from tests.node_reports import NOW, report
from tests.unit.web.metrics.pictures import name_of, uuid_of, whole

from .documents import document, opened, refusal, rows, shows

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_the_page_shows_placements_and_problems(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage, document(entries=[refusal()], used_gib=4.5)) as page:
        await expect(page).to_have_title("(5) node-1 · gpumgr")
        await expect(page.locator("#verdict")).to_have_text("Ready")
        await expect(page.locator("#live")).to_have_text("live")
        card = page.locator(f"#gpu-{name_of(1)}")
        await shows(
            card,
            "GPU1",
            "team/web",
            "9 of 100 granted, 25 used",
            "5 of 9 cores, 4.5 of 4.0 GiB",
            "over its memory",
            "Limits: memory hard (nvml-memory), cores soft (limiter)",
            "40 °C",
        )
        await expect(
            card.get_by_role("img", name="Memory of GPU1: 4.0 of 80 GiB granted, 30 used; held by team/web (main)")
        ).to_be_visible()
        await expect(page.locator(f"#gpu-{name_of(4)}")).to_contain_text("1.2 GiB used by processes of no container (1 process)")
        problems = page.locator("#problems li")
        await expect(problems.filter(has_text="refused")).to_contain_text("team/late 60 s ago: no GPU has 60 cores free")
        await expect(problems.filter(has_text="over limit").last).to_contain_text("has 4.0 GiB on GPU1, uses 4.5 GiB")
        await expect(page.locator("#feed li.refused")).to_contain_text("60 cores, no_fit")
        limits = "GPU 0-7: memory hard (nvml-memory), cores soft (limiter)"
        await shows(page.locator("#health"), "550.54.15, CUDA 12.4", "0.4 s ago", "2 waiting, 0 dropped", limits, "registered")
        whole = (await rows(page))[-2]
        assert whole[:9] == ["team/train", "main", "GPU0", "whole", "5", "", "", "80.0 GiB", "4.5 GiB"]


async def test_a_burst_shows_its_limit_and_the_gpu_by_how_much_limits_exceed_it(browser: Browser, stage: Stage) -> None:
    shown = document(used_gib=4.5)
    for row in shown["containers"]:
        if row["pod"] == "web":
            row |= {"over": True, "memory_limit_bytes": 6 << 30}
    for gpu in shown["gpus"]:
        gpu["limits_excess_bytes"] = 2 << 30 if gpu["name"] == name_of(1) else 0
    async with opened(browser, stage, shown) as page:
        card = page.locator(f"#gpu-{name_of(1)}")
        await shows(card, "4.5 of 4.0 GiB (up to 6.0)", "used; limits exceed it by 2.0 GiB")
        await expect(page.locator(f"#gpu-{name_of(0)}")).not_to_contain_text("exceed")
        await expect(page.locator("#problems li").filter(has_text="over limit").last).to_contain_text("has 6.0 GiB on GPU1")


async def test_a_value_that_is_not_known_is_shown_as_unknown_and_never_as_0(browser: Browser, stage: Stage) -> None:
    shown = document()
    row_values = ("memory_bytes", "memory_used_bytes", "utilization_ratio", "processes")
    gpu_values = ("memory_bytes", "memory_used_bytes", "utilization_ratio", "temperature_celsius", "power_watts")
    for rows_of, values in (("containers", row_values), ("gpus", gpu_values)):
        for row in shown[rows_of]:
            row |= dict.fromkeys(values)
    async with opened(browser, stage, shown) as page:
        web = (await rows(page))[-1]
        assert (web[0], web[4:6], web[7:10]) == ("team/web", ["unknown", ""], ["unknown"] * 3)
        card = page.locator(f"#gpu-{name_of(1)}")
        await shows(
            card,
            "9 of 100 granted, use unknown",
            "size unknown, use unknown",
            "unknown use of 9 cores, unknown use of unknown memory",
        )
        for unit in ("°C", " W", "% busy"):
            await expect(card).not_to_contain_text(unit)
        await expect(card.locator(".seg.unknown")).to_have_count(2)
        await expect(
            card.get_by_role("img", name="Memory of GPU1: size unknown, use unknown; held by team/web (main)")
        ).to_be_visible()
        stats = page.locator("#stats div")
        await expect(stats.filter(has_text="Cores granted").locator("small")).to_have_text("use unknown")
        await expect(stats.filter(has_text="Memory granted")).to_have_text("Memory grantedunknownuse unknown")


async def test_a_node_without_problems(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage, document(count=2, entries=[replace(refusal(), at=NOW - 1000)])) as page:
        await expect(page.locator("#fine")).to_have_text("Nothing. All GPUs are well, nothing was refused in the last 15 min.")
        await expect(page.locator("#problems li")).to_have_count(0)
        await expect(page).to_have_title("node-1 · gpumgr")


async def test_lost_and_cordoned_gpus_are_marked_in_text(browser: Browser, stage: Stage) -> None:
    async with opened(browser, stage, document()) as page:
        cordon = {uuid_of(2): Cordon(reason="a new riser", since=NOW - 600, draining=True)}
        stage.show(document(gone=5, failed={1: "XID 79: it has fallen off the bus"}, cordons=cordon, at=NOW + 1))
        await expect(page.locator(f"#gpu-{name_of(1)} .tag")).to_have_text("failed (XID)")
        await expect(page.locator(f"#gpu-{name_of(1)} .why")).to_have_text("XID 79: it has fallen off the bus")
        await expect(page.locator(f"#gpu-{name_of(2)} .tag")).to_have_text("draining")
        await expect(page.locator(f"#gpu-{name_of(2)} .why")).to_contain_text("a new riser")
        await expect(page.locator(f"#gpu-{name_of(5)} .tag")).to_have_text("not shown")
        await expect(page.locator("#aloud")).to_contain_text("GPU1 takes nothing new: XID 79: it has fallen off the bus")
        report = page.locator("#picture")
        label = await report.get_attribute("aria-label") or ""
        assert "socket (NODE), NUMA 0: GPU0 GPU1 GPU2 GPU3" in label
        assert f"Not well: GPU1 failed (XID), GPU2 draining, GPU {name_of(5)} not shown." in label
        assert "NVLink fabric: 7 GPUs joined all to all, 18 links each." in label
        await expect(report.locator(".box.bad")).to_have_count(2)
        await expect(report.locator(".wire.bad")).to_have_count(1)
        stage.show(document(at=NOW + 2))
        await expect(page.locator("#aloud")).to_contain_text("GPU1 is back")


async def test_gpus_have_the_index_of_the_driver(browser: Browser, stage: Stage) -> None:
    """Without the GPU at index 3, the one at index 4 is the fourth of the topology."""
    async with opened(browser, stage, document([("team", f"pod-{n}") for n in range(8)], gone=3), containers=8) as page:
        card = page.locator(f"#gpu-{name_of(4)}")
        await expect(card.get_by_role("heading")).to_have_text("GPU4")
        await expect(card).to_contain_text("team/pod-4")
        await expect(page.locator("#problems li").filter(has_text="unattributed").get_by_role("link")).to_have_text("GPU4")
        await expect(page.locator("#picture .name")).to_have_text(
            ["GPU0", "GPU1", "GPU2", "GPU4", "GPU5", "GPU6", "GPU7", name_of(3)]
        )
        await expect(page.locator("#topology nav a").nth(3)).to_have_text("GPU4: well, 1 sharing")
        assert "GPU4: 18 NVLinks into the fabric" in await page.locator("#picture .wire title").all_text_contents()
        assert "NUMA 1: GPU4 GPU5 GPU6 GPU7" in (await page.locator("#picture").get_attribute("aria-label") or "")
        await page.get_by_label("Filter").fill("gpu 4")
        await expect(page.locator("#rows tr")).to_have_count(1)
        await expect(page.locator("#rows tr")).to_contain_text("team/pod-4")


async def test_an_unreadable_gpu_is_listed_once(browser: Browser, stage: Stage) -> None:
    """The driver lists it without a UUID, so that its card is missing."""
    async with opened(browser, stage, document(gone=5, unreadable={5: "GPU is lost"})) as page:
        broken = page.locator("#problems li.bad")
        await expect(broken).to_have_count(1)
        await shows(
            broken,
            f"GPU {name_of(5)} the driver does not list it",
            "perhaps the driver lists it without a UUID: index 5 (GPU is lost)",
        )
        await expect(page).to_have_title("(1) node-1 · gpumgr")
        stage.show(document(unreadable={8: "GPU is lost"}, at=NOW + 1))  # it was never met
        await expect(broken).to_have_text(re.compile("GPU at index 8 GPU is lost$"))
        await expect(page).to_have_title("(1) node-1 · gpumgr")


async def test_full_gpus_are_in_service(browser: Browser, stage: Stage) -> None:
    full = tuple(whole(f"{n:016x}", ("team", f"pod-{n}"), n) for n in range(2))
    found = report((), count=2)
    view = replace(found.view, ledger=Ledger(found.view.ledger.gpu_registry, {a.id: a for a in full}))
    stage.show(to_json_data(node_state(replace(found, view=view), [])))
    async with visit(browser, stage.url) as seen:
        await expect(seen.page.locator("#stats div").first).to_have_text("GPUs2 of 2in service")
        assert "new containers" not in await seen.page.locator("#stats").inner_text()


async def test_a_failed_gpu_is_red_in_the_history(browser: Browser, stage: Stage) -> None:
    codes = ["lost", "unhealthy", "not_readable", "back", "cordoned", "uncordoned"]
    stage.show(
        document(
            entries=[
                HistoryEntry(number=n, at=NOW - 60, what="gpu", gpus=(name_of(1),), code=code) for n, code in enumerate(codes)
            ]
        )
    )
    async with opened(browser, stage) as page:
        await expect(page.locator("#feed li")).to_have_count(len(codes))
        red = await page.locator("#feed li.broken div span").all_text_contents()
        assert red == ["GPU1 not_readable", "GPU1 unhealthy", "GPU1 lost"]


@pytest.mark.parametrize("width", [360, 1280])
async def test_failures_are_listed_before_refusals(browser: Browser, stage: Stage, width: int) -> None:
    long = [refusal(number=n, why=f"{n}: no GPU has room for it, " + "and none will have it soon, " * 12) for n in range(1, 4)]
    drained = {uuid_of(2): Cordon(reason="a new riser", since=NOW - 600, draining=True)}
    shown = document(entries=long, failed={1: "XID 79: it has fallen off the bus"}, cordons=drained)
    async with opened(browser, stage, shown, viewport={"width": width, "height": 900}) as page:
        problems = page.locator("#problems li")
        await expect(problems.locator("b")).to_have_text(["failed (XID)", "draining", "unattributed", *["refused"] * 3])
        lines = await page.locator("#problems li.brief > span").evaluate_all(
            "(all) => all.map((node) => Math.round(node.clientHeight / parseFloat(getComputedStyle(node).lineHeight)))"
        )
        assert lines == [2, 2, 2]


async def test_links_without_a_switch_are_drawn_one_by_one(browser: Browser, stage: Stage) -> None:
    state = document()
    state["nvlinks"] = [{"a": 0, "b": 1, "links": 2}, {"a": 0, "b": 3, "links": 1}, {"a": 4, "b": 7, "links": 1}]
    async with opened(browser, stage, state) as page:
        await expect(page.locator("#picture .wire")).to_have_count(3)
        assert await page.locator("#picture .wire title").all_text_contents() == [
            "GPU0 and GPU1: 2 NVLinks",
            "GPU0 and GPU3: 1 NVLink",
            "GPU4 and GPU7: 1 NVLink",
        ]


async def test_a_node_without_a_driver(browser: Browser, stage: Stage) -> None:
    inventory = Inventory()
    view = AgentView(ledger=Ledger(GpuRegistry()), inventory=inventory, node=inventory.view(GpuRegistry()))
    stage.show(to_json_data(node_state(NodeReport(view=view, node="node-1", at=NOW, not_ready=("no driver was found yet",)), [])))
    async with visit(browser, stage.url) as seen:
        await expect(seen.page.locator("#verdict")).to_have_text("Not ready")
        await expect(seen.page.locator("#problems")).to_contain_text("no driver was found yet")
        await expect(seen.page.locator("#nogpus")).to_contain_text("No driver was found yet")
        await expect(seen.page.locator("#norows")).to_have_text("No container holds a GPU.")
        assert seen.said == []
