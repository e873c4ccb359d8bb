"""Responses to scrapes: rendered on a thread once a sample period, then sent as ready bytes.

Invariants:
- A scrape of a format that was scraped recently sends bytes that were rendered and compressed before.
- A format that was not scraped for a while is not rendered until its next scrape.
- No scrape calls NVML or the kubelet, or reads a file other than the process's own in /proc.
- All formats of one sample period are rendered from one report.
- Rendering releases the GIL often: an Allocate call does not wait until the rendering has ended.
"""

import asyncio
import gzip
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.aio import yielding_gil
from gpumgr.common.prometheus_text import page
from gpumgr.web.metrics.registry import Metrics
from gpumgr.web.responses import accepts

#: A format is rendered for this long after its last scrape: longer than a usual scrape interval.
WANTED_SECONDS: Final = 150.0
#: The fastest level: higher levels save few bytes of such text.
_GZIP_LEVEL: Final = 1

_OPENMETRICS_TYPE: Final = "application/openmetrics-text"

#: Whether the format is OpenMetrics -> the Content-Type.
_CONTENT_TYPES: Final = {
    False: "text/plain; version=0.0.4; charset=utf-8",
    True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
#: Whether the format is OpenMetrics, and whether the page is compressed.
_Variant = tuple[bool, bool]


class Exposition:
    """Pages of the metrics. `refresh` is called once a sample period, `scrape` for each request; both on the event loop."""

    def __init__(
        self, metrics: Metrics, report: Callable[[], NodeReport | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`report` returns the report to render; None: there is none yet."""
        self._metrics = metrics
        self._report = report
        self._clock = clock
        self._lock = asyncio.Lock()
        self._pages: dict[_Variant, bytes] = {}
        self._scraped_at: dict[_Variant, float] = {}

    async def refresh(self) -> None:
        """Renders the variants that were scraped recently, and drops the other pages."""
        async with self._lock:
            oldest = self._clock() - WANTED_SECONDS
            self._scraped_at = {variant: at for variant, at in self._scraped_at.items() if at >= oldest}
            if not self._scraped_at:
                self._pages = {}
                return
            self._take_report()
            self._pages = await self._render(self._scraped_at)

    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        """Headers and body, in OpenMetrics and gzip if the request's headers name them."""
        variant = (accepts(accept, _OPENMETRICS_TYPE), accepts(accept_encoding, "gzip"))
        self._scraped_at[variant] = self._clock()
        headers = {"Content-Type": _CONTENT_TYPES[variant[0]], "Vary": "Accept, Accept-Encoding"}
        if variant[1]:
            headers["Content-Encoding"] = "gzip"
        return headers, self._pages.get(variant) or await self._first(variant)

    async def _first(self, variant: _Variant) -> bytes:
        """A page that is not rendered yet; concurrent scrapes wait for one rendering."""
        async with self._lock:
            if variant not in self._pages:
                if (text := self._pages.get((variant[0], False))) is not None:
                    self._pages[variant] = await asyncio.to_thread(_compressed, text)
                else:
                    if not self._pages:
                        self._take_report()
                    self._pages |= await self._render([variant])
            return self._pages[variant]

    def _take_report(self) -> None:
        if (report := self._report()) is not None:
            self._metrics.set_report(report)

    async def _render(self, variants: Collection[_Variant]) -> dict[_Variant, bytes]:
        return await asyncio.to_thread(_render_pages, self._metrics, tuple(variants))


def _render_pages(metrics: Metrics, variants: Collection[_Variant]) -> dict[_Variant, bytes]:
    """Renders the pages from one report; a compressed page is returned with its text."""
    families = list(yielding_gil(metrics.render()))
    pages: dict[_Variant, bytes] = {}
    for each in {openmetrics for openmetrics, _ in variants}:
        text = pages[each, False] = page(families, openmetrics=each)
        if (each, True) in variants:
            pages[each, True] = _compressed(text)
    return pages


def _compressed(text: bytes) -> bytes:
    return gzip.compress(text, _GZIP_LEVEL, mtime=0)
