"""How soon the page is there: 8 GPUs with 104 containers, headless Chromium, an empty cache each time.

Prints one JSON object: milliseconds p50/p99 from the navigation's start to the browser's own `first_paint` (W3C Paint Timing). Without
Chromium the object is empty.

Run: python -m tests.bench.bench_paint [--loads N]
"""

import os
from collections.abc import Mapping
from typing import Final

from playwright.async_api import Browser

from gpumgr.agent.api import to_json_data
from gpumgr.web.state import node_state
from tests.bench import figures
from tests.bench.bench_metrics import picture_of
from tests.bench.figures import spread
from tests.e2e.browser import CHROMIUM, Stage, chromium, visit

CONTAINERS_PER_GPU: Final = 13

# A loop inside the page: Playwright's own wait_for_function evaluates a string, which the page's policy forbids.
_FIRST_PAINT: Final = """async () => {
  const paint = () => performance.getEntriesByName("first-paint")[0];
  while (!paint()) await new Promise((done) => setTimeout(done, 5));
  return paint().startTime / 1000;
}"""


async def load(browser: Browser, url: str) -> float:
    """Seconds to the first paint."""
    async with visit(browser, url) as seen:
        seconds: float = await seen.page.evaluate(_FIRST_PAINT)
        return seconds


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
        "first_paint": spread([found]),
    }


if __name__ == "__main__":
    figures.main(measure, __doc__, loads=10)
