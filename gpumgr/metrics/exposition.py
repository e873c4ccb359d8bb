"""The registry as text, for whoever scrapes: rendered on a thread once a sample period, then handed out as ready bytes.

Rule 1. A scrape of a format that was asked for lately costs nothing: its bytes are there, the compressed ones from the second on.
Rule 2. What nobody asks for is not rendered: a format that was not scraped for a while waits for its next scrape.
Rule 3. No scrape touches NVML, the kubelet or a file other than the process's own in /proc.
Rule 4. Rendering lets the event loop through: an Allocate that comes meanwhile doesn't wait for its end.
"""

import asyncio
import gzip
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from gpumgr.agent.picture import Picture
from gpumgr.metrics.live import Metrics

#: A format stays rendered this long after its last scrape: longer than any usual scrape interval.
WANTED_SECONDS: Final = 150.0
#: Fastest level: it takes most of what there is to gain from such text.
_GZIP_LEVEL: Final = 1
#: Long enough for a waiting event loop to take over.
_BREATH_SECONDS: Final = 50e-6

_OPENMETRICS_TYPE: Final = "application/openmetrics-text"
_PLAIN_TYPES: Final = ("text/plain", "text/*", "*/*")


@dataclass(frozen=True, slots=True)
class _Format:
    content_type: str
    render: Callable[[Collector], bytes]


_CLASSIC: Final = _Format(CONTENT_TYPE_PLAIN_0_0_4, generate_latest)
_OPENMETRICS: Final = _Format(openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest)


@dataclass(slots=True)
class _Page:
    text: bytes
    gzipped: bytes | None = None


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
        self._pages: dict[_Format, _Page] = {}
        self._wanted_at: dict[_Format, float] = {}

    async def refresh(self) -> None:
        """Renders anew what was scraped lately, and forgets the rest."""
        async with self._lock:
            oldest = self._clock() - WANTED_SECONDS
            formats = [wanted for wanted, at in self._wanted_at.items() if at >= oldest]
            self._pages = await self._render(formats) if formats else {}

    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        """Headers and body, in the format and encoding that the request's headers prefer."""
        wanted = _OPENMETRICS if prefers_openmetrics(accept) else _CLASSIC
        self._wanted_at[wanted] = self._clock()
        page = self._pages.get(wanted) or await self._first(wanted)
        headers = {"Content-Type": wanted.content_type, "Vary": "Accept, Accept-Encoding"}
        if not accepts_gzip(accept_encoding):
            return headers, page.text
        if page.gzipped is None:
            page.gzipped = await asyncio.to_thread(gzip.compress, page.text, _GZIP_LEVEL, mtime=0)
        return {**headers, "Content-Encoding": "gzip"}, page.gzipped

    async def _first(self, wanted: _Format) -> _Page:
        """A page of a format that was not wanted until now; scrapes that come together wait for one rendering."""
        async with self._lock:
            if wanted not in self._pages:
                self._pages |= await self._render([wanted])
            return self._pages[wanted]

    async def _render(self, formats: list[_Format]) -> dict[_Format, _Page]:
        if (picture := self._picture()) is not None:
            self._metrics.show(picture)
        return await asyncio.to_thread(_render_pages, self._metrics.registry, formats)


class _Paced(Collector):
    """All families of a registry, with a breath after each.

    A thread that computes gives the interpreter's lock away every 5 ms only, one that sleeps at once.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            time.sleep(_BREATH_SECONDS)


def _render_pages(registry: CollectorRegistry, formats: list[_Format]) -> dict[_Format, _Page]:
    return {wanted: _Page(wanted.render(_Paced(registry))) for wanted in formats}


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
