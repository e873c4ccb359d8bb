"""The renderer's output equals that of prometheus_client for any labels and values, in both formats."""

import math
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic
from prometheus_client.registry import Collector

from gpumgr.common.prometheus_text import Family, kept_label_text, label_text, page, render, render_metric

_SPECIAL = '\\"\n\r\t{},=# \u2028\u00e9\U0001f600'
_HOSTILE = st.text(st.sampled_from(_SPECIAL + "ab_1"), max_size=20) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=253
)
#: Not "total", a constant of the code, which Hypothesis draws: prometheus_client has no counter x_total_total.
_NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=8).filter(lambda name: name != "total")
_LABELS = st.lists(_NAMES, max_size=4, unique=True)
_NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.booleans()

Drawn = tuple[Family, dict[tuple[str, ...], float]]


@st.composite
def _families(draw: st.DrawFn) -> list[Drawn]:
    found = []
    for name in draw(st.lists(_NAMES, unique=True, max_size=4)):
        labels = tuple(draw(_LABELS))
        counter = draw(st.booleans())
        # A counter of OpenMetrics is neither negative nor infinite.
        numbers = st.integers(0, 2**53) | st.floats(0, 1e300) if counter else _NUMBERS
        values = st.dictionaries(st.tuples(*(_HOSTILE for _ in labels)), numbers, max_size=4)
        family = Family(
            name=f"x_{name}_total" if counter else f"x_{name}",
            about=draw(st.text(string.ascii_letters + ' "\\\n', max_size=20).map(str.strip)),
            kind="counter" if counter else "gauge",
            labels=labels,
        )
        found.append((family, draw(values)))
    return found


class _Given(Collector):
    def __init__(self, families: list[Drawn]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        found: list[Metric] = []
        for family, series in self._families:
            counter = family.kind == "counter"
            kind, name = (
                (CounterMetricFamily, family.name.removesuffix("_total")) if counter else (GaugeMetricFamily, family.name)
            )
            metric = kind(name, family.about, labels=family.labels)
            for values, number in series.items():
                metric.add_metric(values, number)
            found.append(metric)
        return found


def _rendered(families: list[Drawn], *, modern: bool) -> str:
    blocks = [
        render(family, {label_text(family.labels, values): number for values, number in series.items()})
        for family, series in families
    ]
    return page(blocks, openmetrics=modern).decode()


def _parsed(families: list[Metric]) -> list[object]:
    return [(each.name, each.type, each.documentation, each.samples) for each in families]


@settings(deadline=None)
@given(_families())
def test_the_output_equals_that_of_prometheus_client(families: list[Drawn]) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    classic = list(parse_classic(_rendered(families, modern=False)))
    assert _parsed(classic) == _parsed(list(parse_classic(generate_latest(registry).decode())))
    modern = list(parse_openmetrics(_rendered(families, modern=True)))  # type: ignore[no-untyped-call]
    theirs = list(parse_openmetrics(openmetrics.generate_latest(registry).decode()))  # type: ignore[no-untyped-call]
    assert _parsed(modern) == _parsed(theirs)


@settings(deadline=None)
@given(_families())
def test_what_prometheus_client_counts_keeps_its_samples(families: list[Drawn]) -> None:
    metrics = _Given(families).collect()
    text = page(map(render_metric, metrics), openmetrics=False).decode()
    assert [each.samples for each in parse_classic(text)] == [each.samples for each in metrics]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "1"),
        (False, "0"),
        (2**60, "1152921504606846976"),
        (0.05, "0.05"),
        (1e22, "1e+22"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers_keep_all_their_digits(value: float, text: str) -> None:
    assert render(Family(name="x", about=""), {"": value}).lines == f"x {text}\n".encode()


def test_heads_differ_between_the_formats() -> None:
    drops = render(Family(name="x_total", about='say "no"\nor \\', kind="counter"), {"": 1})
    assert page([drops], openmetrics=False) == b'# HELP x_total say "no"\\nor \\\\\n# TYPE x_total counter\nx_total 1\n'
    assert page([drops], openmetrics=True) == b'# HELP x say \\"no\\"\\nor \\\\\n# TYPE x counter\nx_total 1\n# EOF\n'


def test_half_a_surrogate_pair_does_not_cost_the_page() -> None:
    assert render(Family(name="x", about="", labels=("a",)), {label_text(("a",), ("\ud800b",)): 1}).lines == b'x{a="?b"} 1\n'


def test_a_kept_label_text_is_made_once() -> None:
    first = kept_label_text(("pod", "gpu"), 'a"b', "0")
    assert first == label_text(("pod", "gpu"), ('a"b', "0"))
    assert kept_label_text(("pod", "gpu"), 'a"b', "0") is first
