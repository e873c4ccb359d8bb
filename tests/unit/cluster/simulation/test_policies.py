"""Policies on clusters that are checked by hand, and what holds for each of them on any cluster."""

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from gpumgr.cluster.simulation.fragmentation import Fragmentation, typical_shapes
from gpumgr.cluster.simulation.model import Change, Cluster, NodeSpec, Placement, Shape
from gpumgr.cluster.simulation.policies import POLICIES, make_policy, sample_size
from gpumgr.placement.requests import Constraints


def spec(name: str, gpus: int, cpus: int = 64, blocks: int = 0, model: str = "A100") -> NodeSpec:
    return NodeSpec(name=name, gpus=gpus, model=model, memory_blocks=blocks, cpu_milli=cpus * 1000, ram_mebibytes=1 << 20)


def share(milli: int, cpus: int = 1, blocks: int = 0) -> Shape:
    return Shape(gpus=1, gpu_milli=milli, cpu_milli=cpus * 1000, memory_blocks=blocks)


def whole(gpus: int, cpus: int = 1, blocks: int = 0) -> Shape:
    return Shape(gpus=gpus, gpu_milli=1000, cpu_milli=cpus * 1000, memory_blocks=blocks)


class Run:
    """A cluster under a policy."""

    def __init__(self, policy: str, specs: list[NodeSpec], trace: list[Shape], seed: int = 1) -> None:
        self.cluster = Cluster(specs)
        fragmentation = Fragmentation(typical_shapes(trace))
        self.find = make_policy(policy, self.cluster, 8000, fragmentation, random.Random(seed))

    def add(self, shape: Shape) -> Placement | None:
        where = self.find(shape)
        if where is not None:
            self.put(shape, where)
        return where

    def put(self, shape: Shape, where: Placement) -> None:
        self.cluster.change(Change(len(self.cluster.changes), shape, where, -1))


#: Two GPUs, the second with 300 free; four idle GPUs; one idle GPU with few CPUs.
NODES = [spec("a", 2), spec("b", 4), spec("c", 1, cpus=4)]
TRACE = [share(300, 10), whole(1, 10), whole(1, 10), whole(4, 40)]


@pytest.mark.parametrize(
    ("policy", "shape", "expected"),
    [
        ("binpack", share(300), Placement(0, (1,))),
        ("binpack", share(400), Placement(0, (0,))),  # no idle GPU is left there, and none on c, which comes later
        ("binpack", whole(2), Placement(1, (0, 1))),
        ("spread", share(300), Placement(1, (0,))),
        ("best-fit", share(300, 4), Placement(2, (0,))),
        ("best-fit", whole(1, 8), Placement(0, (0,))),
        ("packing", share(300), Placement(0, (1,))),
        ("packing", whole(1, 8), Placement(0, (0,))),
        ("clustering", share(300), Placement(0, (1,))),
        ("dot-product", whole(1, 8), Placement(0, (0,))),
        ("fgd", share(300), Placement(2, (0,))),  # no pod of the trace fits there, for lack of CPU: 300 less; 225 less on a
        ("least-fragmentation", share(300), Placement(0, (1,))),
        ("least-fragmentation", share(300, 4), Placement(0, (1,))),
        ("least-fragmentation", whole(4, 50), Placement(1, (0, 1, 2, 3))),
        ("dra", share(300, 2), Placement(1, (0,))),  # the least allocated node has most CPUs free
        ("dra-most-allocated", share(300, 2), Placement(2, (0,))),
    ],
)
def test_choices(policy: str, shape: Shape, expected: Placement) -> None:
    run = Run(policy, NODES, TRACE)
    run.put(share(700, 2), Placement(0, (1,)))
    found = run.add(shape)
    assert found is not None
    assert found.node == expected.node
    if policy != "dra-most-allocated":
        assert found == expected


def test_least_fragmentation_keeps_cpu_beside_gpus_and_gpus_beside_memory() -> None:
    few_cpus = [spec("a", 1, cpus=20), spec("b", 4, cpus=40)]
    run = Run("least-fragmentation", few_cpus, [whole(1, 10)])
    assert run.add(Shape(cpu_milli=10_000)) == Placement(0, ())  # on b it would strand a GPU
    same = [spec("a", 2, blocks=100), spec("b", 2, blocks=100)]
    run = Run("least-fragmentation", same, [share(500, 1, 50)])
    run.put(share(500, 1, 10), Placement(0, (0,)))
    run.put(share(500, 1, 50), Placement(1, (0,)))
    assert run.add(share(500, 1, 90)) == Placement(0, (0,))  # 500 milli that are free there are used with the memory beside them


@pytest.mark.parametrize("policy", ["best-fit", "binpack"])
def test_models_and_memory(policy: str) -> None:
    """A model is compared as HAMi registers it, with NVIDIA- before it."""
    run = Run(policy, [spec("a", 1, blocks=10), spec("b", 1, blocks=20, model="T4")], TRACE)
    assert run.add(share(100, 1, 11)) == Placement(1, (0,))
    assert run.add(replace(share(100, 1, 1), constraints=Constraints(use_models=("nvidia-t4",)))) == Placement(1, (0,))
    assert run.add(replace(share(100, 1, 1), constraints=Constraints(avoid_models=("T4",)))) == Placement(0, (0,))
    assert run.add(whole(1)) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_kept_of_a_request_is_computed_again(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for bound in (512, 2):
        monkeypatch.setattr("gpumgr.cluster.simulation.policies.MAX_SHAPES", bound)
        run = Run(policy, [spec("a", 4), spec("b", 4, cpus=8)], TRACE)
        found.append([where and len(where.gpus) for where in map(run.add, [share(300, cpus) for cpus in (1, 2, 3, 4)] * 7)])
    assert found[0].count(None) == found[1].count(None) > 0
    if policy != "random":
        assert found[0] == found[1]


def test_random_takes_each_node_equally_often() -> None:
    counts: Counter[int] = Counter()
    run = Run("random", [spec(name, 64) for name in "abcd"], TRACE)
    for _ in range(400):
        found = run.add(share(10, 0))
        assert found is not None
        counts[found.node] += 1
    assert all(70 <= counts[node] <= 130 for node in range(4)), counts


@pytest.mark.parametrize(("nodes", "size"), [(3, 100), (1000, 420), (1213, 497), (5000, 500), (10_000, 500)])
def test_sample_of_kube_scheduler(nodes: int, size: int) -> None:
    assert sample_size(nodes) == size


def test_fragmentation_by_hand() -> None:
    fragmentation = Fragmentation([(share(600, 4), 0.5), (whole(1, 8), 0.25), (Shape(cpu_milli=1), 0.25)])
    # With 1,400 free: the share can't use 400; the whole GPU can't use 400; the pod without GPUs can't use any.
    assert fragmentation.amount("A100", 8000, [400, 1000]) == pytest.approx(0.5 * 400 + 0.25 * 400 + 0.25 * 1400)
    assert fragmentation.amount("A100", 4000, [400, 1000]) == pytest.approx(0.5 * 400 + 0.25 * 1400 + 0.25 * 1400)
    assert fragmentation.amount("A100", 3999, [400, 1000]) == pytest.approx(1400)


def test_typical_shapes_are_the_most_popular() -> None:
    shapes = [share(500)] * 90 + [whole(1)] * 8 + [whole(2)] * 2
    assert typical_shapes(shapes) == [(share(500), 90 / 98), (whole(1), 8 / 98)]
