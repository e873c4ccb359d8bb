"""Gauges and counters as the text that Prometheus reads, in both of its formats, made fast.

A series' line is the same in both formats, so it is made once; only the heads differ: a counter is called without `_total` in an
OpenMetrics head, and quotes are escaped in its help. Sources: Prometheus' text-based format 0.0.4, OpenMetrics 1.0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.metrics_core import Metric

_IN_LABEL: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_IN_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is measured. `name` is that of its lines: a counter's ends in `_total`. `about` is its help, `kind` "gauge", "counter" or
    "histogram"."""

    name: str
    about: str
    kind: str = "gauge"
    labels: tuple[str, ...] = ()


def gauge(name: str, about: str, *labels: str) -> Family:
    """One of our own; `name` is without the prefix that all of ours have."""
    return Family(name=f"gpumgr_{name}", about=about, labels=labels)


def counter(name: str, about: str, *labels: str) -> Family:
    """One of our own, as `gauge`; `name` ends in `_total`."""
    return Family(name=f"gpumgr_{name}", about=about, kind="counter", labels=labels)


@dataclass(frozen=True, slots=True)
class Block:
    """A family with the lines of all its series."""

    family: Family
    lines: bytes

    def head(self, *, openmetrics: bool) -> bytes:
        family = self.family
        name = family.name.removesuffix("_total") if openmetrics and family.kind == "counter" else family.name
        about = family.about.translate(_IN_LABEL if openmetrics else _IN_HELP)
        return f"# HELP {name} {about}\n# TYPE {name} {family.kind}\n".encode()


def block(family: Family, series: Mapping[str, float]) -> Block:
    """`series`: the text of the labels (see `label_text`; "" = none) -> value. Booleans count 1 and 0."""
    name = family.name
    lines = [f"{name}{{{labels}}} {+value}\n" if labels else f"{name} {+value}\n" for labels, value in series.items()]
    # A name that is no Unicode text (half a surrogate pair) must not cost the page.
    return Block(family, "".join(lines).encode("utf-8", "replace"))


def drawn(metric: Metric) -> Block:
    """What prometheus_client counts: gauges, counters and histograms."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    lines = [
        f"{s.name}{{{label_text(s.labels, s.labels.values())}}} {+s.value}\n" if s.labels else f"{s.name} {+s.value}\n"
        for s in metric.samples
    ]
    return Block(Family(name=name, about=metric.documentation, kind=metric.type), "".join(lines).encode("utf-8", "replace"))


def page(blocks: Iterable[Block], *, openmetrics: bool) -> bytes:
    """A whole answer to a scrape."""
    parts = [part for each in blocks for part in (each.head(openmetrics=openmetrics), each.lines)]
    return b"".join((*parts, b"# EOF\n")) if openmetrics else b"".join(parts)


def label_text(names: Iterable[str], values: Iterable[str]) -> str:
    """What stands between the braces."""
    return ",".join([f'{name}="{value.translate(_IN_LABEL)}"' for name, value in zip(names, values, strict=True)])


class LabelTexts:
    """Texts of one set of labels, kept as long as each page has them."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._page: dict[tuple[str, ...], str] = {}
        self._page_before: dict[tuple[str, ...], str] = {}

    def of(self, *values: str) -> str:
        text = self._page.get(values)
        if text is None:
            text = self._page[values] = self._page_before.get(values) or label_text(self._names, values)
        return text

    def turn(self) -> None:
        """A new page begins: what the last one did not have is forgotten."""
        self._page, self._page_before = {}, self._page
