"""What is counted while it happens, and that all names keep the rules that `promtool check metrics` applies."""

import re
from dataclasses import dataclass
from typing import get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import gpumgr
from gpumgr.agent.picture import Picture
from gpumgr.agent.ports import Meter
from gpumgr.app.truth import Meter as TruthMeter
from gpumgr.enforcement.backend import BackendName, FindingCode
from gpumgr.metrics.live import BACKENDS, FINDINGS, OUTCOMES, Drift, Metrics
from gpumgr.units import CORE_RESOURCE, MEMORY_RESOURCE, Kind
from gpumgr.usage.picture import GpuUse, NodeUse

from .pictures import allocation, name_of, sample_of, uuid_of, view_of

#: Words of promtool's linter that must not stand in a name: types, and units that are no base units.
_FORBIDDEN_WORDS = {
    *("counter", "gauge", "histogram", "summary", "untyped"),
    *("s", "sec", "ms", "us", "ns", "b", "kb", "mb", "gb", "kib", "mib", "gib", "percent"),
    *(
        "milliseconds",
        "microseconds",
        "nanoseconds",
        "minutes",
        "hours",
        "days",
        "kilobytes",
        "megabytes",
        "gigabytes",
        "mebibytes",
    ),
}


@dataclass(frozen=True)
class _State:
    registered: bool
    registrations: int


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(node="node-1", version=gpumgr.__version__, clock=lambda: 110.0, wall_clock=lambda: 5000.0, process=False)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"gpumgr_{name}", labels)


def families(metrics: Metrics) -> list[Metric]:
    return list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))


def test_calls_are_counted_by_outcome(metrics: Metrics) -> None:
    metrics.called("Allocate", "core", "ok", 0.002)
    metrics.called("Allocate", "core", "no_fit", 0.001)
    metrics.called("GetPreferredAllocation", "memory", "ok", 0.2)
    metrics.called("PreStartContainer", "memory", "conflict", 0.2)
    assert value(metrics, "allocate_requests_total", resource=CORE_RESOURCE, outcome="ok") == 1
    assert value(metrics, "allocate_requests_total", resource=CORE_RESOURCE, outcome="no_fit") == 1
    assert value(metrics, "allocate_duration_seconds_count", resource=CORE_RESOURCE) == 2
    assert value(metrics, "allocate_duration_seconds_bucket", resource=CORE_RESOURCE, le="0.0025") == 2
    assert value(metrics, "prefer_requests_total", resource=MEMORY_RESOURCE, outcome="ok") == 1
    assert value(metrics, "prestart_requests_total", resource=MEMORY_RESOURCE, outcome="conflict") == 1
    assert value(metrics, "prestart_duration_seconds_sum", resource=MEMORY_RESOURCE) == pytest.approx(0.2)


def test_all_outcomes_stand_from_the_start_and_none_is_added(metrics: Metrics) -> None:
    metrics.called("Allocate", "core", "surprise", 0.001)
    metrics.called("GetDevicePluginOptions", "core", "ok", 0.001)
    found = {s.labels["outcome"] for f in families(metrics) for s in f.samples if s.name == "gpumgr_allocate_requests_total"}
    assert found == set(OUTCOMES)
    assert value(metrics, "allocate_requests_total", resource=CORE_RESOURCE, outcome="internal") == 1


def test_drift_is_counted_by_kind(metrics: Metrics) -> None:
    kinds: tuple[Drift, ...] = ("freed", "renamed", "adopted", "rejected")
    meter: Meter = metrics
    for kind in kinds:
        meter.drifted(kind, 2)
    assert [value(metrics, "book_reconcile_drift_total", kind=kind) for kind in kinds] == [2.0] * 4


def test_registrations_never_count_back(metrics: Metrics) -> None:
    for state in (_State(True, 1), _State(False, 1), _State(True, 2), _State(True, 0), _State(True, 1)):
        metrics.linked("core", state)
    assert value(metrics, "kubelet_registered", resource=CORE_RESOURCE) == 1
    assert value(metrics, "kubelet_registrations_total", resource=CORE_RESOURCE) == 3
    assert value(metrics, "kubelet_registered", resource=MEMORY_RESOURCE) == 0


@pytest.mark.parametrize("kind", ["core", "memory"])
def test_offered_lists_are_counted(metrics: Metrics, kind: Kind) -> None:
    metrics.listed(kind)
    assert value(metrics, "listandwatch_updates_total", resource=f"tencent.com/vcuda-{kind}") == 1


def test_xids_are_counted_by_gpu_and_number(metrics: Metrics) -> None:
    metrics.xid(uuid_of(0), 79)
    metrics.xid(None, 79)
    metrics.xid(uuid_of(0), 2**40)
    metrics.xid(uuid_of(0), -1)
    assert value(metrics, "gpu_xid_events_total", gpu=uuid_of(0), xid="79") == 1
    assert value(metrics, "gpu_xid_events_total", gpu="", xid="79") == 1
    assert value(metrics, "gpu_xid_events_total", gpu=uuid_of(0), xid="other") == 2


def test_offenders_and_findings_are_counted(metrics: Metrics) -> None:
    meter: TruthMeter = metrics
    meter.went_over()
    meter.went_over()
    meter.evicted()
    meter.found("hami-core", "tampered")
    meter.found("a new one", "what a surprise")
    assert value(metrics, "over_limit_total") == 2
    assert value(metrics, "evictions_total") == 1
    assert value(metrics, "enforcement_findings_total", backend="hami-core", code="tampered") == 1
    assert value(metrics, "enforcement_findings_total", backend="mps", code="broken") == 0
    assert value(metrics, "enforcement_findings_total", backend="other", code="other") == 1


def test_the_mechanisms_and_their_findings_are_those_that_exist() -> None:
    assert get_args(BackendName) == BACKENDS
    assert get_args(FindingCode) == FINDINGS


def test_the_age_of_a_sample_does_not_follow_the_wall_clock(metrics: Metrics) -> None:
    assert value(metrics, "nvml_last_sample_timestamp_seconds") is None
    assert value(metrics, "nvml_up") == 0
    metrics.show(Picture(view=view_of(), sample=sample_of(0), sampled_at=100.0, nvml_up=True))
    assert value(metrics, "nvml_last_sample_timestamp_seconds") == 4990.0
    assert value(metrics, "nvml_up") == 1


def test_loop_lag_is_a_histogram(metrics: Metrics) -> None:
    metrics.lagged(0.02)
    assert value(metrics, "event_loop_lag_seconds_bucket", le="0.025") == 1
    assert value(metrics, "event_loop_lag_seconds_bucket", le="0.01") == 0


def test_the_build_tells_its_versions(metrics: Metrics) -> None:
    (sample,) = next(f for f in families(metrics) if f.name == "gpumgr_build_info").samples
    assert sample.labels["version"] == gpumgr.__version__
    assert re.fullmatch(r"3\.\d+\.\d+.*", sample.labels["python"])


def test_the_process_tells_its_memory() -> None:
    registry = Metrics(node="node-1", version="1").registry
    assert (registry.get_sample_value("process_resident_memory_bytes") or 0) > 2**20


def test_names_keep_the_rules_of_promtool() -> None:
    metrics = Metrics(node="node-1", version="1")
    view = view_of(allocation("a", ("team", "share"), cores={0: 1}), nvlinks=2)
    metrics.show(
        Picture(
            view=view,
            sample=sample_of(0),
            nvml_up=True,
            use=NodeUse(taken_at=0.0, gpus={name_of(0): GpuUse(uuid=uuid_of(0))}),
            enforcement=(("mps", "cores and memory"),),
            vcuda_registrations={"ok": 1},
            mps_daemon_restarts={uuid_of(0): 1},
        )
    )
    metrics.xid(uuid_of(0), 79)
    seen = set()
    for family in families(metrics):
        # The parser takes a counter's _total off its name.
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert family.documentation, name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert re.fullmatch(r"(gpumgr|process)(_[a-z]+)+", name), name
        assert not _FORBIDDEN_WORDS & set(name.split("_")), name
        assert name.endswith("_total") == (family.type == "counter"), name
        assert not re.search(r"_(bucket|count|sum|created)$", name), name
        assert all(re.fullmatch(r"[a-z_]+", label) for s in family.samples for label in s.labels), name
        assert name not in seen
        seen.add(name)
