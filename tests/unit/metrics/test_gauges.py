"""What a picture says in the exposition: exact text, absent facts, holders, and names that keep Prometheus' rules."""

from collections.abc import Mapping
from textwrap import dedent

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gpumgr.agent.picture import Picture
from gpumgr.allocator.quarantine import Quarantine
from gpumgr.metrics.gauges import picture_families
from gpumgr.topology.devices import GpuSample, NodeSample
from gpumgr.units import BLOCK_BYTES

from .pictures import BLOCKS, allocation, name_of, sample_of, uuid_of, view_of, whole

SHARED = ("team", "share")


class _Of(Collector):
    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    def collect(self) -> list[Metric]:
        return list(picture_families(self._picture, node="node-1"))


def text_of(picture: Picture) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Of(picture))
    return generate_latest(registry).decode()


def values(picture: Picture, name: str) -> Mapping[frozenset[tuple[str, str]], float]:
    """Series of one family by their labels; a series that stands twice fails."""
    found: dict[frozenset[tuple[str, str]], float] = {}
    for family in text_string_to_metric_families(text_of(picture)):
        for sample in family.samples:
            if sample.name == f"gpumgr_{name}":
                key = frozenset(sample.labels.items())
                assert key not in found
                found[key] = sample.value
    return found


def by_gpu(picture: Picture, name: str) -> Mapping[str, float]:
    return {dict(labels)["gpu"]: value for labels, value in values(picture, name).items()}


def containers(picture: Picture, name: str) -> Mapping[tuple[str, ...], float]:
    order = ("namespace", "pod", "container", "gpu")
    return {tuple(dict(labels)[key] for key in order): value for labels, value in values(picture, name).items()}


def test_the_text_of_a_small_node() -> None:
    share = allocation("a", SHARED, cores={0: 0b11111}, blocks={0: 0b11})
    picture = Picture(view=view_of(share, count=1), sample=sample_of(0), nvml_up=True)
    gpu = uuid_of(0)
    facts = f'driver="550.54.15",gpu="{gpu}",index="0",minor="0",model="NVIDIA A10"'
    expected = f"""\
        # HELP gpumgr_gpu_info What the GPU is; always 1.
        # TYPE gpumgr_gpu_info gauge
        gpumgr_gpu_info{{{facts},node="node-1",numa="0",pci_bus_id="0000:00:00.0"}} 1.0
        # HELP gpumgr_gpu_memory_total_bytes Memory of the GPU.
        # TYPE gpumgr_gpu_memory_total_bytes gauge
        gpumgr_gpu_memory_total_bytes{{gpu="{gpu}"}} 2.147483649e+09
        # HELP gpumgr_gpu_memory_used_bytes Memory in use on the GPU (with an old driver, what it reserves for itself included).
        # TYPE gpumgr_gpu_memory_used_bytes gauge
        gpumgr_gpu_memory_used_bytes{{gpu="{gpu}"}} 1000.0
        # HELP gpumgr_gpu_memory_reserved_bytes Memory that the driver reserves for itself.
        # TYPE gpumgr_gpu_memory_reserved_bytes gauge
        gpumgr_gpu_memory_reserved_bytes{{gpu="{gpu}"}} 10.0
        # HELP gpumgr_gpu_utilization_ratio Share of the driver's sample period in which a kernel ran on the GPU.
        # TYPE gpumgr_gpu_utilization_ratio gauge
        gpumgr_gpu_utilization_ratio{{gpu="{gpu}"}} 0.25
        # HELP gpumgr_gpu_memory_copy_ratio Share of the driver's sample period in which memory was read or written.
        # TYPE gpumgr_gpu_memory_copy_ratio gauge
        gpumgr_gpu_memory_copy_ratio{{gpu="{gpu}"}} 0.5
        # HELP gpumgr_gpu_temperature_celsius Temperature of the GPU's die.
        # TYPE gpumgr_gpu_temperature_celsius gauge
        gpumgr_gpu_temperature_celsius{{gpu="{gpu}"}} 40.0
        # HELP gpumgr_gpu_power_watts Power that the board draws.
        # TYPE gpumgr_gpu_power_watts gauge
        gpumgr_gpu_power_watts{{gpu="{gpu}"}} 71.5
        # HELP gpumgr_gpu_healthy 1 if new containers may be placed on the GPU.
        # TYPE gpumgr_gpu_healthy gauge
        gpumgr_gpu_healthy{{gpu="{gpu}"}} 1.0
        # HELP gpumgr_gpu_unhealthy_reason 1 for the reason why the GPU takes nothing new; no series otherwise.
        # TYPE gpumgr_gpu_unhealthy_reason gauge
        # HELP gpumgr_nvlink_active_links NVLinks between two GPUs (through NVSwitch: that both have into the fabric).
        # TYPE gpumgr_nvlink_active_links gauge
        # HELP gpumgr_gpu_core_allocated_ratio Share of the GPU's cores that containers hold.
        # TYPE gpumgr_gpu_core_allocated_ratio gauge
        gpumgr_gpu_core_allocated_ratio{{gpu="{gpu}"}} 0.05
        # HELP gpumgr_gpu_memory_allocated_bytes Memory that containers hold; all of it on a GPU that one container has whole.
        # TYPE gpumgr_gpu_memory_allocated_bytes gauge
        gpumgr_gpu_memory_allocated_bytes{{gpu="{gpu}"}} 5.36870912e+08
        # HELP gpumgr_gpu_shared_containers Containers that share the GPU (0: nobody, or one container has it whole).
        # TYPE gpumgr_gpu_shared_containers gauge
        gpumgr_gpu_shared_containers{{gpu="{gpu}"}} 1.0
        # HELP gpumgr_container_core_allocated_ratio Share of the GPU's cores that the container holds.
        # TYPE gpumgr_container_core_allocated_ratio gauge
        gpumgr_container_core_allocated_ratio{{container="main",gpu="{gpu}",namespace="team",pod="share"}} 0.05
        # HELP gpumgr_container_memory_allocated_bytes Memory that the container holds; all of the GPU's if it has the GPU whole.
        # TYPE gpumgr_container_memory_allocated_bytes gauge
        gpumgr_container_memory_allocated_bytes{{container="main",gpu="{gpu}",namespace="team",pod="share"}} 5.36870912e+08
        """
    assert text_of(picture) == dedent(expected)


def test_a_pod_that_ended_has_no_series_any_more() -> None:
    staying = allocation("a", SHARED, cores={0: 0b1}, blocks={0: 0b1})
    leaving = allocation("b", ("team", "leaving"), cores={0: 0b10}, blocks={0: 0b10})
    view = view_of(staying, leaving)
    before = text_of(Picture(view=view, nvml_up=True))
    after = text_of(Picture(view=view_of(staying), nvml_up=True))
    assert 'pod="leaving"' in before
    assert "leaving" not in after
    assert 'pod="share"' in after


def test_what_the_driver_does_not_tell_has_no_series() -> None:
    sample = NodeSample(gpus={uuid_of(0): GpuSample(uuid=uuid_of(0), power_watts=70.0)}, failures={uuid_of(1): "no answer"})
    picture = Picture(view=view_of(), sample=sample, nvml_up=True)
    assert by_gpu(picture, "gpu_power_watts") == {uuid_of(0): 70.0}
    assert by_gpu(picture, "gpu_utilization_ratio") == {}


def test_an_old_sample_is_not_shown_while_the_driver_is_away() -> None:
    assert by_gpu(Picture(view=view_of(), sample=sample_of(0), nvml_up=False), "gpu_power_watts") == {}


def test_a_whole_gpu_counts_with_all_its_memory_and_no_sharers() -> None:
    picture = Picture(view=view_of(whole("a", ("team", "train"), 0), allocation("b", SHARED, cores={1: 0b111}, blocks={1: 0b1})))
    assert by_gpu(picture, "gpu_core_allocated_ratio") == {uuid_of(0): 1.0, uuid_of(1): 0.03}
    assert by_gpu(picture, "gpu_memory_allocated_bytes") == {uuid_of(0): BLOCKS * BLOCK_BYTES, uuid_of(1): BLOCK_BYTES}
    assert by_gpu(picture, "gpu_shared_containers") == {uuid_of(0): 0, uuid_of(1): 1}
    assert containers(picture, "container_memory_allocated_bytes") == {
        ("team", "train", "main", uuid_of(0)): BLOCKS * BLOCK_BYTES,
        ("team", "share", "main", uuid_of(1)): BLOCK_BYTES,
    }


def test_ids_that_an_app_container_took_over_count_once() -> None:
    prepare = allocation("a", SHARED, container="prepare", init=True, cores={0: 0b11}, blocks={0: 0b1})
    main = allocation("b", SHARED, cores={0: 0b11}, blocks={0: 0b1})
    alone, both = Picture(view=view_of(prepare)), Picture(view=view_of(prepare, main))
    for picture in (alone, both):
        assert by_gpu(picture, "gpu_core_allocated_ratio")[uuid_of(0)] == 0.02
        assert by_gpu(picture, "gpu_shared_containers")[uuid_of(0)] == 1
    assert len(containers(both, "container_core_allocated_ratio")) == 2


def test_holders_under_one_name_make_one_series() -> None:
    picture = Picture(
        view=view_of(
            allocation("a", SHARED, cores={0: 0b1}),
            allocation("b", SHARED, cores={0: 0b10}),
            allocation("c", None, container=None, cores={0: 0b100}),
            allocation("d", None, container=None, cores={0: 0b1000}),
        )
    )
    assert containers(picture, "container_core_allocated_ratio") == {
        ("team", "share", "main", uuid_of(0)): 0.02,
        ("", "", "", uuid_of(0)): 0.02,
    }


def test_nvlinks_are_counted_for_each_pair() -> None:
    found = values(Picture(view=view_of(count=3, nvlinks=4)), "nvlink_active_links")
    assert set(found.values()) == {4.0}
    assert len(found) == 6


def test_a_gpu_that_the_driver_lost_keeps_its_books() -> None:
    view = view_of(allocation("a", SHARED, cores={1: 0b1}), shown=1)
    picture = Picture(view=view, sample=sample_of(0), nvml_up=True)
    assert by_gpu(picture, "gpu_info") == {uuid_of(0): 1.0, uuid_of(1): 1.0}
    assert by_gpu(picture, "gpu_memory_total_bytes").keys() == {uuid_of(0)}
    assert by_gpu(picture, "gpu_healthy") == {uuid_of(0): 1.0, uuid_of(1): 0.0}
    assert by_gpu(picture, "gpu_core_allocated_ratio")[uuid_of(1)] == 0.01
    assert picture.unfit() == {name_of(1): "missing"}


@pytest.mark.parametrize(
    ("picture", "word"),
    [
        pytest.param(Picture(view=view_of(failed={uuid_of(0): "XID 79"}), reasons={uuid_of(0): "xid"}), "xid", id="told"),
        pytest.param(Picture(view=view_of(failed={uuid_of(0): "XID 79"})), "other", id="not told"),
        pytest.param(
            Picture(view=view_of(failed={uuid_of(0): "?"}), reasons={uuid_of(0): "driver 0x7f3a"}), "other", id="no label"
        ),
        pytest.param(Picture(view=view_of(closed={uuid_of(0): "MIG is on"}), reasons={uuid_of(0): "mig"}), "mig", id="closed"),
        pytest.param(
            Picture(view=view_of(quarantine=Quarantine(held={name_of(0): frozenset({(7, 1)})}))), "quarantine", id="quarantine"
        ),
    ],
)
def test_the_reason_is_one_of_a_few_words(picture: Picture, word: str) -> None:
    assert by_gpu(picture, "gpu_healthy")[uuid_of(0)] == 0
    assert values(picture, "gpu_unhealthy_reason") == {frozenset({("gpu", uuid_of(0)), ("reason", word)}): 1.0}


def test_reasons_of_a_gpu_that_is_well_are_left_alone() -> None:
    picture = Picture(view=view_of(), reasons={uuid_of(0): "xid"})
    assert by_gpu(picture, "gpu_healthy")[uuid_of(0)] == 1
    assert values(picture, "gpu_unhealthy_reason") == {}
