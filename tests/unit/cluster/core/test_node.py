"""Sums over a node's GPUs, and what a pod needs of them."""

import pytest

from gpumgr.cluster.core.node import GpuState, NodeState, summarize
from gpumgr.cluster.core.request import ContainerRequest, PodRequest
from gpumgr.common.units import Amounts
from gpumgr.placement.evaluators.capacity import ContainerKind

MEMORY = 1000


def request(*containers: tuple[ContainerKind, int, int, int]) -> PodRequest:
    """(kind, GPUs, cores of each, MiB)."""
    made = [
        ContainerRequest(kind=kind, gpus=gpus, cores_per_gpu=cores, memory_mebibytes=memory)
        for kind, gpus, cores, memory in containers
    ]
    return PodRequest(tuple(made))


@pytest.mark.parametrize(
    ("containers", "wanted"),
    [
        ([("app", 1, 50, 100)], Amounts(50, 100)),
        ([("app", 1, 50, 100), ("app", 2, 100, 0)], Amounts(250, 100)),
        ([("init", 3, 100, 0), ("app", 1, 50, 100)], Amounts(300, 100)),
        ([("init", 1, 20, 900), ("app", 1, 50, 100)], Amounts(50, 900)),
        ([("sidecar", 1, 10, 10), ("init", 1, 80, 20), ("app", 1, 50, 100)], Amounts(90, 110)),
        ([("init", 1, 80, 20), ("sidecar", 1, 10, 10), ("app", 1, 50, 100)], Amounts(80, 110)),
    ],
)
def test_what_kube_scheduler_subtracts_for_a_pod(containers: list[tuple[ContainerKind, int, int, int]], wanted: Amounts) -> None:
    """Source: Kubernetes' PodRequests, with init containers that restart."""
    assert request(*containers).in_total == wanted


def test_each_amount_is_in_one_part() -> None:
    gpus = [GpuState(model="A", memory_mebibytes=MEMORY)] * 4
    gpus += [GpuState(model="B", memory_mebibytes=MEMORY, cordoned=True), GpuState(model="B", memory_mebibytes=MEMORY)]
    used = (Amounts(), Amounts(60, 300), Amounts(100, 400), Amounts(30, MEMORY), Amounts(10, 100), Amounts(160, 2 * MEMORY))
    totals, sums = summarize(NodeState(name="n", gpus=tuple(gpus)), used)
    assert {key: amount for key, amount in totals.items() if amount} == {
        ("gpus", "A", "free"): 1,
        ("gpus", "A", "partial"): 1,
        ("gpus", "A", "full"): 2,
        ("gpus", "B", "closed"): 1,
        ("gpus", "B", "full"): 1,
        ("cores", "A", "free"): 100,
        ("cores", "A", "partial"): 40,
        ("cores", "A", "stranded"): 70,
        ("cores", "A", "used"): 190,
        ("cores", "B", "closed"): 90,
        ("cores", "B", "used"): 170,
        ("memory", "A", "free"): MEMORY,
        ("memory", "A", "partial"): 700,
        ("memory", "A", "stranded"): 600,
        ("memory", "A", "used"): 1700,
        ("memory", "B", "closed"): 900,
        ("memory", "B", "used"): 2100,
    }
    assert sums == Amounts(210, 2300), "of the GPUs that are offered; more than all is not less than nothing"
