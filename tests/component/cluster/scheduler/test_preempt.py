"""The verb preempt, and the GPUs that are kept for the pod that preempts."""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.request import PlacedPod
from gpumgr.cluster.core.victims import Eviction, find_eviction
from gpumgr.cluster.scheduler import preemption
from gpumgr.placement.requests import ContainerKind
from tests.background import until
from tests.cluster_states import expect

from .conftest import Json, Stage, pod

WHOLE: tuple[ContainerKind, int, int] = ("app", 100, 0)


def important(name: str, *containers: tuple[ContainerKind, int, int], priority: int = 10, nominated: str | None = None) -> Json:
    made = pod(name, *(containers or (WHOLE,)))
    made["spec"]["priority"] = priority
    made["status"]["nominatedNodeName"] = nominated
    return made


async def preempt(
    stage: Stage, item: Json, proposed: Mapping[str, Sequence[str]], violations: int = 0
) -> Mapping[str, list[str]]:
    meta = {
        name: {"Pods": [{"UID": f"uid-{each}"} for each in names], "NumPDBViolations": violations}
        for name, names in proposed.items()
    }
    answer = await stage.post("preempt", json.dumps({"Pod": item, "NodeNameToVictims": None, "NodeNameToMetaVictims": meta}))
    assert all(
        each["NumPDBViolations"] == violations for name, each in answer["NodeNameToMetaVictims"].items() if name in proposed
    )
    return {name: [each["UID"] for each in victims["Pods"]] for name, victims in answer["NodeNameToMetaVictims"].items()}


async def full(stage: Stage, cores: int = 100, priority: int = 0) -> None:
    """Node a has a pod low-N on each of its two GPUs."""
    for number in range(2):
        assert await stage.schedule(important(f"low-{number}", ("app", cores, 4), priority=priority), ["a"]) == "a"


async def preempting(stage: Stage) -> None:
    """On the full node a, GPUs are kept for the pod vip, which evicts low-0."""
    await full(stage)
    item = await stage.create(important("vip"))
    assert await stage.filtered(item, ["a"]) == []
    assert await preempt(stage, item, {"a": ["low-0"]}) == {"a": ["uid-low-0"]}


@pytest.mark.hami_bug("B16: no preemption")
async def test_the_victims_of_one_node_are_answered_and_their_gpu_is_kept(stage: Stage) -> None:
    await preempting(stage)
    assert sorted(stage.cores("a")) == [100, 200], "kept beyond what is free"
    await stage.end("low-0")
    assert stage.cores("a") == [100, 100]
    assert await stage.filtered(important("equal"), ["a"]) == []
    nominated = await stage.create(important("vip", nominated="a"))
    assert await stage.filtered(nominated, ["a"]) == ["a"]
    assert await stage.bind(nominated, "a") == ""
    await until(lambda: "uid-vip" not in stage.index.assumed)
    assert stage.cores("a") == [100, 100]


async def test_a_rejection_of_a_nominated_pod_does_not_end_its_nomination(stage: Stage) -> None:
    """kube-scheduler clears the nomination, and preempts again, if the node's failure is unresolvable."""
    await preempting(stage)
    answer = await stage.filter(important("vip", nominated="a"), ["a"])
    assert (list(answer["FailedNodes"]), answer["FailedAndUnresolvableNodes"]) == (["a"], {})
    assert sorted(stage.cores("a")) == [100, 200], "its GPU is still kept"


async def test_a_nominated_pod_is_tried_again_when_its_victims_have_ended(stage: Stage) -> None:
    """kube-scheduler may learn of their end before this process does. It then tries the pod too early, and not again for five minutes."""
    await preempting(stage)
    nominated = await stage.create(important("vip", nominated="a"))
    assert await stage.filtered(nominated, ["a"]) == []
    stage.clock.now += 2
    assert await stage.extender.retryable() is None
    await stage.end("low-0")
    assert stage.cores("a") == [100, 100]
    found = await stage.extender.retryable()
    assert found is not None
    assert found.name == "vip"
    assert await stage.extender.retryable() is None, "kube-scheduler has a second to try it"
    assert await stage.filtered(nominated, ["a"]) == ["a"]


@pytest.mark.parametrize("reason", ["quota", "own filters"])
async def test_the_pause_grows_while_filter_rejects_a_pod_whose_kept_gpus_are_free(stage: Stage, reason: str) -> None:
    """The pod is over its quota by now, or kube-scheduler's own filters exclude the node, so that it offers only another one."""
    await preempting(stage)
    await stage.show(nominated := important("vip", nominated="a"))
    await stage.end("low-0")
    assert stage.cores("a") == [100, 100]
    assert await stage.schedule(important("b", ("app", 400, 0)), ["b"]) == "b"
    if reason == "quota":
        stage.limit(cores=100)
    offered, times = ["a"] if reason == "quota" else ["b"], []
    assert await stage.filtered(nominated, offered) == []
    for tenth in range(10, 1300):
        stage.clock.now = tenth / 10
        if await stage.extender.retryable() is not None:
            times.append(stage.clock.now)
            assert await stage.filtered(nominated, offered) == []
    assert times == [1, 3, 7, 15, 31, 63, 127]


async def test_victims_are_chosen_on_the_gpu_and_on_nodes_that_only_filter_rejected(stage: Stage) -> None:
    """On node b only the sum is short; on node a no sum is short, so kube-scheduler does not propose it."""
    await full(stage, 60)
    for number in range(4):
        assert await stage.schedule(important(f"b-{number}", priority=5), ["b"]) == "b"
    item = await stage.create(important("vip", ("app", 50, 4)))
    assert await stage.filtered(item, ["a"]) == []
    ((name, victims),) = (await preempt(stage, item, {"b": ["b-1"]})).items()
    assert (name, len(victims)) == ("a", 1), "its pods have the lowest priority"
    assert await stage.filtered(item, ["b"]) == []
    assert await preempt(stage, item, {"b": ["b-1"]}) == {"b": ["uid-b-1"]}, "node a was offered for the attempt before"


async def test_without_node_cache_whole_pods_are_proposed(stage: Stage) -> None:
    await full(stage)
    low = {"Pods": [important("low-1")], "NumPDBViolations": 3}
    body = {"Pod": important("vip"), "NodeNameToVictims": {"a": low, "unknown": low, "b": None}, "NodeNameToMetaVictims": None}
    answer = await stage.post("preempt", json.dumps(body))
    assert answer == {"NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "uid-low-1"}], "NumPDBViolations": 3}}}


def cordoned(node: NodeState, gpu: int = 0) -> NodeState:
    return replace(node, gpus=tuple(replace(each, cordoned=place == gpu) for place, each in enumerate(node.gpus)))


def reordered(node: NodeState) -> NodeState:
    return replace(node, gpus=node.gpus[::-1])


def without_gpus(node: NodeState) -> NodeState:
    return NodeState(name=node.name)


class Examinations:
    """Each look for victims on a node lasts until the event loop has served another call: the next of `changes`, if there is one."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.changes: list[Callable[[], object]] = []
        self._loop = asyncio.get_running_loop()

    def __call__(self, node: NodeState, *arguments: Any, **named: Any) -> Eviction | None:
        found, served = find_eviction(node, *arguments, **named), threading.Event()
        self.names.append(node.name)
        if self.changes:
            self._loop.call_soon_threadsafe(self.changes.pop())
        self._loop.call_soon_threadsafe(served.set)
        assert served.wait(20)
        return found


@pytest.fixture
async def examinations(monkeypatch: pytest.MonkeyPatch) -> Examinations:
    made = Examinations()
    monkeypatch.setattr(preemption, "find_eviction", made)
    return made


@pytest.mark.parametrize("change", [None, cordoned, reordered, without_gpus])
async def test_the_loop_serves_others_meanwhile_and_a_node_that_changes_is_not_taken(
    stage: Stage, examinations: Examinations, change: Callable[[NodeState], NodeState] | None
) -> None:
    """A large node takes a second. `change` None: one of its pods ends."""
    await full(stage)
    item = await stage.create(important("vip"))
    assert await stage.filtered(item, ["a"]) == []
    before, placed = stage.state("a"), expect(PlacedPod, stage.index.placement("uid-low-1"))
    examinations.changes.append(
        partial(stage.index.remove, placed.uid) if change is None else partial(stage.index.set_node, change(before))
    )
    with capture_logs() as logs:
        assert await preempt(stage, item, {"a": ["low-0"]}) == {}
    assert [line["event"] for line in logs] == [], "it did not fail"
    stage.index.set_node(before)
    stage.index.bind(placed)
    assert await preempt(stage, item, {"a": ["low-0"]}) == {"a": ["uid-low-0"]}


async def test_pods_that_preemption_does_not_help_get_no_victims(stage: Stage) -> None:
    await full(stage, priority=10)
    placed = important("low-0", priority=20)
    for item in (
        important("equal"),
        placed,
        important("odd", ("app", 150, 0), priority=20),
        important("none", ("app", 0, 0)),
    ):
        assert await preempt(stage, item, {"a": ["low-0"]}) == {}
    assert stage.cores("a") == [100, 100]


async def test_kept_gpus_are_there_for_a_pod_of_higher_priority(stage: Stage) -> None:
    await preempting(stage)
    await stage.end("low-0")
    assert await stage.filtered(important("lower", priority=9), ["a"]) == []
    assert await stage.filtered(important("higher", priority=11), ["a"]) == ["a"]
    assert stage.cores("a") == [100, 100]
    assert stage.index.placement("uid-vip") is None


async def test_with_several_candidates_a_pod_of_higher_priority_is_bound_to_kept_gpus(soft: Stage) -> None:
    """Filter assumes nothing, so bind chooses the GPUs."""
    await full(soft)
    await soft.show(important("vip", ("app", 50, 4), nominated="a"))
    await soft.end("low-0")
    equal, higher = important("equal"), await soft.create(important("higher", priority=11))
    assert await soft.filtered(equal, ["a"]) == []
    assert "no entirely free GPU" in await soft.bind(await soft.create(equal), "a")
    assert await soft.filtered(higher, ["a"]) == ["a"]
    assert await soft.bind(higher, "a") == ""
    assert soft.cores("a") == [100, 100]
    assert soft.index.placement("uid-vip") is None


@pytest.mark.parametrize("end", ["unused", "cleared", "moved", "deleted", "late"])
async def test_kept_gpus_end_with_the_nomination_the_pod_or_their_time(stage: Stage, end: str) -> None:
    await preempting(stage)

    async def kept_on(seconds: float) -> str | None:
        """At the next call of a verb."""
        stage.clock.now += seconds
        await stage.filter(important("probe"), ["b"])
        placed = stage.index.placement("uid-vip")
        return placed.node if placed is not None else None

    assert await kept_on(59) == "a"
    if end == "unused":
        assert await kept_on(1) is None, "kube-scheduler has not taken the node"
        return
    await stage.show(important("vip", nominated="a"))
    assert [await kept_on(seconds) for seconds in (0, 299)] == ["a", "a"]
    if end == "late":
        assert await kept_on(1) is None
    elif end == "deleted":
        await stage.end("vip")
        assert stage.index.placement("uid-vip") is None
    else:
        await stage.show(important("vip", nominated="b" if end == "moved" else None))
        assert await kept_on(0) == ("b" if end == "moved" else None)


async def test_a_restart_keeps_the_gpus_of_nominated_pods(stage: Stage) -> None:
    """Whether their victims still end, or have ended."""
    await full(stage)
    ending = important("low-0", ("app", 100, 4))
    ending["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z", annotations=dict(stage.sim.annotations("uid-low-0")))
    ending["spec"]["nodeName"] = "a"
    await stage.show(ending, important("vip", nominated="a"), important("free", nominated="b"))
    assert await stage.filtered(important("equal", ("app", 400, 0)), ["a", "b"]) == []
    assert sorted(stage.cores("a")) == [100, 200]
    assert sum(stage.cores("b")) == 100


@pytest.mark.parametrize("verb", ["filter", "bind", "preempt", "retryable"])
async def test_the_loop_serves_others_while_nodes_of_nominated_pods_are_examined(
    stage: Stage, examinations: Examinations, verb: str
) -> None:
    """A hundred pods with a nominated node take two seconds. Each verb waits for them, and they are examined once."""
    probe = important("probe", priority=0)
    await stage.show(probe, *(important(f"vip-{number}", nominated=name) for number, name in enumerate("bbba")))
    called = {
        "filter": lambda: stage.filter(probe, ["b"]),
        "bind": lambda: stage.bind(probe, "b"),
        "preempt": lambda: preempt(stage, probe, {}),
        "retryable": stage.extender.retryable,
    }[verb]
    await asyncio.gather(called(), called())
    assert [f"uid-vip-{number}" in stage.index.assumed for number in range(4)] == [True] * 4
    assert sorted(examinations.names) == ["a", "b", "b", "b"]


async def test_gpus_are_not_kept_as_they_were_found_if_the_node_or_the_nomination_changes_meanwhile(
    stage: Stage, examinations: Examinations
) -> None:
    before = stage.state("a")
    stage.index.set_node(cordoned(before, 1))
    examinations.changes += [partial(stage.index.set_node, change(before)) for change in (reordered, cordoned)]
    await stage.show(important("vip", nominated="a"))
    for kept in (False, False, True):
        await stage.extender.retryable()
        assert ("uid-vip" in stage.index.assumed) == kept
    examinations.changes.append(lambda: stage.watches.nominated.pop("uid-moved"))
    await stage.show(important("moved", nominated="b"))
    await stage.extender.retryable()
    assert stage.index.placement("uid-moved") is None


async def test_a_pod_over_its_quota_evicts_pods_of_its_namespace_alone(stage: Stage) -> None:
    await full(stage)
    other = important("other")
    other["metadata"]["namespace"] = "free"
    other["spec"]["priority"] = 0
    await stage.schedule(other, ["b"])
    stage.limit(cores=200)
    item = important("vip", ("app", 50, 4))
    await stage.filter(item, ["a", "b"])
    ((name, victims),) = (await preempt(stage, item, {"b": ["other"]})).items()
    assert (name, len(victims)) == ("a", 1)
    await stage.filter(item := important("too-much", ("app", 300, 0)), ["b"])
    assert await preempt(stage, item, {"b": ["other"]}) == {}


async def test_a_pod_over_its_quota_evicts_no_pod_of_another_namespace_beside_its_own(stage: Stage) -> None:
    """One pod of its own namespace would free enough of the quota, and one of another namespace the GPU that lacks."""
    for name, namespace, cores in (("own", "team", 100), ("other", "free", 100)):
        item = important(name, ("app", cores, 0), priority=0)
        item["metadata"]["namespace"] = namespace
        assert await stage.schedule(item, ["a"]) == "a"
    stage.limit(cores=200)
    both = important("both", ("app", 200, 0))
    await stage.filter(both, ["a"])
    assert await preempt(stage, both, {"a": ["own", "other"]}) == {}
    assert await preempt(stage, both, {"a": []}) == {}
    one = important("one", ("app", 100, 0))
    await stage.filter(one, ["a"])
    assert await preempt(stage, one, {"a": ["other"]}) == {"a": ["uid-other"]}, "it is within its quota"


async def test_nodes_are_examined_until_the_work_is_enough(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node a has pods with a lower priority than node b, and is the first."""
    await full(stage)
    for number in range(4):
        assert await stage.schedule(important(f"b{number}", priority=5), ["b"]) == "b"
    item = await stage.create(important("vip", ("app", 400, 0)))
    monkeypatch.setattr(preemption, "_MAX_WORK", 4)
    assert await preempt(stage, item, {"a": [], "b": []}) == {}, "2 pods on 2 GPUs are so much; the pod would fit on node b alone"
    monkeypatch.setattr(preemption, "_MAX_WORK", 5)
    assert [*await preempt(stage, item, {"a": [], "b": []})] == ["b"]
