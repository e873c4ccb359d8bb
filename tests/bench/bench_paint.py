"""How soon the page is there: 8 GPUs with 104 containers, headless Chromium, an empty cache each time.

Prints one JSON object: milliseconds p50/p99 from the navigation's start. `first_paint` and `first_contentful_paint` are the browser's own
(W3C Paint Timing); `filled` is when the table has its containers. Without Chromium the object is empty.

Run: python -m tests.bench.bench_paint [--loads N]
"""

import os
from collections.abc import Mapping
from typing import Final

from playwright.async_api import Browser

from gpumgr.agent.api import to_json_data
from gpumgr.web.responses import PAGE
from gpumgr.web.state import node_state
from tests.bench import figures
from tests.bench.bench_metrics import picture_of
from tests.bench.figures import spread
from tests.e2e.browser import CHROMIUM, Stage, chromium, visit

CONTAINERS_PER_GPU: Final = 13

_FILLED: Final = """
new MutationObserver((_, watch) => {
  if (document.querySelector("#rows tr")) { watch.disconnect(); window.filled = performance.now(); }
}).observe(document, { childList: true, subtree: true });
"""
# A loop inside the page: Playwright's own wait_for_function evaluates a string, which the page's policy forbids.
_TIMES: Final = """async () => {
  const paints = () => performance.getEntriesByType("paint");
  while (!window.filled || paints().length < 2) await new Promise((done) => setTimeout(done, 5));
  return { ...Object.fromEntries(paints().map((entry) => [entry.name.replaceAll("-", "_"), entry.startTime])), filled: window.filled };
}"""


async def load(browser: Browser, url: str) -> Mapping[str, float]:
    """Milliseconds by event, of one load."""
    async with visit(browser, url, before=_FILLED) as seen:
        times: Mapping[str, float] = await seen.page.evaluate(_TIMES)
        return times


async def measure(loads: int) -> Mapping[str, object]:
    if not os.access(CHROMIUM, os.X_OK):
        return {}
    stage = Stage()
    await stage.open()
    document = to_json_data(node_state(picture_of(CONTAINERS_PER_GPU), []))
    stage.show(document)
    try:
        async with chromium() as browser:
            await load(browser, stage.url)  # the browser's own first steps
            found = [await load(browser, stage.url) for _ in range(loads)]
    finally:
        await stage.close()
    return {
        "containers": len(document["containers"]),
        "page_bytes": PAGE.stat().st_size,
        **{name: spread([[times[name] / 1000 for times in found]]) for name in found[0]},
    }


if __name__ == "__main__":
    figures.main(measure, __doc__, loads=10)
