"""The two methods of a simulation: inflate and replay.

inflate is the test of FGD (USENIX ATC '23). Shuffled pods arrive until they have requested 130 % of the GPUs. If the trace requests less,
pods drawn with replacement are added. No pod ends, and none is tried twice.

replay: pods arrive at given times, wait in a queue while they fit nowhere, and run for their duration. At one instant pods end first, then
pods arrive, then the queue is tried in the order of priority, arrival and row of the trace. A pod that does not fit does not hold up the
next ones, and no pod is evicted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from statistics import fmean, quantiles
from typing import Final, Literal

import msgspec

from gpumgr.cluster.simulation.fragmentation import Fragmentation, typical_shapes
from gpumgr.cluster.simulation.model import Change, Cluster, NodeSpec, Placement, Pod, Random, Shape
from gpumgr.cluster.simulation.policies import Find, make_policy
from gpumgr.common.errors import InputError

DEMAND_PERCENT: Final = 130
#: Percentages of arrived demand (the GPUs requested so far, in percent of all GPUs) at which allocation and fragmentation are measured.
ALLOCATED_AT: Final = (100, 130)
FRAGMENTED_AT: Final = (50, 80, 90)
#: Kinds of pods that every result has; further kinds are named by their number of GPUs.
KINDS: Final = ("none", "share", "1", "2", "4", "8")
MAX_PODS: Final = 1_000_000


class Task(msgspec.Struct, frozen=True):
    """`random` makes a source of random numbers from a seed. `cpu_per_gpu_milli`: the setting scheduler.cpus_per_gpu, in thousandths."""

    policy: str
    seed: int
    random: Callable[[int], Random]
    cpu_per_gpu_milli: int = 8000


class InflateResult(msgspec.Struct, frozen=True, kw_only=True):
    """`allocated_percent`: the allocated part of all GPU-milli. `fragmentation_percent`: the part of the free GPU-milli that a typical pod
    can't use. The keys of both are percentages of arrived demand."""

    policy: str
    seed: int
    allocated_percent: dict[int, float]
    fragmentation_percent: dict[int, float]
    failed_pods: dict[str, int]
    idle_gpus: int


# -- inflate ----------------------------------------------------------------------------------------------------------------


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


def inflate(nodes: Sequence[NodeSpec], pods: Sequence[Pod], task: Task) -> InflateResult:
    cluster = Cluster(nodes)
    fragmentation = Fragmentation(typical_shapes(pod.shape for pod in pods))
    arriving = inflated(pods, cluster.capacity_milli, task.random(task.seed))
    find = make_policy(task.policy, cluster, task.cpu_per_gpu_milli, fragmentation, task.random(task.seed))
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
    return InflateResult(
        policy=task.policy,
        seed=task.seed,
        allocated_percent={mark: measured[mark][0] for mark in ALLOCATED_AT},
        fragmentation_percent={mark: measured[mark][1] for mark in FRAGMENTED_AT},
        failed_pods=by_kind(failed),
        idle_gpus=sum(len(node.idle_gpus()) for node in cluster.nodes),
    )


def by_kind(pods: Counter[str]) -> dict[str, int]:
    return {kind: pods[kind] for kind in (*KINDS, *sorted(pods.keys() - set(KINDS), key=int))}


def _measured(cluster: Cluster, fragmentation: Fragmentation) -> tuple[float, float]:
    """(Allocated percent, fragmentation percent), as in InflateResult."""
    capacity, free = cluster.capacity_milli, sum(node.free_milli for node in cluster.nodes)
    fragmented = 100 * sum(map(fragmentation.of, cluster.nodes)) / free if free else 0.0
    return round(100 * (capacity - free) / capacity, 4), round(fragmented, 4)


# -- replay -----------------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True):
    """`pod`: its position in the trace. `where` is None for an arrival."""

    seconds: float
    what: Literal["arrived", "started", "ended"]
    pod: int
    where: Placement | None = None


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """`allocated_percent` (of all GPU-milli) and `queue_length` have mean and max, from the first arrival to the last arrival or start.
    `waiting_seconds` has mean, p50 and p99 of the pods that started. `failed_pods`: kind -> pods that never started."""

    policy: str
    seed: int
    allocated_percent: dict[str, float]
    queue_length: dict[str, float]
    waiting_seconds: dict[str, float]
    failed_pods: dict[str, int]


def events(cluster: Cluster, find: Find, pods: Sequence[Pod]) -> Iterator[Event]:
    """The events in the order of time. The cluster is changed before the event that reports the change."""
    # Reversed: the next arrival is at the end of the list.
    arriving = sorted(range(len(pods)), key=lambda number: (pods[number].arrival_seconds, number), reverse=True)
    ends: list[tuple[float, int, Placement]] = []
    # Request -> the pods that wait: (-priority, arrival, position in the trace). A request that waits fits nowhere until a pod ends.
    waiting: dict[Shape, list[tuple[int, float, int]]] = {}
    while arriving or ends:
        now = min([pods[each].arrival_seconds for each in arriving[-1:]] + [end for end, _, _ in ends[:1]])
        tried = set(waiting) if ends and ends[0][0] <= now else set[Shape]()
        while ends and ends[0][0] <= now:
            _, number, where = heappop(ends)
            cluster.change(Change(number, pods[number].shape, where, 1))
            yield Event(now, "ended", number, where)
        while arriving and pods[arriving[-1]].arrival_seconds <= now:
            number = arriving.pop()
            pod = pods[number]
            if pod.shape not in waiting:
                tried.add(pod.shape)
            heappush(waiting.setdefault(pod.shape, []), (-pod.priority, pod.arrival_seconds, number))
            yield Event(now, "arrived", number)
        heads = [(waiting[shape][0], shape) for shape in tried]
        heapify(heads)
        while heads:
            (_, _, number), shape = heappop(heads)
            found = find(shape)
            if found is None:
                continue
            heappop(waiting[shape])
            if waiting[shape]:
                heappush(heads, (waiting[shape][0], shape))
            else:
                del waiting[shape]
            cluster.change(Change(number, shape, found, -1))
            if (duration := pods[number].duration_seconds) is not None:
                heappush(ends, (now + duration, number, found))
            yield Event(now, "started", number, found)


def replay(nodes: Sequence[NodeSpec], pods: Sequence[Pod], task: Task) -> ReplayResult:
    """Raises InputError if the trace has no times."""
    if not any(pod.arrival_seconds or pod.duration_seconds for pod in pods):
        raise InputError(
            "no pod has an arrival or a duration, so the method replay has nothing to measure; "
            "add the columns arrival_seconds and duration_seconds, or use --method inflate"
        )
    cluster = Cluster(nodes)
    fragmentation = Fragmentation(typical_shapes(pod.shape for pod in pods))
    find = make_policy(task.policy, cluster, task.cpu_per_gpu_milli, fragmentation, task.random(task.seed))
    #: Second -> (GPU-milli that are allocated, pods that wait) from then on.
    levels: dict[float, tuple[int, int]] = {}
    milli = length = last = 0
    started: dict[int, float] = {}
    for event in events(cluster, find, pods):
        pod = pods[event.pod]
        if event.what == "ended":
            milli -= pod.shape.total_milli
        elif event.what == "arrived":
            length += 1
        else:
            milli, length = milli + pod.shape.total_milli, length - 1
            started[event.pod] = event.seconds - pod.arrival_seconds
        levels[event.seconds] = milli, length
        if event.what != "ended":
            last = len(levels)
    p50, p99 = percentiles(list(started.values()))
    failed = Counter(pod.shape.kind for number, pod in enumerate(pods) if number not in started)
    allocated, queue = zip(*islice(levels.values(), last), strict=True)
    spans = [after - before for before, after in pairwise(islice(levels, last))]
    return ReplayResult(
        policy=task.policy,
        seed=task.seed,
        allocated_percent=_mean_and_max([100 * each / cluster.capacity_milli for each in allocated], spans),
        queue_length=_mean_and_max(queue, spans),
        waiting_seconds={"mean": round(fmean(started.values() or [0]), 3), "p50": round(p50, 3), "p99": round(p99, 3)},
        failed_pods=by_kind(failed),
    )


def _mean_and_max(values: Sequence[float], spans: Sequence[float]) -> dict[str, float]:
    """The mean over time, and the highest value. `spans`: how long each value lasted; the last value has none."""
    mean = fmean(values[:-1], spans) if sum(spans) else values[-1]
    return {"mean": round(mean, 4), "max": round(max(values), 4)}


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile; 0 without values."""
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values, 0.0][:1] * 99
    return cuts[49], cuts[98]
