"""What a request of nvidia.com/gpu takes of a GPU, and what its container may use of it."""

from typing import Any

import pytest

from gpumgr.common.units import Amounts
from gpumgr.placement.requests import ReplicaRequest

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
