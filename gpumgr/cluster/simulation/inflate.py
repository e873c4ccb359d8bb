"""The method inflate, the test of FGD (USENIX ATC '23). Pods arrive in random order until they have requested 130 % of the GPUs.

The trace's pods are shuffled. If they request less, pods drawn with replacement are added; if more, the last pods are left out. No pod
ends, and none is tried twice.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from gpumgr.cluster.simulation.fragmentation import Fragmentation, typical_shapes
from gpumgr.cluster.simulation.model import Change, Cluster, NodeSpec, Pod, Random
from gpumgr.cluster.simulation.policies import make_policy
from gpumgr.common.errors import InputError

DEMAND_PERCENT: Final = 130
#: Percentages of arrived demand (the GPUs that the pods so far have requested, in percent of all GPUs) at which grants (ALLOCATED_AT) and
#: fragmentation (FRAGMENTED_AT) are measured.
ALLOCATED_AT: Final = (100, 130)
FRAGMENTED_AT: Final = (50, 80, 90)
#: Kinds of pods that every result has; further kinds are named by their number of GPUs.
KINDS: Final = ("none", "share", "1", "2", "4", "8")
MAX_PODS: Final = 1_000_000


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Two measures, each by the percentage of arrived demand: the percentage of all GPU-milli that is granted, and the percentage of free
    GPU-milli that is fragmented."""

    policy: str
    seed: int
    allocated_percent: dict[int, float]
    fragmentation_percent: dict[int, float]
    failed_pods: dict[str, int]
    idle_gpus: int


def inflated(pods: Sequence[Pod], capacity_milli: int, random: Random) -> list[Pod]:
    """The pods in the order of arrival. Raises InputError if no pod requests a GPU, or too many pods would be needed."""
    if not any(pod.shape.gpus for pod in pods):
        raise InputError("no pod of the trace requests a GPU, so the method inflate has nothing to measure")
    target = capacity_milli * DEMAND_PERCENT // 100
    made = list(pods)
    random.shuffle(made)
    demand = sum(pod.shape.total_milli for pod in made)
    while demand < target:
        if len(made) >= MAX_PODS:
            raise InputError(f"more than {MAX_PODS:,} pods are needed to ask for {DEMAND_PERCENT} % of the GPUs; use fewer nodes")
        made.append(random.choice(pods))
        demand += made[-1].shape.total_milli
    while demand - made[-1].shape.total_milli >= target:
        demand -= made.pop().shape.total_milli
    return made


def run(
    nodes: Sequence[NodeSpec],
    pods: Sequence[Pod],
    policy: str,
    seed: int,
    *,
    random: Callable[[int], Random],
    cpu_per_gpu_milli: int = 8000,
) -> Result:
    """One policy and one seed. `random` makes a source of random numbers from a seed; `cpu_per_gpu_milli`: the
    scheduler's setting cpus_per_gpu, in thousandths."""
    cluster = Cluster(nodes)
    fragmentation = Fragmentation(typical_shapes(pod.shape for pod in pods))
    arriving = inflated(pods, cluster.capacity_milli, random(seed))
    find = make_policy(policy, cluster, cpu_per_gpu_milli, fragmentation, random(seed))
    measured: dict[int, tuple[float, float]] = {}
    left, demand = sorted({*ALLOCATED_AT, *FRAGMENTED_AT}, reverse=True), 0
    failed: Counter[str] = Counter()
    for number, pod in enumerate(arriving):
        where = find(pod.shape)
        if where is None:
            failed[pod.shape.kind] += 1
        else:
            cluster.change(Change(number, pod.shape, where, -1))
        demand += pod.shape.total_milli
        while left and demand * 100 >= left[-1] * cluster.capacity_milli:
            measured[left.pop()] = _measured(cluster, fragmentation)
    return Result(
        policy=policy,
        seed=seed,
        allocated_percent={mark: measured[mark][0] for mark in ALLOCATED_AT},
        fragmentation_percent={mark: measured[mark][1] for mark in FRAGMENTED_AT},
        failed_pods=by_kind(failed),
        idle_gpus=sum(len(node.idle_gpus()) for node in cluster.nodes),
    )


def by_kind(pods: Counter[str]) -> dict[str, int]:
    return {kind: pods[kind] for kind in (*KINDS, *sorted(pods.keys() - set(KINDS), key=int))}


def _measured(cluster: Cluster, fragmentation: Fragmentation) -> tuple[float, float]:
    """The granted and the fragmented percentage now, as in Result."""
    capacity, free = cluster.capacity_milli, sum(node.free_milli for node in cluster.nodes)
    fragmented = 100 * sum(map(fragmentation.of, cluster.nodes)) / free if free else 0.0
    return round(100 * (capacity - free) / capacity, 4), round(fragmented, 4)
