"""Sums over a node's GPUs, and what a pod needs of them."""

import pytest

from gpumgr.cluster.core.node import GpuState, NodeState, summarize
from gpumgr.common.units import Amounts
from gpumgr.placement.requests import ContainerKind
from tests.cluster_states import request

MEMORY = 1000


@pytest.mark.parametrize(
    ("containers", "wanted"),
    [
        ([("app", 50, 4)], Amounts(50, 1024)),
        ([("app", 50, 4), ("app", 200, 0)], Amounts(250, 1024)),
        ([("init", 300, 0), ("app", 50, 4)], Amounts(300, 1024)),
        ([("init", 20, 9), ("app", 50, 4)], Amounts(50, 2304)),
        ([("sidecar", 10, 1), ("init", 80, 2), ("app", 50, 4)], Amounts(90, 1280)),
        ([("init", 80, 2), ("sidecar", 10, 1), ("app", 50, 4)], Amounts(80, 1280)),
    ],
)
def test_what_kube_scheduler_subtracts_for_a_pod(containers: list[tuple[ContainerKind, int, int]], wanted: Amounts) -> None:
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
