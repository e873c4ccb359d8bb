"""The report of `gpumgr simulate` in a real browser, without a network."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.async_api import Browser

from gpumgr.cli import group
from gpumgr.cluster.simulation.policies import POLICIES
from tests.e2e.browser import visit

from .documents import DIM_TEXT

pytestmark = pytest.mark.asyncio(loop_scope="package")

HOSTILE = "<img src=x onerror=alert(1)>.csv"
#: Of each chart its name, whether all its texts are inside it, and its texts.
CHARTS = """[...document.querySelectorAll("svg[role=img]")].map((svg) => {
  const box = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")];
  const outside = texts.filter((text) => {
    const each = text.getBoundingClientRect();
    return each.left < box.left || each.right > box.right || each.top < box.top || each.bottom > box.bottom;
  });
  const lines = [...svg.querySelectorAll(".line[d*=L], .line[d*=H]")].map((line) => line.outerHTML.replace(/ d="[^"]*"/, ""));
  const bars = [...svg.querySelectorAll("rect")].map((bar) => bar.getBoundingClientRect().width / box.width);
  return { name: svg.getAttribute("aria-label"), outside: outside.map((text) => text.textContent), lines, bars,
           texts: texts.map((text) => text.textContent) };
})"""


@pytest.mark.parametrize("method", ["inflate", "replay"])
async def test_report(browser: Browser, tmp_path: Path, method: str) -> None:
    nodes, pods, report = tmp_path / "nodes.csv", tmp_path / HOSTILE, tmp_path / "report.html"
    nodes.write_text("name,gpus,cpu_milli,ram_mebibytes\n" + "".join(f"n{n},4,48000,999\n" for n in range(4)))
    rows = [f"p{n},1,{30 + n % 3 * 30},2000,1,{n * 50},90000" for n in range(60)]
    pods.write_text("name,gpus,cores,cpu_milli,ram_mebibytes,arrival_seconds,duration_seconds\n" + "\n".join(rows))
    options = ["--nodes", str(nodes), "--pods", str(pods), "--method", method, "--policy", ",".join(POLICIES)]
    found = CliRunner().invoke(group, ["simulate", *options, "--report", str(report), "--output", "json"])
    assert found.exit_code == 0, found.output
    for width in (1280, 500):
        async with visit(browser, report.as_uri(), viewport={"width": width, "height": 900}, offline=True) as seen:
            charts = {chart["name"]: chart for chart in await seen.page.evaluate(CHARTS)}
            assert [chart["outside"] for chart in charts.values()] == [[]] * len(charts)
            assert await seen.page.evaluate("document.documentElement.scrollWidth") == width
            assert not await seen.page.evaluate(DIM_TEXT)
            table = await seen.page.locator("tbody tr").all_inner_texts()
            assert HOSTILE in await seen.page.inner_text("main")
            assert (seen.said, await seen.violations(), seen.requests) == ([], [], [report.as_uri()])
    over, other, bars = (
        ("arrived demand", "Fragmentation", "Allocation at 130 % of arrived demand")
        if method == "inflate"
        else ("time", "Queue length", "Mean queue length")
    )
    for name in (f"Allocation over {over}", f"{other} over {over}"):
        chart = charts[name]
        assert len(chart["lines"]) == len(set(chart["lines"])) == len(POLICIES)  # distinct by colour or dashes
        assert {*POLICIES, name} <= set(chart["texts"])  # legend and title
        assert any("% of" in text or "pods that wait" in text for text in chart["texts"])
        assert any("demand, %" in text or "since the first arrival" in text for text in chart["texts"])
    results = json.loads(found.stdout)["results"]
    values = [each["allocated_percent"]["130"] if method == "inflate" else each["queue_length"]["mean"] for each in results]
    lengths = charts[bars]["bars"]
    assert lengths == pytest.approx([value * lengths[0] / values[0] for value in values], abs=0.002)
    assert [re.split(r"\s", row)[0] for row in table] == list(POLICIES)
