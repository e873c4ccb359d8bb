"""Metrics of the GPUs, and of the agent and its connections: a report and its series."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.agent.api import Cordon
from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.gpu_share import GpuLimits
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.quarantine import Quarantine
from gpumgr.placement.devices import GpuSample, NodeSample

from .pages import Series, families, metrics_of, ours, series, text_of
from .pictures import BLOCKS, allocation, name_of, sample_of, uuid_of, view_of, whole

SHARED = ("team", "share")
FIRST, SECOND = (uuid_of(0),), (uuid_of(1),)
XID = {uuid_of(0): "XID 79"}
UNKNOWN_GPU = view_of(count=3, broken=[1], known=[0, 2])
HARD = GpuLimits(memory="hard", memory_by="nvml-memory", cores="soft", cores_by="limiter")
QUARANTINE = Quarantine(held={name_of(0): frozenset({(7, 1)})})


def share(letter: str = "a", *mechanisms: str, **about: Any) -> Allocation:
    return replace(allocation(letter, SHARED, cores={0: 0b11111}, blocks={0: 0b11}), mechanisms=mechanisms, **about)


def test_the_text_of_a_family() -> None:
    report = NodeReport(view=view_of(count=1), sample=sample_of(0), nvml_up=True)
    info = (
        "# HELP gpumgr_gpu_info Description of the GPU; always 1.\n"
        "# TYPE gpumgr_gpu_info gauge\n"
        f'gpumgr_gpu_info{{node="node-1",gpu="{uuid_of(0)}",index="0",minor="0",model="NVIDIA A10",pci_bus_id="0000:00:00.0",'
        'numa="0",driver="550.54.15"} 1\n'
        "# HELP gpumgr_gpu_memory_total_bytes Memory of the GPU.\n"
    )
    assert info in text_of(metrics_of(report))


def test_a_sample_with_all_its_numbers() -> None:
    report = NodeReport(view=view_of(count=1), sample=sample_of(0), nvml_up=True)
    numbers = {
        "gpu_memory_total_bytes": BLOCKS * BLOCK_BYTES + 1,
        "gpu_memory_used_bytes": 1000,
        "gpu_memory_reserved_bytes": 10,
        "gpu_utilization_ratio": 0.25,
        "gpu_memory_copy_ratio": 0.5,
        "gpu_temperature_celsius": 40,
        "gpu_power_watts": 71.5,
        "gpu_healthy": 1,
        "gpu_cordoned": 0,
    }
    assert {name: ours(report, name) for name in numbers} == {name: {FIRST: number} for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("about", "name", "expected"),
    [
        ({}, "agent_ready", {(): 1.0}),
        ({"not_ready": ("no driver was found yet",)}, "agent_ready", {(): 0.0}),
        (
            {"nvml_errors": {("nvmlDeviceGetMemoryInfo", 15): 3}},
            "nvml_call_errors_total",
            {("15", "nvmlDeviceGetMemoryInfo"): 3.0},
        ),
        ({"streams": {"tencent.com/vcuda-core": 1}}, "listandwatch_streams", {("tencent.com/vcuda-core",): 1.0}),
        ({"connections": 4}, "http_connections", {(): 4.0}),
        ({"connections_refused": 2}, "http_connections_refused_total", {(): 2.0}),
        ({"disconnects": 3}, "http_disconnects_total", {(): 3.0}),
        ({"vcuda_registrations": {"ok": 3, "not_found": 1}}, "vcuda_registrations_total", {("ok",): 3.0, ("not_found",): 1.0}),
        ({"mps_daemon_restarts": {uuid_of(0): 2}}, "mps_daemon_restarts_total", {FIRST: 2.0}),
        ({"api_queue": ApiQueueState()}, "api_server_up", {(): 1.0}),
        ({"sample": sample_of(0)}, "gpu_power_watts", {}),
        ({"view": UNKNOWN_GPU, "nvml_up": True}, "gpus_not_readable", {(): 1.0}),
        ({"view": view_of(count=3, broken=[1], named=True), "nvml_up": True}, "gpus_not_readable", {(): 0.0}),
        ({"view": UNKNOWN_GPU}, "gpus_not_readable", {}),
        ({"cordons": {uuid_of(1): Cordon(reason="its fan rattles", draining=True)}}, "gpu_cordoned", {FIRST: 0.0, SECOND: 1.0}),
        # In the order of the labels' names: cores, cores_by, gpu, memory, memory_by.
        (
            {"gpu_limits": {uuid_of(0): HARD}},
            "gpu_enforcement_info",
            {("soft", "limiter", uuid_of(0), "hard", "nvml-memory"): 1.0},
        ),
        ({"gpu_limits": {uuid_of(1): GpuLimits()}}, "gpu_enforcement_info", {("none", "", uuid_of(1), "none", ""): 1.0}),
        ({"reasons": {uuid_of(0): "xid"}}, "gpu_healthy", {FIRST: 1.0, SECOND: 1.0}),
        ({"reasons": {uuid_of(0): "xid"}}, "gpu_unhealthy_reason", {}),
        ({"view": view_of(failed=XID)}, "gpu_healthy", {FIRST: 0.0, SECOND: 1.0}),
        ({"view": view_of(failed=XID)}, "gpu_unhealthy_reason", {(uuid_of(0), "other"): 1.0}),
        ({"view": view_of(failed=XID), "reasons": {uuid_of(0): "xid"}}, "gpu_unhealthy_reason", {(uuid_of(0), "xid"): 1.0}),
        (
            {"view": view_of(cordoned={uuid_of(0): "MIG is on"}), "reasons": {uuid_of(0): "mig"}},
            "gpu_unhealthy_reason",
            {(uuid_of(0), "mig"): 1.0},
        ),
        ({"view": view_of(quarantine=QUARANTINE)}, "gpu_unhealthy_reason", {(uuid_of(0), "quarantine"): 1.0}),
    ],
)
def test_each_fact_of_a_report_has_its_series(about: dict[str, Any], name: str, expected: Series) -> None:
    assert ours(NodeReport(**{"view": view_of(), **about}), name) == expected


def test_before_the_first_report_the_agent_is_not_ready() -> None:
    before = metrics_of(None)
    assert series(before, "gpumgr_nvml_up") == series(before, "gpumgr_agent_ready") == {(): 0.0}
    assert series(before, "gpumgr_nvml_last_sample_timestamp_seconds") == {}


@pytest.mark.parametrize(
    ("now", "unix_now", "told"),
    [
        pytest.param(110.0, 5000.0, 4990.0, id="ten seconds old"),
        pytest.param(110.0, 5000.0 - 3600, 4990.0 - 3600, id="the wall clock was set back"),
        pytest.param(99.0, 5000.0, 5000.0, id="never from the future"),
    ],
)
def test_the_age_of_a_sample_does_not_follow_the_wall_clock(now: float, unix_now: float, told: float) -> None:
    report = NodeReport(view=view_of(), sample=sample_of(0), sampled_at=100.0, nvml_up=True)
    metrics = metrics_of(report, clocks=(lambda: now, lambda: unix_now))
    assert series(metrics, "gpumgr_nvml_last_sample_timestamp_seconds") == {(): told}


def test_without_an_api_server_its_metrics_are_absent() -> None:
    told = families(metrics_of(NodeReport(view=view_of())))
    assert not [name for name in told if name.startswith("gpumgr_api_")]


def test_what_waits_for_the_api_server() -> None:
    api_queue = ApiQueueState(
        waiting=3,
        oldest_seconds=-0.5,
        dropped=2,
        written={("event", "refused"): 4, ("lease", "what"): 1},
        away=True,
        eviction_retries=7,
        unreadable=5,
    )
    report = NodeReport(view=view_of(), api_queue=api_queue)
    numbers = {
        "api_server_up": 0,
        "api_queue_waiting": 3,
        "api_queue_oldest_seconds": 0,
        "api_queue_dropped_total": 2,
        "eviction_retries_total": 7,
        "api_objects_unreadable": 5,
    }
    assert {name: ours(report, name) for name in numbers} == {name: {(): number} for name, number in numbers.items()}
    zeros = {(outcome, what): 0.0 for outcome in ("ok", "refused") for what in ("pod", "event", "node", "eviction")}
    assert ours(report, "api_writes_total") == {**zeros, ("refused", "event"): 4.0, ("other", "other"): 1.0}


@pytest.mark.parametrize(
    ("held", "count"),
    [
        pytest.param([share("a", "none")], 1, id="none"),
        pytest.param([share()], 1, id="granted before there were any"),
        pytest.param([share("a", "nvml-memory", "limiter")], 0, id="two"),
        pytest.param([whole("t", ("team", "train"), 0)], 0, id="a whole GPU"),
        pytest.param([share(anonymous=True)], 0, id="gpu-manager's"),
        pytest.param([share("a", "none", init=True), share("b", "none", uid="uid-a")], 1, id="an init container that is over"),
    ],
)
def test_shares_that_nothing_keeps_are_counted(held: list[Allocation], count: int) -> None:
    assert ours(NodeReport(view=view_of(*held)), "containers_without_enforcement") == {(): count}


def test_values_that_the_driver_does_not_report_have_no_series() -> None:
    sample = NodeSample(gpus={uuid_of(0): GpuSample(uuid=uuid_of(0), power_watts=70.0)}, failures={uuid_of(1): "no answer"})
    report = NodeReport(view=view_of(), sample=sample, nvml_up=True)
    assert ours(report, "gpu_power_watts") == {FIRST: 70.0}
    assert ours(report, "gpu_utilization_ratio") == {}


@pytest.mark.parametrize(("told", "shown"), [(-0.25, 0.0), (1.01, 1.0), (42_949_672.95, 1.0), (0.0, 0.0), (1.0, 1.0)])
def test_a_share_of_time_is_never_below_0_or_above_1(told: float, shown: float) -> None:
    gpu = GpuSample(uuid=uuid_of(0), utilization_ratio=told, memory_copy_ratio=told)
    report = NodeReport(view=view_of(), sample=NodeSample(gpus={uuid_of(0): gpu}), nvml_up=True)
    for name in ("gpu_utilization_ratio", "gpu_memory_copy_ratio"):
        assert ours(report, name) == {FIRST: shown}


def test_a_whole_gpu_counts_with_all_its_memory_and_no_sharers() -> None:
    report = NodeReport(
        view=view_of(whole("a", ("team", "train"), 0), allocation("b", SHARED, cores={1: 0b111}, blocks={1: 0b1}))
    )
    assert ours(report, "gpu_core_allocated_ratio") == {FIRST: 1.0, SECOND: 0.03}
    assert ours(report, "gpu_memory_allocated_bytes") == {FIRST: BLOCKS * BLOCK_BYTES, SECOND: BLOCK_BYTES}
    assert ours(report, "gpu_shared_containers") == {FIRST: 0, SECOND: 1}


def test_ids_that_an_app_container_took_over_count_once() -> None:
    prepare = share("a", container="prepare", init=True)
    for held in ([prepare], [prepare, share("b", uid=prepare.uid)]):
        report = NodeReport(view=view_of(*held))
        assert ours(report, "gpu_core_allocated_ratio")[FIRST] == 0.05
        assert ours(report, "gpu_shared_containers")[FIRST] == 1
        assert len(ours(report, "container_core_allocated_ratio")) == len(held)


def test_nvlinks_are_counted_for_each_pair() -> None:
    found = ours(NodeReport(view=view_of(count=3, nvlinks=4)), "nvlink_active_links")
    assert found == {(uuid_of(a), uuid_of(b)): 4.0 for a in range(3) for b in range(3) if a != b}


def test_a_gpu_that_the_driver_lost_keeps_its_allocations() -> None:
    view = view_of(allocation("a", SHARED, cores={1: 0b1}), shown=1)
    report = NodeReport(view=view, sample=sample_of(0), nvml_up=True)
    assert {labels[1] for labels in ours(report, "gpu_info")} == {uuid_of(0), uuid_of(1)}
    assert ours(report, "gpu_memory_total_bytes").keys() == {FIRST}
    assert ours(report, "gpu_core_allocated_ratio")[SECOND] == 0.01
    assert report.unschedulable() == {name_of(1): "missing"}
