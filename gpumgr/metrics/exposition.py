"""All metrics as text, for whoever scrapes: rendered on a thread once a sample period, then handed out as ready bytes.

Rule 1. A scrape of a format that was asked for lately costs nothing: its bytes are there, compressed ones if those were asked for.
Rule 2. What nobody asks for is not rendered: a format that was not scraped for a while waits for its next scrape.
Rule 3. No scrape touches NVML, the kubelet or a file other than the process's own in /proc.
Rule 4. All formats of one sample period are drawn from one picture.
Rule 5. Rendering lets the event loop through: an Allocate that comes meanwhile doesn't wait for its end.
"""

import asyncio
import gzip
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from gpumgr.agent.picture import Picture
from gpumgr.metrics.live import Metrics
from gpumgr.metrics.pace import paced
from gpumgr.metrics.text import page

#: A format stays rendered this long after its last scrape: longer than any usual scrape interval.
WANTED_SECONDS: Final = 150.0
#: Fastest level: it takes most of what there is to gain from such text.
_GZIP_LEVEL: Final = 1

_OPENMETRICS_TYPE: Final = "application/openmetrics-text"
_PLAIN_TYPES: Final = ("text/plain", "text/*", "*/*")


@dataclass(frozen=True, slots=True)
class _Format:
    content_type: str
    openmetrics: bool


_CLASSIC: Final = _Format("text/plain; version=0.0.4; charset=utf-8", openmetrics=False)
_OPENMETRICS: Final = _Format("application/openmetrics-text; version=1.0.0; charset=utf-8", openmetrics=True)

#: A format, and whether it is compressed.
_Wish = tuple[_Format, bool]


class Exposition:
    """Pages of the metrics. `refresh` is called once a sample period, `scrape` for each request; both on the event loop."""

    def __init__(
        self, metrics: Metrics, picture: Callable[[], Picture | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`picture` gives the instant to draw, None as long as there is none."""
        self._metrics = metrics
        self._picture = picture
        self._clock = clock
        self._lock = asyncio.Lock()
        self._pages: dict[_Wish, bytes] = {}
        self._wished_at: dict[_Wish, float] = {}

    async def refresh(self) -> None:
        """Renders anew what was scraped lately, and forgets the rest."""
        async with self._lock:
            oldest = self._clock() - WANTED_SECONDS
            self._wished_at = {wish: at for wish, at in self._wished_at.items() if at >= oldest}
            if not self._wished_at:
                self._pages = {}
                return
            self._show()
            self._pages = await self._render(self._wished_at)

    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        """Headers and body, in the format and encoding that the request's headers prefer."""
        wish = (_OPENMETRICS if prefers_openmetrics(accept) else _CLASSIC, accepts_gzip(accept_encoding))
        self._wished_at[wish] = self._clock()
        headers = {"Content-Type": wish[0].content_type, "Vary": "Accept, Accept-Encoding"}
        if wish[1]:
            headers["Content-Encoding"] = "gzip"
        return headers, self._pages.get(wish) or await self._first(wish)

    async def _first(self, wish: _Wish) -> bytes:
        """A page that was not wanted until now; scrapes that come together wait for one rendering."""
        async with self._lock:
            if wish not in self._pages:
                if (text := self._pages.get((wish[0], False))) is not None:
                    self._pages[wish] = await asyncio.to_thread(_compressed, text)
                else:
                    if not self._pages:
                        self._show()
                    self._pages |= await self._render([wish])
            return self._pages[wish]

    def _show(self) -> None:
        if (picture := self._picture()) is not None:
            self._metrics.show(picture)

    async def _render(self, wishes: Collection[_Wish]) -> dict[_Wish, bytes]:
        return await asyncio.to_thread(_render_pages, self._metrics, tuple(wishes))


def _render_pages(metrics: Metrics, wishes: Collection[_Wish]) -> dict[_Wish, bytes]:
    """All formats of one instant, and with each compressed one also its text."""
    blocks = list(paced(metrics.blocks()))
    pages: dict[_Wish, bytes] = {}
    for wanted in {wanted for wanted, _ in wishes}:
        text = pages[wanted, False] = page(blocks, openmetrics=wanted.openmetrics)
        if (wanted, True) in wishes:
            pages[wanted, True] = _compressed(text)
    return pages


def _compressed(text: bytes) -> bytes:
    return gzip.compress(text, _GZIP_LEVEL, mtime=0)


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header ranks OpenMetrics 1.0 (or its drafts) at least as high as plain text."""
    openmetrics_weight = plain_weight = 0.0
    for name, weight, parameters in _ranked(accept):
        if name == _OPENMETRICS_TYPE and parameters.get("version", "1.0.0") in ("1.0.0", "0.0.1"):
            openmetrics_weight = max(openmetrics_weight, weight)
        elif name in _PLAIN_TYPES:
            plain_weight = max(plain_weight, weight)
    return openmetrics_weight > 0 and openmetrics_weight >= plain_weight


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header allows gzip; one that is not there allows nothing."""
    weights = {name: weight for name, weight, _ in _ranked(accept_encoding)}
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def _ranked(header: str) -> list[tuple[str, float, dict[str, str]]]:
    """Entries of an Accept header (RFC 9110, 12.4.2): name in lower case, weight 0..1, other parameters. Malformed ones weigh 0."""
    entries = []
    for entry in header.split(","):
        name, *words = (word.strip() for word in entry.split(";"))
        parameters = {key.strip().lower(): value.strip() for key, _, value in (word.partition("=") for word in words)}
        try:
            weight = float(parameters.pop("q", "1"))
        except ValueError:
            weight = 0.0
        entries.append((name.lower(), weight, parameters))
    return entries
