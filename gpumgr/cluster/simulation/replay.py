"""The method replay: pods arrive and end at given times, and wait in a queue while they fit nowhere.

At one instant pods end first, then pods arrive, then the queue is tried in the order of priority, arrival and row of the trace. A pod
that does not fit does not hold up the pods behind it, and no pod is evicted for another one. A pod runs for its duration from its start.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from statistics import fmean, quantiles
from typing import Literal

import msgspec

from gpumgr.cluster.simulation.fragmentation import Fragmentation, typical_shapes
from gpumgr.cluster.simulation.inflate import by_kind
from gpumgr.cluster.simulation.model import Change, Cluster, NodeSpec, Placement, Pod, Random, Shape
from gpumgr.cluster.simulation.policies import Find, make_policy
from gpumgr.common.errors import InputError


class Event(msgspec.Struct, frozen=True):
    """What happens to a pod, by its position in the trace. `where` is None for an arrival."""

    seconds: float
    what: Literal["arrived", "started", "ended"]
    pod: int
    where: Placement | None = None


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """`allocated_percent` of all GPU-milli and `queue_length` (mean, max) are over the time from the first arrival to the last arrival or
    start. `waiting_seconds` (mean, p50, p99) are of the pods that started. `failed_pods`: kind -> how many pods never started."""

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


def run(
    nodes: Sequence[NodeSpec],
    pods: Sequence[Pod],
    policy: str,
    seed: int,
    *,
    random: Callable[[int], Random],
    cpu_per_gpu_milli: int = 8000,
) -> ReplayResult:
    """Runs one policy with one seed. The other arguments are those of `inflate.run`. Raises InputError if the trace has no times."""
    if not any(pod.arrival_seconds or pod.duration_seconds for pod in pods):
        raise InputError(
            "no pod has an arrival or a duration, so the method replay has nothing to measure; "
            "add the columns arrival_seconds and duration_seconds, or use --method inflate"
        )
    cluster = Cluster(nodes)
    fragmentation = Fragmentation(typical_shapes(pod.shape for pod in pods))
    find = make_policy(policy, cluster, cpu_per_gpu_milli, fragmentation, random(seed))
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
        policy=policy,
        seed=seed,
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
