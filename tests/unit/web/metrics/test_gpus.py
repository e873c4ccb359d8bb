"""Metrics of GPUs: absent values, holders, health, and impossible samples."""

import pytest
from msgspec.structs import replace

from gpumgr.agent.api import Cordon
from gpumgr.agent.node_report import NodeReport
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.gpu_share import GpuLimits
from gpumgr.ledger.quarantine import Quarantine
from gpumgr.placement.devices import GpuSample, NodeSample

from .pages import metrics_of, ours, text_of
from .pictures import BLOCKS, allocation, name_of, sample_of, uuid_of, view_of, whole

SHARED = ("team", "share")
FIRST, SECOND = (uuid_of(0),), (uuid_of(1),)


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


def test_an_old_sample_is_not_shown_while_the_driver_is_away() -> None:
    assert ours(NodeReport(view=view_of(), sample=sample_of(0), nvml_up=False), "gpu_power_watts") == {}


def test_unknown_gpus_that_can_not_be_described_are_counted() -> None:
    unknown = view_of(count=3, broken=[1], known=[0, 2])
    assert ours(NodeReport(view=unknown, nvml_up=True), "gpus_not_readable") == {(): 1}
    assert ours(NodeReport(view=view_of(count=3, broken=[1], named=True), nvml_up=True), "gpus_not_readable") == {(): 0}
    assert ours(NodeReport(view=unknown), "gpus_not_readable") == {}


def test_a_whole_gpu_counts_with_all_its_memory_and_no_sharers() -> None:
    report = NodeReport(
        view=view_of(whole("a", ("team", "train"), 0), allocation("b", SHARED, cores={1: 0b111}, blocks={1: 0b1}))
    )
    assert ours(report, "gpu_core_allocated_ratio") == {FIRST: 1.0, SECOND: 0.03}
    assert ours(report, "gpu_memory_allocated_bytes") == {FIRST: BLOCKS * BLOCK_BYTES, SECOND: BLOCK_BYTES}
    assert ours(report, "gpu_shared_containers") == {FIRST: 0, SECOND: 1}


def test_ids_that_an_app_container_took_over_count_once() -> None:
    prepare = allocation("a", SHARED, container="prepare", init=True, cores={0: 0b11}, blocks={0: 0b1})
    main = replace(allocation("b", SHARED, cores={0: 0b11}, blocks={0: 0b1}), uid=prepare.uid)
    alone, both = NodeReport(view=view_of(prepare)), NodeReport(view=view_of(prepare, main))
    for report in (alone, both):
        assert ours(report, "gpu_core_allocated_ratio")[FIRST] == 0.02
        assert ours(report, "gpu_shared_containers")[FIRST] == 1
    assert len(ours(both, "container_core_allocated_ratio")) == 2


def test_nvlinks_are_counted_for_each_pair() -> None:
    found = ours(NodeReport(view=view_of(count=3, nvlinks=4)), "nvlink_active_links")
    assert found == {(uuid_of(a), uuid_of(b)): 4.0 for a in range(3) for b in range(3) if a != b}


def test_a_gpu_that_the_driver_lost_keeps_its_allocations() -> None:
    view = view_of(allocation("a", SHARED, cores={1: 0b1}), shown=1)
    report = NodeReport(view=view, sample=sample_of(0), nvml_up=True)
    assert {labels[1] for labels in ours(report, "gpu_info")} == {uuid_of(0), uuid_of(1)}
    assert ours(report, "gpu_memory_total_bytes").keys() == {FIRST}
    assert ours(report, "gpu_healthy") == {FIRST: 1.0, SECOND: 0.0}
    assert ours(report, "gpu_core_allocated_ratio")[SECOND] == 0.01
    assert report.unschedulable() == {name_of(1): "missing"}


@pytest.mark.parametrize(
    ("report", "word"),
    [
        pytest.param(NodeReport(view=view_of(failed={uuid_of(0): "XID 79"}), reasons={uuid_of(0): "xid"}), "xid", id="told"),
        pytest.param(NodeReport(view=view_of(failed={uuid_of(0): "XID 79"})), "other", id="not told"),
        pytest.param(
            NodeReport(view=view_of(cordoned={uuid_of(0): "MIG is on"}), reasons={uuid_of(0): "mig"}), "mig", id="closed"
        ),
        pytest.param(
            NodeReport(view=view_of(quarantine=Quarantine(held={name_of(0): frozenset({(7, 1)})}))), "quarantine", id="quarantine"
        ),
    ],
)
def test_the_reason_is_one_of_a_few_codes(report: NodeReport, word: str) -> None:
    assert ours(report, "gpu_healthy")[FIRST] == 0
    assert ours(report, "gpu_unhealthy_reason") == {(uuid_of(0), word): 1.0}


def test_reasons_of_a_healthy_gpu_are_absent() -> None:
    report = NodeReport(view=view_of(), reasons={uuid_of(0): "xid"})
    assert ours(report, "gpu_healthy")[FIRST] == 1
    assert ours(report, "gpu_unhealthy_reason") == {}


def test_a_cordon_shows() -> None:
    report = NodeReport(view=view_of(), cordons={uuid_of(1): Cordon(reason="its fan rattles", draining=True)})
    assert ours(report, "gpu_cordoned") == {FIRST: 0.0, SECOND: 1.0}


def test_the_strength_of_each_gpus_limits_is_exported() -> None:
    limits = {
        uuid_of(0): GpuLimits(memory="hard", memory_by="nvml-memory", cores="soft", cores_by="limiter"),
        uuid_of(1): GpuLimits(),
    }
    found = ours(NodeReport(view=view_of(), gpu_limits=limits), "gpu_enforcement_info")
    # In the order of the labels' names: cores, cores_by, gpu, memory, memory_by.
    assert found == {("soft", "limiter", uuid_of(0), "hard", "nvml-memory"): 1.0, ("none", "", uuid_of(1), "none", ""): 1.0}
