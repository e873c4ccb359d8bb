"""The states that the page is shown, and what is read back from it."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, Locator, Page, expect

from gpumgr.agent.api import to_json_data
from gpumgr.ledger.history import HistoryEntry
from gpumgr.placement.pods import PodKey
from gpumgr.web.state import node_state
from tests.e2e.browser import Stage, Visit, visit
from tests.node_reports import NOW, PODS, report

Document = dict[str, Any]
#: An agent sends its state once in a sample period.
BEAT_SECONDS = 1.0
HOSTILE: tuple[PodKey, ...] = (
    ("team", "<script>window.harmed = 1</script>"),
    ("team", '"><img src=x onerror="window.harmed = 1">'),
    ("team", "line\nbreak \t and 'quotes' \"twice\""),
    ("n" * 63, "x" * 253),
    ("team", "\u202egpj.exe \u062e\u062f\u0645\u0629"),
    ("team", "&lt;b&gt;&amp;${7*7}{{7*7}}"),
    ("..", "../../metrics?a=b#c"),
)

#: What of the page has too little contrast, as a script that says which.
DIM_TEXT = """() => {
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


def document(pods: Iterable[PodKey] = PODS, *, entries: Iterable[HistoryEntry] = (), **about: Any) -> Document:
    """What `report(pods, **about)` becomes for the page."""
    return to_json_data(node_state(report(pods, **about), list(entries), clock=lambda: 0.4))


def refusal(number: int = 1, pod: PodKey = ("team", "late"), why: str = "no GPU has 60 cores free") -> HistoryEntry:
    return HistoryEntry(number=number, at=NOW - 60, what="refused", id="c", pod=pod, kind="core", size=60, why=why, code="no_fit")


async def shows(place: Locator, *texts: str) -> None:
    for text in texts:
        await expect(place).to_contain_text(text)


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


@asynccontextmanager
async def opened(
    browser: Browser, stage: Stage, shown: Document | None = None, *, containers: int = len(PODS), **context: Any
) -> AsyncIterator[Page]:
    """The page with so many containers. `shown`: another document than the present one; `context`: see `visit`."""
    if shown is not None:
        stage.show(shown)
    async with visit(browser, stage.url, **context) as seen:
        yield await loaded(seen, containers)
