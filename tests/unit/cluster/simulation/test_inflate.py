"""The method inflate: which pods arrive, and what is measured when."""

import random

import pytest

from gpumgr.cluster.simulation import methods
from gpumgr.cluster.simulation.methods import Task, inflate, inflated
from gpumgr.cluster.simulation.model import NodeSpec, Pod, Shape
from gpumgr.cluster.simulation.policies import POLICIES
from gpumgr.common.errors import InputError

WHOLE = Pod(name="w", shape=Shape(gpus=1, gpu_milli=1000, cpu_milli=1))
NONE = Pod(name="n", shape=Shape(cpu_milli=1))


@pytest.mark.parametrize("count", [1, 12, 40])
def test_pods_are_added_or_left_out_until_the_demand_is_reached(count: int) -> None:
    made = inflated([WHOLE] * count + [NONE] * 3, 10_000, random.Random(1))
    assert made.count(WHOLE) == 13
    assert made == inflated([WHOLE] * count + [NONE] * 3, 10_000, random.Random(1))


def test_a_demand_that_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="requests a GPU"):
        inflated([NONE], 10_000, random.Random(1))
    monkeypatch.setattr(methods, "MAX_PODS", 5)
    with pytest.raises(InputError, match="more than 5 pods are needed"):
        inflated([WHOLE], 10_000, random.Random(1))


def test_measures_by_hand() -> None:
    """Ten GPUs, and CPU for eight. Each pod takes one; the pods from the ninth to the thirteenth fail."""
    nodes = [NodeSpec(name="a", gpus=8, cpu_milli=8, ram_mebibytes=0), NodeSpec(name="b", gpus=2, cpu_milli=0, ram_mebibytes=0)]
    for policy in POLICIES:
        found = inflate(nodes, [WHOLE], Task(policy, 7, random.Random))
        assert found.allocated_percent == {100: 80, 130: 80}
        # Free are 5 of 10 with 2 on b, then 2 with 2 on b.
        assert found.fragmentation_percent == {50: 40, 80: 100, 90: 100}
        assert found.failed_pods == {"none": 0, "share": 0, "1": 5, "2": 0, "4": 0, "8": 0}
        assert found.idle_gpus == 2
