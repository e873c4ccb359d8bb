"""gpu-manager's four gauges: names, helps, labels and units, and which containers have which series."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from gpumgr.agent.node_report import NodeReport
from gpumgr.ledger.ids import ALL_CORES
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.node_use import Container
from gpumgr.placement.pods import ContainerSpec, PodView
from tests.unit.ledger.samples import MIB, NO_OWNERS, container, report_of, sample
from tests.unit.web.metrics.pages import families, metrics_of, series, text_of
from tests.unit.web.metrics.pictures import BLOCKS, allocation, uuid_of, view_of, whole

WEB, TRAIN = ("team", "web"), ("team", "train")
UTILIZATION, MEMORY = "container_gpu_utilization", "container_gpu_memory_total"
CARDS_ASKED, MEMORY_ASKED = "container_request_gpu_utilization", "container_request_gpu_memory"
SHARE = allocation("a", WEB, cores={0: (1 << 50) - 1}, blocks={0: 0b11})
CARD_MIB = BLOCKS * 256


def pod(*containers: ContainerSpec, name: str = "web", phase: str = "Running") -> PodView:
    return PodView(namespace="team", name=name, uid=f"uid-{name}", phase=phase, containers=containers)


def picture_of(
    *allocations: Allocation,
    processes: tuple[dict[int, int | None] | None, ...] = ({}, {}),
    owners: Mapping[int, Container | None] = NO_OWNERS,
    ratios: dict[int, float] | None = None,
) -> NodeReport:
    return report_of(view_of(*allocations), sample(*processes, ratios=ratios), owners)


def test_the_text_is_gpu_managers() -> None:
    report = picture_of(SHARE, processes=({11: 700 * MIB + 5}, {}), owners={11: container("a", WEB)}, ratios={11: 0.25})
    text = text_of(metrics_of(report))
    labels = 'pod_name="web",namespace="team",node="node-1",container_name="main"'
    assert (
        "# HELP container_gpu_utilization gpu utilization\n"
        "# TYPE container_gpu_utilization gauge\n"
        f'container_gpu_utilization{{{labels},gpu="gpu0"}} 25.0\n'
        f'container_gpu_utilization{{{labels},gpu="total"}} 25.0\n'
        "# HELP container_gpu_memory_total gpu memory usage in MiB\n"
        "# TYPE container_gpu_memory_total gauge\n"
        f'container_gpu_memory_total{{{labels},gpu_memory="gpu0"}} 700\n'
        f'container_gpu_memory_total{{{labels},gpu_memory="total"}} 700\n'
        "# HELP container_request_gpu_utilization request of gpu utilization\n"
        "# TYPE container_request_gpu_utilization gauge\n"
        f'container_request_gpu_utilization{{{labels},req_of_gpu="total"}} 0.5\n'
        "# HELP container_request_gpu_memory request of gpu memory in MiB\n"
        "# TYPE container_request_gpu_memory gauge\n"
        f'container_request_gpu_memory{{{labels},req_of_gpu_memory="total"}} 512\n'
    ) in text


def test_they_can_be_turned_off() -> None:
    told = families(metrics_of(picture_of(SHARE), gpu_manager_names=False))
    assert not [name for name in told if not name.startswith("gpumgr_")]


def test_totals_are_sums_over_the_gpus() -> None:
    both = allocation("t", TRAIN, cores={0: ALL_CORES, 1: ALL_CORES})
    owners: dict[int, Container | None] = {11: container("t", TRAIN), 12: container("t", TRAIN)}
    report = picture_of(both, processes=({11: 3 * MIB}, {12: 4 * MIB}), owners=owners, ratios={11: 0.5, 12: 0.57})
    holder, node = ("main",), ("team", "node-1", "train")
    assert series(metrics_of(report), UTILIZATION) == {
        (*holder, "gpu0", *node): 50.0,
        (*holder, "gpu1", *node): 57.0,
        (*holder, "total", *node): 107.0,
    }
    assert series(metrics_of(report), MEMORY) == {
        (*holder, "gpu0", *node): 3.0,
        (*holder, "gpu1", *node): 4.0,
        (*holder, "total", *node): 7.0,
    }
    assert list(series(metrics_of(report), CARDS_ASKED).values()) == [2.0]
    assert list(series(metrics_of(report), MEMORY_ASKED).values()) == [2.0 * CARD_MIB]


def test_a_total_with_an_unknown_part_is_unknown() -> None:
    both = allocation("t", TRAIN, cores={0: ALL_CORES, 1: ALL_CORES})
    report = picture_of(both, processes=({11: 3 * MIB}, None), owners={11: container("t", TRAIN)}, ratios={11: 0.5})
    assert series(metrics_of(report), UTILIZATION) == {("main", "gpu0", "team", "node-1", "train"): 50.0}
    assert series(metrics_of(report), MEMORY) == {("main", "gpu0", "team", "node-1", "train"): 3.0}


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param((), id="no API server"),
        pytest.param((pod(ContainerSpec(name="main", cores=100), name="train"),), id="the pod is known"),
    ],
)
def test_a_whole_gpu_requests_the_memory_of_the_gpu(pods: tuple[PodView, ...]) -> None:
    metrics = metrics_of(picture_of(whole("t", TRAIN, 0)), pods)
    assert series(metrics, CARDS_ASKED) == {("main", "team", "node-1", "train", "total"): 1.0}
    assert series(metrics, MEMORY_ASKED) == {("main", "team", "node-1", "train", "total"): float(CARD_MIB)}


def test_every_container_of_a_pod_with_gpus_has_a_request() -> None:
    view = pod(
        ContainerSpec(name="prepare", kind="init", cores=50, memory_blocks=2),
        ContainerSpec(name="proxy", kind="sidecar"),
        ContainerSpec(name="main", cores=50, memory_blocks=2),
        ContainerSpec(name="log"),
    )
    metrics = metrics_of(picture_of(SHARE), [view, pod(ContainerSpec(name="main"), name="plain")])
    asked = {labels[0]: value for labels, value in series(metrics, CARDS_ASKED).items()}
    assert asked == {"proxy": 0.0, "main": 0.5, "log": 0.0}
    assert {labels[0]: value for labels, value in series(metrics, MEMORY_ASKED).items()} == {"proxy": 0, "main": 512, "log": 0}


def test_the_request_of_a_waiting_pod_is_exported() -> None:
    waiting = pod(ContainerSpec(name="main", cores=100), name="train", phase="Pending")
    metrics = metrics_of(picture_of(), [waiting])
    assert list(series(metrics, CARDS_ASKED).values()) == [1.0]
    assert list(series(metrics, MEMORY_ASKED).values()) == [0.0]


def test_an_ended_pod_is_not_exported() -> None:
    ended = pod(ContainerSpec(name="main", cores=50, memory_blocks=2), phase="Succeeded")
    report = picture_of(SHARE, processes=({11: 5}, {}), owners={11: container("a", WEB)})
    for name in (UTILIZATION, MEMORY, CARDS_ASKED, MEMORY_ASKED):
        assert series(metrics_of(report, [ended]), name) == {}


def test_unnamed_containers_and_init_containers_are_not_exported() -> None:
    report = picture_of(
        allocation("c", None, container=None, cores={0: 1}),
        allocation("p", WEB, container="prepare", init=True, cores={1: 1}),
    )
    for name in (UTILIZATION, MEMORY, CARDS_ASKED, MEMORY_ASKED):
        assert series(metrics_of(report), name) == {}


def test_a_gpu_that_can_not_be_read_has_no_usage() -> None:
    report = picture_of(SHARE, processes=(None, {}))
    assert series(metrics_of(report), UTILIZATION) == series(metrics_of(report), MEMORY) == {}
    away = replace(picture_of(SHARE), nvml_up=False)
    assert series(metrics_of(away), MEMORY) == {}
    assert list(series(metrics_of(away), CARDS_ASKED).values()) == [0.5]


def test_gpus_are_named_by_their_index_in_nvml() -> None:
    share = allocation("a", WEB, cores={1: 1}, blocks={1: 1})
    metrics = metrics_of(picture_of(share))
    assert {labels[1] for labels in series(metrics, MEMORY)} == {"gpu1", "total"}
    hidden = view_of(share, shown=1)
    lost = report_of(hidden, sample({}, {}))
    assert uuid_of(1) not in {gpu.uuid for gpu in hidden.inventory.snapshot.gpus}
    assert series(metrics_of(lost), MEMORY) == {}
