"""What is counted while it happens: prometheus_client's instruments, in a registry of their own that remembers what each one is."""

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from gpumgr.metrics import text
from gpumgr.metrics.text import Family


class Instruments:
    """`families` describes all that were made here. Names are without the prefix that all of ours have."""

    def __init__(self) -> None:
        # A start time for every counter would double the series; process_start_time_seconds says the same once.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry: Final = CollectorRegistry(auto_describe=False)
        self.families: Final[list[Family]] = []

    def gauge(self, name: str, about: str, *labels: str) -> Gauge:
        family = self._remember(text.gauge(name, about, *labels))
        return Gauge(family.name, about, labels, registry=self.registry)

    def counter(self, name: str, about: str, *labels: str) -> Counter:
        """`name` ends in `_total`."""
        family = self._remember(text.counter(name, about, *labels))
        return Counter(family.name, about, labels, registry=self.registry)

    def histogram(self, name: str, about: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        family = self._remember(Family(name=f"gpumgr_{name}", about=about, kind="histogram", labels=labels))
        return Histogram(family.name, about, labels, buckets=buckets, registry=self.registry)

    def _remember(self, family: Family) -> Family:
        self.families.append(family)
        return family
