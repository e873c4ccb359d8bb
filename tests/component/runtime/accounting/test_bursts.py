"""Bursts on a node of two GPUs with 2 GiB each: the limits that reach the mechanisms, what counts as used, and starts of others."""

from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.ledger.ledger import Allocation, ClaimRequest
from gpumgr.placement.devices import NodeSample
from gpumgr.placement.pods import ClaimUse, PodView
from gpumgr.settings.schema import EnforcementSettings
from tests.unit.ledger.samples import MIB, container, sample
from tests.unit.web.metrics.pictures import allocation, name_of, uuid_of

from .node import Node, breathe

GPU = name_of(0)
WEB, TRAIN = ("team", "web"), ("team", "train")
PIDS = {"a": 11, "t": 21, "b": 31}


def share(letter: str, pod: tuple[str, str], blocks: int, mechanism: str = "limiter", *, cores: int = 0b1) -> Allocation:
    """A share of GPU 0. `blocks`, `cores`: masks."""
    return replace(allocation(letter, pod, cores={0: cores}, blocks={0: blocks}), mechanisms=(mechanism,))


A, T = share("a", WEB, 0b11), share("t", TRAIN, 0b111100)


def bursting(
    *allocations: Allocation, limit: int | None = 7 * 256, allowed: bool = True, text: str | None = None, most: int = 0
) -> Node:
    """The pod of the allocation `a` has the limit in MiB; `text`: why its annotation is not used. `most`: the maximum of the node."""
    node = Node(*(allocations or (A,)))
    node.memory_watcher.apply(replace(rule(allowed=allowed), max_growth_memory_mebibytes=most))
    demand(node, limit, text)
    for each in allocations or (A,):
        assert each.pod is not None
        node.runs(container(each.id, each.pod), PIDS[each.id])
    return node


def rule(*, allowed: bool) -> EnforcementSettings:
    return EnforcementSettings(over_limit_samples=1, over_limit_slack_mebibytes=0, memory_burst=allowed)


def demand(node: Node, limit: int | None, text: str | None = None) -> None:
    limits = () if limit is None else (("main", limit),)
    view = PodView(namespace="team", name="web", uid="uid-a", memory_limits=limits, memory_limits_ignored=text)
    node.pods.views[WEB] = view


def uses(**mebibytes: int) -> NodeSample:
    """One sample of GPU 0, with what is in use on it. No kernel runs."""
    found = sample({PIDS[each]: size * MIB for each, size in mebibytes.items()}, ratios={PIDS[each]: 0.0 for each in mebibytes})
    gpu = replace(found.gpus[uuid_of(0)], memory_used_bytes=sum(mebibytes.values()) * MIB)
    return NodeSample(gpus={uuid_of(0): gpu})


def limits(node: Node) -> Mapping[str, int]:
    """By allocation, the limits in MiB that the mechanisms got last."""
    _, running = node.backends.seen[-1]
    return {each.tenant.allocation: each.tenant.gpus[0].limit_bytes // MIB for each, _ in running}


def held(node: Node) -> Mapping[str, int]:
    return node.agent_state.inventory.burst_mebibytes


def reasons(node: Node) -> list[str]:
    return [entry.why for entry in node.told if entry.code == "GpuMemoryLimitIgnored"]


async def test_the_limit_of_a_burst_reaches_the_mechanisms_and_what_it_holds_counts_as_used() -> None:
    node = bursting()
    await node.sampled(uses(a=100))
    assert (limits(node), held(node)) == ({"a": 7 * 256}, {})
    await node.sampled(uses(a=1300))
    assert (limits(node), held(node)) == ({"a": 7 * 256}, {GPU: 1300 - 512})
    assert not node.memory_watcher.over
    use = node.use.containers["a", GPU]
    assert (use.memory_request_bytes, use.memory_limit_bytes) == (512 * MIB, 7 * 256 * MIB)
    assert not node.told
    await node.sampled(uses(a=7 * 256 + 1))
    assert node.memory_watcher.over == {("a", GPU)}


async def test_memory_that_others_were_granted_is_left_to_them() -> None:
    """8 blocks, of them 2 and 4 are granted."""
    node = bursting(A, T)
    await node.sampled(uses(a=512, t=0))
    assert limits(node) == {"a": 1024, "t": 1024}
    await node.sampled(uses(a=1024, t=1024))
    assert (limits(node), held(node)) == ({"a": 1024, "t": 1024}, {GPU: 512})
    node.frees("t")
    await node.sampled(uses(a=1024))
    assert limits(node) == {"a": 7 * 256}


async def test_the_annotation_counts_while_the_container_runs_and_so_does_the_setting() -> None:
    node = bursting(limit=None)
    await node.sampled(uses(a=1))
    assert limits(node) == {"a": 512}
    demand(node, 1024)
    await node.sampled(uses(a=1024))
    assert limits(node) == {"a": 1024}
    node.memory_watcher.apply(rule(allowed=False))
    await node.sampled(uses(a=1024))
    assert limits(node) == {"a": 512}
    assert held(node) == {GPU: 512}, "it still holds that memory"
    demand(node, None)
    await node.sampled(uses(a=700))
    assert held(node) == {GPU: 188}
    await node.sampled(uses(a=512))
    assert held(node) == {}
    await node.sampled(uses(a=700))
    assert held(node) == {}, "this is no burst"


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (lambda: bursting(allowed=False), "enforcement.memory_burst is off"),
        (lambda: bursting(limit=511), "511 MiB for container main, less than the 512 MiB that"),
        (lambda: bursting(limit=2049), "2049 MiB for container main, and GPU 00000000 has only 2048 MiB"),
        (lambda: bursting(limit=None, text="it is no JSON"), "it is no JSON"),
        (lambda: bursting(share("a", WEB, 0b11, "vcuda")), "the backend vcuda can't"),
        (lambda: bursting(most=1279), "the pod could have 1280 MiB above its requests, and this node allows 1279"),
    ],
)
async def test_a_limit_that_is_not_used_is_reported_once_and_the_request_is_enforced(node: Callable[[], Node], why: str) -> None:
    made = node()
    for used in (512, 512, 513, 513, 513):
        await made.sampled(uses(a=used))
    (reason,) = reasons(made)
    assert reason.startswith("the annotation gpumgr.io/memory-limit is not used, and the request stays the limit: ")
    assert why in reason
    assert (limits(made), held(made)) == ({"a": 512}, {})
    assert made.memory_watcher.over == {("a", GPU)}
    await made.memory_watcher.bursts.make_room(T)  # at once


async def test_containers_that_share_a_claim_have_the_highest_of_their_limits() -> None:
    node = bursting(replace(A, claim=ClaimRequest(uid="u", namespace="team", name="c", request="gpu")), most=1024)
    asked = {WEB: {"main": 1024, "side": 1280, "third": 1100}, TRAIN: {"main": 2000, "free": 2048}}
    for (namespace, name), sizes in asked.items():
        used = tuple(ClaimUse(container=each, claim="c" if each != "free" else "other") for each in sizes)
        uid = "uid-a" if name == "web" else "uid-t"
        node.pods.views[namespace, name] = PodView(
            namespace=namespace, name=name, uid=uid, claims=used, memory_limits=tuple(sizes.items())
        )
    await node.sampled(uses(a=513), times=3)
    assert limits(node) == {"a": 1280}
    (entry,) = node.told
    assert (entry.pod, entry.pod_uid, entry.container) == (TRAIN, "uid-t", "main")
    assert "could have 1488 MiB above its requests, and this node allows 1024" in entry.why
    del node.pods.views[WEB]  # the first one ends
    node.memory_watcher.apply(rule(allowed=True))
    await node.sampled(uses(a=513))
    assert limits(node) == {"a": 2000}


async def test_what_a_container_holds_counts_until_its_pod_is_known() -> None:
    """The agent has restarted, and the API server does not answer yet."""
    node = bursting()
    view = node.pods.views.pop(WEB)
    await node.sampled(uses(a=1024))
    assert (limits(node), held(node)) == ({"a": 1024}, {GPU: 512})
    assert not node.memory_watcher.over, "nor is its pod evicted"
    node.pods.views[WEB] = view
    await node.sampled(uses(a=1024))
    assert (limits(node), held(node)) == ({"a": 7 * 256}, {GPU: 512})
    for allowed in (True, False):
        other = bursting(limit=None, allowed=allowed)
        other.pods.views.clear()
        await other.sampled(uses(a=1024))
        assert held(other) == {GPU: 512}, "the setting may have been on before the restart"


async def test_before_a_container_starts_others_get_no_more_than_they_use() -> None:
    node = bursting()
    await node.sampled(uses(a=1024))
    start = await node.start(T)
    await node.sampled(uses(a=1024))
    assert limits(node) == {"a": 1024}
    assert not start.done(), "that sample is older than the lower limit"
    await node.sampled(uses(a=1024))
    await start
    node.holds(T)
    await node.sampled(uses(a=1024))
    assert limits(node) == {"a": 1024}, "the rest is granted"


async def test_a_sample_from_before_slow_backends_lowered_the_limits_does_not_count() -> None:
    node = bursting()
    await node.sampled(uses(a=512))
    node.set_timeout(0.05)
    node.backends.ready.clear()
    start = await node.start(T)
    await node.sampled(uses(a=512))
    node.backends.ready.set()
    await breathe()
    assert limits(node) == {"a": 512}, "now, after the sample that the next evaluation may have"
    node.backends.ready.clear()
    await node.sampled(uses(a=512))
    assert not start.done()
    node.backends.ready.set()
    await node.sampled(uses(a=1200))
    assert start.done()
    with pytest.raises(Refusal, match=r"team/web \(main\) holds 688 MiB above its request"):
        await start


async def test_a_start_waits_for_a_limit_that_the_driver_refuses_and_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = bursting()
    node.backends.obstacles = {"a": "the driver reports 0/1792 MiB", "t": "no other container"}
    await node.sampled(uses(a=512))
    start = await node.start(T)
    for _ in range(3):
        await node.sampled(uses(a=512))
        assert not start.done()
    monkeypatch.setattr("gpumgr.runtime.bursts._ROOM_SECONDS", 0.01)
    with pytest.raises(Refusal) as refusal:
        await node.memory_watcher.bursts.make_room(T)
    assert str(refusal.value) == (
        "the memory limits of other containers on GPU 00000000 were not lowered within 0.01 s: team/web (main): the driver reports "
        "0/1792 MiB; the kubelet tries again by itself"
    )
    node.backends.obstacles = {"t": "no other container"}
    await node.sampled(uses(a=512))
    assert not start.done(), "that sample is older than the lower limit"
    await node.sampled(uses(a=512))
    await start


async def test_a_start_without_its_memory_is_refused_with_the_name_of_the_holder() -> None:
    node = bursting()
    node.holds(T)
    start = await node.start(T)
    await node.sampled(uses(a=1200), times=3)
    with pytest.raises(Refusal) as refusal:
        await start
    assert str(refusal.value) == (
        "GPU 00000000 lacks 176 MiB of memory for the container: team/web (main) holds 688 MiB above its request; "
        "the kubelet tries again by itself"
    )
    assert limits(node) == {"a": 1200}
    with pytest.raises(Refusal, match="holds 688 MiB above its request"):
        await node.memory_watcher.bursts.make_room(T)  # at once, since no limit can allow more
    await node.sampled(uses(a=900))
    again = await node.start(T)
    await node.sampled(uses(a=900), times=3)
    await again


async def test_a_holder_within_the_tolerance_of_the_limit_prevents_no_start() -> None:
    """Its contexts need memory, too."""
    node = bursting()
    node.memory_watcher.apply(replace(rule(allowed=True), over_limit_slack_mebibytes=200))
    node.holds(T)
    for used, starts in ((712, True), (713, False)):
        await node.sampled(replace_used(uses(a=used), 1100), times=2)
        if starts:
            await node.memory_watcher.bursts.make_room(T)
            continue
        with pytest.raises(Refusal, match=r"lacks 76 MiB of memory .* team/web .main. holds 201 MiB above"):
            await node.memory_watcher.bursts.make_room(T)


def replace_used(sample: NodeSample, mebibytes: int) -> NodeSample:
    """With so much memory in use on GPU 0, also by processes outside of containers."""
    (gpu,) = sample.gpus.values()
    return NodeSample(gpus={gpu.uuid: replace(gpu, memory_used_bytes=mebibytes * MIB)})


async def test_a_start_that_has_a_part_of_its_memory_needs_the_rest() -> None:
    """The container was started again, and a process of its first start is still there."""
    node = bursting(A, T)
    await node.sampled(uses(a=1024, t=256), times=2)
    await node.memory_watcher.bursts.make_room(T)


async def test_a_holder_that_ended_after_the_last_sample_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    node = bursting()
    node.holds(T)

    async def end(**_: object) -> None:
        """While the sample is evaluated."""
        node.frees("a")

    start = await node.start(T)
    await node.sampled(uses(a=1200))
    monkeypatch.setattr(node.agent_state, "change_inventory", end)
    await node.sampled(uses(a=1200))
    await start


async def test_a_start_waits_for_nothing_where_nobody_bursts() -> None:
    node, other = bursting(limit=None), bursting(T)
    for each in (node, other):
        await each.sampled(uses(a=1, t=1))
        await each.sampled(uses(a=1, t=1))
    await node.memory_watcher.bursts.make_room(T)
    await other.memory_watcher.bursts.make_room(A)


async def test_what_an_earlier_agent_let_a_container_have_is_lowered_and_counted() -> None:
    """The annotation was removed while no agent ran: the former limit is in force until the first evaluation has ended."""
    node = bursting(A, T, limit=None)
    start = await node.start(T)
    await node.sampled(uses(a=600, t=0))
    assert (held(node), limits(node)["a"], start.done()) == ({GPU: 88}, 512, False)
    await node.sampled(uses(a=1536, t=0))
    assert (held(node), start.done()) == ({GPU: 1024}, True), "it grew before its limit was lowered"
    with pytest.raises(
        Refusal, match=r"lacks .* MiB of memory for the container: team/web .main. holds 1024 MiB above its request"
    ):
        await start


async def test_before_the_runtime_has_listed_the_containers_no_limit_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has restarted, and sets limits only of containers that it knows. A runtime that never answers prevents no start for which
    there is memory."""
    node = bursting(limit=None)
    containers, node.runtime.containers = node.runtime.containers, []
    node.runtime.answers.clear()
    node.set_timeout(0.01)
    await node.sampled(uses(a=512), times=3)
    with monkeypatch.context() as patch:
        patch.setattr("gpumgr.runtime.bursts._ROOM_SECONDS", 0.01)
        await node.memory_watcher.bursts.make_room(T)
        # The rest of the GPU: the container that is not listed uses all that it was granted.
        await node.memory_watcher.bursts.make_room(share("t", TRAIN, 0b11111100))
        await node.sampled(uses(a=1536))
        with pytest.raises(
            Refusal, match=r"team/web .main.: the container runtime has not listed it yet; the kubelet tries again"
        ):
            await node.memory_watcher.bursts.make_room(T)
        await node.sampled(uses(a=512))
    node.runtime.containers = containers
    node.runtime.answers.set()
    start = await node.start(T)
    for done in (False, True):
        await node.sampled(uses(a=512))
        assert start.done() is done
    await start


async def test_memory_above_the_ids_counts_though_the_setting_was_switched_off_with_the_restart() -> None:
    node = bursting(A, T, limit=None, allowed=False)
    start = await node.start(replace(T, id="new"))
    await start  # the first sample shows it
    await node.sampled(uses(a=1536, t=0))
    assert (held(node), limits(node)["a"]) == ({GPU: 1024}, 512)
    start = await node.start(T)
    assert not start.done(), "its former limit may be in force"
    await node.sampled(uses(a=1540, t=0))
    with pytest.raises(
        Refusal, match=r"lacks .* MiB of memory for the container: team/web .main. holds 1028 MiB above its request"
    ):
        await start
    other = bursting(A, T, limit=None, allowed=False)
    other.memory_watcher.apply(replace(rule(allowed=False), over_limit_slack_mebibytes=100))
    await other.sampled(uses(a=600, t=0))
    assert held(other) == {}, "the tolerance of the limit"


async def test_a_start_waits_for_the_limit_of_an_earlier_agent_though_the_setting_was_switched_off() -> None:
    """No sample was read yet, and the annotation is still there."""
    node = bursting(A, T, allowed=False)
    start = await node.start(replace(T, id="new"))
    for done in (False, True):
        assert start.done() is done
        await node.sampled(uses(a=100, t=0))
        await node.sampled(uses(a=100, t=0))
    await start


async def test_limits_that_are_not_lowered_in_time_refuse_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.runtime.bursts._ROOM_SECONDS", 0.01)
    with pytest.raises(Refusal, match="were not lowered"):
        await bursting().memory_watcher.bursts.make_room(T)


async def test_a_start_waits_until_the_limit_of_an_ended_burst_is_not_in_force() -> None:
    """The annotation is gone and the memory is free, but slow backends have not lowered the limit yet."""
    node = bursting()
    await node.sampled(uses(a=512), times=2)
    node.set_timeout(0.01)
    node.backends.ready.clear()
    demand(node, None)
    await node.sampled(uses(a=512))
    start = await node.start(T)
    await node.sampled(uses(a=512), times=2)
    assert not start.done()
    node.backends.ready.set()
    await node.sampled(uses(a=512), times=4)
    await start
    await node.memory_watcher.bursts.make_room(T)  # at once
