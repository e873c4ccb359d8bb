"""What is counted while it happens. tests/e2e/test_promtool.py has the rules for names."""

import re
from collections.abc import Callable
from typing import get_args

import pytest

import gpumgr
from gpumgr.common.units import CORE_RESOURCE, DRA_DRIVER, MEMORY_RESOURCE
from gpumgr.web.metrics import OUTCOMES, Drift, Metrics, catalogue

from .pages import families, full_picture, metrics_of
from .pictures import uuid_of


@pytest.fixture
def metrics() -> Metrics:
    return metrics_of(None)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The value of one series; None: it is not there."""
    found = {
        (each.name, frozenset(each.labels.items())): each.value
        for family in families(metrics).values()
        for each in family.samples
    }
    return found.get((f"gpumgr_{name}", frozenset(labels.items())))


def calls(metrics: Metrics) -> None:
    metrics.called("Allocate", "core", "ok", 0.002)
    metrics.called("Allocate", "core", "no_fit", 0.001)
    metrics.called("GetPreferredAllocation", "memory", "ok", 0.2)
    metrics.called("PreStartContainer", "memory", "conflict", 0.2)


def xids(metrics: Metrics) -> None:
    for uuid, number in ((uuid_of(0), 79), (None, 79), (uuid_of(0), 2**40), (uuid_of(0), -1)):
        metrics.xid(uuid, number)


@pytest.mark.parametrize(
    ("event", "name", "labels", "count"),
    [
        (calls, "allocate_requests_total", {"resource": CORE_RESOURCE, "outcome": "ok"}, 1),
        (calls, "allocate_requests_total", {"resource": CORE_RESOURCE, "outcome": "no_fit"}, 1),
        (calls, "allocate_duration_seconds_count", {"resource": CORE_RESOURCE}, 2),
        (calls, "allocate_duration_seconds_bucket", {"resource": CORE_RESOURCE, "le": "0.0025"}, 2),
        (calls, "prefer_requests_total", {"resource": MEMORY_RESOURCE, "outcome": "ok"}, 1),
        (calls, "prestart_requests_total", {"resource": MEMORY_RESOURCE, "outcome": "conflict"}, 1),
        (calls, "prestart_duration_seconds_sum", {"resource": MEMORY_RESOURCE}, 0.2),
        *((lambda m, kind=kind: m.drifted(kind, 2), "ledger_drift_total", {"kind": kind}, 2) for kind in get_args(Drift)),
        (lambda m: m.listed("core"), "listandwatch_updates_total", {"resource": CORE_RESOURCE}, 1),
        (lambda m: m.listed("memory"), "listandwatch_updates_total", {"resource": MEMORY_RESOURCE}, 1),
        (xids, "gpu_xid_events_total", {"gpu": uuid_of(0), "xid": "79"}, 1),
        (xids, "gpu_xid_events_total", {"gpu": "", "xid": "79"}, 1),
        (xids, "gpu_xid_events_total", {"gpu": uuid_of(0), "xid": "other"}, 2),
        (Metrics.went_over, "over_limit_total", {}, 1),
        (Metrics.evicted, "evictions_total", {}, 1),
        (
            lambda m: m.found("hami-core", "tampered"),
            "enforcement_findings_total",
            {"backend": "hami-core", "code": "tampered"},
            1,
        ),
        (lambda m: m.found("a new one", "what"), "enforcement_findings_total", {"backend": "other", "code": "other"}, 1),
        (lambda _: None, "enforcement_findings_total", {"backend": "mps", "code": "broken"}, 0),
        (lambda m: m.lagged(0.02), "event_loop_lag_seconds_bucket", {"le": "0.025"}, 1),
        (lambda m: m.lagged(0.02), "event_loop_lag_seconds_bucket", {"le": "0.01"}, 0),
    ],
)
def test_events_are_counted(
    metrics: Metrics, event: Callable[[Metrics], None], name: str, labels: dict[str, str], count: float
) -> None:
    event(metrics)
    assert value(metrics, name, **labels) == pytest.approx(count)


def test_all_outcomes_stand_from_the_start_and_none_is_added(metrics: Metrics) -> None:
    metrics.called("Allocate", "core", "surprise", 0.001)
    metrics.called("GetDevicePluginOptions", "core", "ok", 0.001)
    found = {s.labels["outcome"] for s in families(metrics)["gpumgr_allocate_requests"].samples}
    assert found == set(OUTCOMES)
    assert not [s.name for family in families(metrics).values() for s in family.samples if s.name.endswith("_created")]
    assert value(metrics, "allocate_requests_total", resource=CORE_RESOURCE, outcome="internal") == 1


def test_registrations_never_count_back(metrics: Metrics) -> None:
    for registered, registrations in ((True, 1), (False, 1), (True, 2), (True, 0), (True, 1)):
        metrics.linked("core", registered=registered, registrations=registrations)
    assert value(metrics, "kubelet_registered", resource=CORE_RESOURCE) == 1
    assert value(metrics, "kubelet_registrations_total", resource=CORE_RESOURCE) == 3
    assert value(metrics, "kubelet_registered", resource=MEMORY_RESOURCE) == 0


def test_in_mode_dra_the_driver_has_the_series_and_the_resources_have_none() -> None:
    metrics = Metrics(node="node-1", version="1", driver=DRA_DRIVER, process=False)
    metrics.linked(DRA_DRIVER, registered=True, registrations=2)
    metrics.called("NodePrepareResources", DRA_DRIVER, "ok", 0.002)
    metrics.called("NodeUnprepareResources", DRA_DRIVER, "surprise", 0.002)
    assert value(metrics, "kubelet_registered", resource=DRA_DRIVER) == 1
    assert value(metrics, "kubelet_registrations_total", resource=DRA_DRIVER) == 2
    assert value(metrics, "prepare_requests_total", resource=DRA_DRIVER, outcome="ok") == 1
    assert value(metrics, "prepare_duration_seconds_count", resource=DRA_DRIVER) == 1
    assert value(metrics, "unprepare_requests_total", resource=DRA_DRIVER, outcome="internal") == 1
    found = {s.labels["resource"] for family in families(metrics).values() for s in family.samples if "resource" in s.labels}
    assert found == {DRA_DRIVER}


def test_the_build_metric_has_the_versions() -> None:
    told = families(Metrics(node="node-1", version=gpumgr.__version__, process=False))
    (sample,) = told["gpumgr_build_info"].samples
    assert (sample.labels["version"], sample.value) == (gpumgr.__version__, 1)
    assert re.fullmatch(r"3\.\d+\.\d+.*", sample.labels["python"])


def test_the_process_metrics_have_the_memory() -> None:
    (sample,) = families(Metrics(node="node-1", version="1"))["process_resident_memory_bytes"].samples
    assert sample.value > 2**20


def test_the_catalogue_has_what_a_page_has() -> None:
    found = []
    metrics = metrics_of(full_picture(), gpu_manager_names=False)
    metrics.xid(uuid_of(0), 79)
    of_claims = families(Metrics(node="node-1", version="1", driver=DRA_DRIVER, process=False))
    for name, plain in families(metrics).items():
        family = of_claims[name] if "prepare_" in name else plain  # these have series in mode dra alone
        assert family.samples, family.name
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for each in family.samples for label in each.labels} - {"le"}
        found.append((name, family.type, labels, family.documentation))
    assert sorted(found) == [(name, kind, set(labels), about) for name, kind, labels, about in catalogue()]
