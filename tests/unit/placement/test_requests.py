"""What a request of nvidia.com/gpu takes of a GPU and its container may use of it, and what a chain of containers needs."""

from typing import Any

import pytest

from gpumgr.common.units import Amounts
from gpumgr.placement.pods import ContainerSpec
from gpumgr.placement.requests import ReplicaRequest, chain_needs
from tests.unit.ledger.nodes import app, init, sidecar

MEBIBYTES = 4096
BY_HAMI = (("GPU-a", 1024),)


@pytest.mark.parametrize(
    ("request_", "limit", "counted"),
    [
        ({"cores": 100}, (100, 4096), (100, 4096)),
        ({}, (0, 4096), (0, 4096)),
        ({"memory_mebibytes": 3000}, (0, 3000), (0, 3000)),
        ({"memory_percent": 33}, (0, 1351), (0, 1351)),
        ({"memory_percent": 101}, (0, 4096), (0, 4096)),
        ({"memory_mebibytes": 1, "memory_percent": 50, "cores": 1}, (1, 1), (1, 1)),
        ({"cores": 30}, (30, 4096), (30, 4096)),
        ({"memory_mebibytes": 10, "cores": 100}, (100, 4096), (100, 4096)),
        # What HAMi's scheduler counts of a GPU with vcuda pods, at most the percentage of all; an absolute amount is the pod's.
        ({"memory_percent": 50, "memory_on": BY_HAMI}, (0, 1024), (0, 1024)),
        ({"memory_percent": 25, "memory_on": (("GPU-a", 9999),)}, (0, 1024), (0, 1024)),
        ({"memory_mebibytes": 1000, "memory_on": BY_HAMI}, (0, 1000), (0, 1000)),
        ({"memory_percent": 50, "memory_on": (("GPU-b", 1024),)}, (0, 2048), (0, 2048)),
        # With scaling less is counted than may be used.
        ({"memory_mebibytes": 3001, "cores": 50, "memory_scaling": 2.0, "core_scaling": 1.5}, (50, 3001), (34, 1501)),
        ({"memory_percent": 50, "memory_scaling": 2.0}, (0, 4096), (0, 2048)),
        ({"cores": 100, "core_scaling": 1.5, "memory_scaling": 2.0}, (100, 4096), (100, 4096)),
    ],
)
def test_what_a_request_takes_and_may_use(request_: dict[str, Any], limit: tuple[int, int], counted: tuple[int, int]) -> None:
    request = ReplicaRequest(count=1, **request_)
    assert request.limit(MEBIBYTES, "GPU-a") == Amounts(*limit)
    assert request.counted(MEBIBYTES, "GPU-a") == Amounts(*counted)


def test_a_gpu_without_reported_memory_is_granted_whole_or_by_what_is_named() -> None:
    assert ReplicaRequest(count=1).counted(0) == Amounts(100, 0)
    assert ReplicaRequest(count=1, memory_percent=50).counted(0) == Amounts(0, 0)


@pytest.mark.parametrize(
    ("containers", "needs"),
    [
        ((app(30, 4),), (30, 4, 30)),
        ((app(30, 4), app(50, 2)), (30, 4, 30)),
        ((init(30, 4), app(50, 2)), (50, 4, 50)),
        ((init(30, 4), init(40, 1), app(20, 6)), (40, 6, 40)),
        ((init(30, 4), sidecar(10, 1), app(50, 4)), (60, 5, 50)),
        ((init(30, 0), app(0, 2), app(30, 1)), (30, 1, 30)),
        ((init(100, 0), app(100, 4), app(100, 4)), (100, 4, 100)),
        ((), (0, 0, 0)),
    ],
)
def test_what_a_chain_needs(containers: tuple[ContainerSpec, ...], needs: tuple[int, int, int]) -> None:
    found = chain_needs(containers)
    assert (found.cores, found.memory_blocks, found.most_cores) == needs
