"""The methods inflate and replay: which pods arrive, who starts when, what is measured, and what holds for each policy on any trace."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.cluster.simulation import methods
from gpumgr.cluster.simulation.fragmentation import Fragmentation
from gpumgr.cluster.simulation.methods import Event, Task, events, inflate, inflated, percentiles, replay
from gpumgr.cluster.simulation.model import Change, Cluster, NodeSpec, Pod, Shape
from gpumgr.cluster.simulation.policies import POLICIES, make_policy
from gpumgr.common.errors import InputError

WHOLE = Pod(name="w", shape=Shape(gpus=1, gpu_milli=1000, cpu_milli=1))
NONE = Pod(name="n", shape=Shape(cpu_milli=1))
NODE = NodeSpec(name="a", gpus=2, cpu_milli=10_000, ram_mebibytes=100, memory_blocks=10)


# -- inflate -----------------------------------------------------------------------------------------------------------------


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


def test_inflate_measured_by_hand() -> None:
    """Ten GPUs, and CPU for eight. Each pod takes one; the pods from the ninth to the thirteenth fail."""
    nodes = [NodeSpec(name="a", gpus=8, cpu_milli=8, ram_mebibytes=0), NodeSpec(name="b", gpus=2, cpu_milli=0, ram_mebibytes=0)]
    for policy in POLICIES:
        found = inflate(nodes, [WHOLE], Task(policy, 7, random.Random))
        assert found.allocated_percent == {100: 80, 130: 80}
        # Free are 5 of 10 with 2 on b, then 2 with 2 on b.
        assert found.fragmentation_percent == {50: 40, 80: 100, 90: 100}
        assert found.failed_pods == {"none": 0, "share": 0, "1": 5, "2": 0, "4": 0, "8": 0}
        assert found.idle_gpus == 2


# -- replay ------------------------------------------------------------------------------------------------------------------


def pod(name: str, gpus: int, arrival: float, duration: float | None, priority: int = 0, milli: int = 1000) -> Pod:
    shape = Shape(gpus=gpus, gpu_milli=milli if gpus else 0, cpu_milli=1000)
    return Pod(name=name, shape=shape, arrival_seconds=arrival, duration_seconds=duration, priority=priority)


def story(nodes: Sequence[NodeSpec], pods: Sequence[Pod], policy: str = "binpack", seed: int = 1) -> list[Event]:
    cluster = Cluster(nodes)
    return list(events(cluster, make_policy(policy, cluster, 8000, Fragmentation([]), random.Random(seed)), pods))


def starts(pods: Sequence[Pod], policy: str = "binpack") -> dict[str, float]:
    return {pods[event.pod].name: event.seconds for event in story([NODE], pods, policy) if event.what == "started"}


@pytest.mark.parametrize(("pods", "expected"), [
    # What ends at an instant is free at that instant.
    ([pod("a", 2, 0, 5), pod("b", 2, 5, 5), pod("c", 2, 5, 1)], {"a": 0, "b": 5, "c": 10}),
    # Priority comes first, then the arrival, then the row.
    ([pod("a", 2, 0, 9), pod("b", 2, 2, 1), pod("c", 2, 1, 1), pod("d", 2, 3, 1, priority=1), pod("e", 2, 2, 1)],
     {"a": 0, "d": 9, "c": 10, "b": 11, "e": 12}),
    # A pod that does not fit does not hold up others; its duration begins with its start.
    ([pod("a", 1, 0, 9), pod("b", 2, 1, 4), pod("c", 1, 2, 3), pod("d", 2, 3, 1)], {"a": 0, "c": 2, "b": 9, "d": 13}),
    # Rows need no order; a pod without duration does not end, and a duration may be 0.
    ([pod("c", 1, 8, None), pod("a", 2, 3, 0), pod("b", 2, 3, 2), pod("d", 2, 9, 1)], {"a": 3, "b": 3, "c": 8}),
    # Shares, and a pod without GPUs.
    ([pod("a", 1, 0, 9, milli=600), pod("b", 2, 1, 1), pod("c", 1, 1, 1, milli=400), pod("n", 0, 1, 1)],
     {"a": 0, "b": 9, "c": 1, "n": 1}),
])  # fmt: skip
@pytest.mark.parametrize("policy", POLICIES)
def test_starts(policy: str, pods: list[Pod], expected: dict[str, float]) -> None:
    assert starts(pods, policy) == expected


def test_replay_measured_by_hand() -> None:
    """GPUs: 1 of 2 until 4, then 2 until 6 (b waited for 2 s there), then 2 until 8. The pod that asks for three GPUs waits to the end."""
    pods = [pod("a", 1, 0, 6), pod("x", 3, 2, 1), pod("b", 2, 4, 4), pod("c", 1, 4, 2)]
    found = replay([NODE], pods, Task("best-fit", 1, random.Random))
    # From 0 to the last start at 6: no pod waits for 2 s, one for 2 s, two for 2 s.
    assert found.allocated_percent == {"mean": round((4 * 50 + 2 * 100) / 6, 4), "max": 100}
    assert found.queue_length == {"mean": 1, "max": 2}
    assert found.waiting_seconds == {"mean": round(2 / 3, 3), "p50": 0, "p99": round(0.98 * 2, 3)}
    assert found.failed_pods == {"none": 0, "share": 0, "1": 0, "2": 0, "4": 0, "8": 0, "3": 1}


def test_all_at_once_and_nothing_placed() -> None:
    found = replay([NODE], [pod("x", 3, 7, 1)], Task("random", 1, random.Random))
    assert found.allocated_percent == {"mean": 0, "max": 0}
    assert found.queue_length == {"mean": 1, "max": 1}
    assert found.waiting_seconds == {"mean": 0, "p50": 0, "p99": 0}
    with pytest.raises(InputError, match="add the columns arrival_seconds and duration_seconds"):
        replay([NODE], [pod("x", 1, 0, None)], Task("random", 1, random.Random))
    assert percentiles([5]) == (5, 5)


def test_the_order_of_equal_nodes_does_not_matter() -> None:
    nodes = [replace(NODE, name=f"n{number}", gpus=4) for number in range(3)]
    source = random.Random(5)
    trace = [
        pod(str(number), 1, source.randrange(60), source.randrange(40), milli=source.choice((300, 500, 800, 1000)))
        for number in range(60)
    ]
    for policy in POLICIES:
        forwards = replay(nodes, trace, Task(policy, 3, random.Random))
        assert forwards == replay(nodes[::-1], trace, Task(policy, 3, random.Random))
        assert forwards.queue_length["max"] > 0


SHAPES = [
    Shape(gpus=1, gpu_milli=300, cpu_milli=500, memory_blocks=3),
    Shape(gpus=1, gpu_milli=707, cpu_milli=500, memory_blocks=6),
    Shape(gpus=1, gpu_milli=1000, ram_mebibytes=60),
    Shape(gpus=2, gpu_milli=1000, cpu_milli=3000),
    Shape(gpus=3, gpu_milli=1000),
    Shape(cpu_milli=9000),
]
POD = st.builds(
    Pod,
    name=st.just("p"),
    shape=st.sampled_from(SHAPES),
    priority=st.integers(0, 2),
    arrival_seconds=st.integers(0, 12),
    duration_seconds=st.one_of(st.none(), st.integers(0, 9)),
)


@settings(max_examples=15)
@pytest.mark.parametrize("policy", POLICIES)
@given(pods=st.lists(POD, min_size=1, max_size=30), gpus=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_any_trace(policy: str, pods: list[Pod], gpus: list[int]) -> None:
    """An account of its own: no node and no GPU beyond its capacity; each pod arrives once, starts at most once, and frees what it got
    after its duration; none waits to the end beside room for it."""
    specs = [replace(NODE, name=f"n{number}", gpus=count) for number, count in enumerate(gpus)]
    arrived: set[int] = set()
    running: dict[int, Event] = {}
    started: dict[int, Event] = {}
    now = 0.0
    for event in story(specs, pods, policy):
        trace, number = pods[event.pod], event.pod
        assert event.seconds >= now
        now = event.seconds
        if event.what == "arrived":
            assert number not in arrived
            assert now == trace.arrival_seconds
            arrived.add(number)
        elif event.what == "started":
            assert number in arrived
            assert number not in started
            assert event.where is not None
            assert len(set(event.where.gpus)) == trace.shape.gpus
            running[number] = started[number] = event
        else:
            assert event.where == running.pop(number).where
            assert now == started[number].seconds + (trace.duration_seconds or 0)
        for position, spec in enumerate(specs):
            here = [
                (pods[each], placed.where) for each, placed in running.items() if placed.where and placed.where.node == position
            ]
            assert sum(each.shape.cpu_milli for each, _ in here) <= spec.cpu_milli
            assert sum(each.shape.ram_mebibytes for each, _ in here) <= spec.ram_mebibytes
            for gpu in range(spec.gpus):
                on_gpu = [each.shape for each, where in here if gpu in where.gpus]
                assert sum(shape.gpu_milli for shape in on_gpu) <= 1000
                assert sum(shape.memory_blocks for shape in on_gpu) <= spec.memory_blocks
    assert arrived == set(range(len(pods)))
    assert {number for number in started if pods[number].duration_seconds is not None}.isdisjoint(running)
    left = Cluster(specs)
    for number, event in running.items():
        assert event.where is not None
        left.change(Change(number, pods[number].shape, event.where, -1))
    for number in arrived - set(started):
        assert not any(node.hosts(pods[number].shape) for node in left.nodes)
