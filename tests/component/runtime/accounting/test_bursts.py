"""Bursts: the limits that reach the mechanisms, what counts as used, and starts of other containers. The rules are tested in
tests/unit/ledger/test_burst.py."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.ledger.ledger import Allocation, ClaimRequest
from gpumgr.placement.devices import NodeSample
from gpumgr.placement.pods import ClaimUse, PodView
from tests.unit.ledger.samples import MIB

from .node import GPU, TRAIN, WEB, Node, breathe, impatient, node_of, share, uses

#: 2 and 4 of the 8 blocks of GPU 0.
A, T = share("a", 0b11), share("t", 0b111100)


def bursting(*allocations: Allocation, limit: int | None = 1792, **settings: Any) -> Node:
    """The pod of the allocation `a` demands this limit in MiB."""
    node = node_of(*(allocations or (A,)), **{"memory_burst": True, **settings})
    node.demands("a", limit=limit)
    return node


def held(node: Node) -> Mapping[str, int]:
    return node.agent_state.inventory.burst_mebibytes


async def test_the_limit_of_a_burst_reaches_the_mechanisms_and_what_it_holds_counts_as_used() -> None:
    node = bursting()
    await node.sampled(uses(a=100))
    assert (node.limits, held(node)) == ({"a": 1792}, {})
    await node.sampled(uses(a=1300))
    assert (node.limits, held(node)) == ({"a": 1792}, {GPU: 1300 - 512})
    assert not node.memory_watcher.over
    use = node.use.containers["a", GPU]
    assert (use.memory_request_bytes, use.memory_limit_bytes) == (512 * MIB, 1792 * MIB)
    assert not node.told
    await node.sampled(uses(a=1793))
    assert node.memory_watcher.over == {("a", GPU)}


async def test_memory_that_others_were_granted_is_left_to_them() -> None:
    node = bursting(A, T)
    await node.sampled(uses(a=1024, t=1024))
    assert (node.limits, held(node)) == ({"a": 1024, "t": 1024}, {GPU: 512})
    node.frees("t")
    await node.sampled(uses(a=1024))
    assert node.limits == {"a": 1792}


async def test_the_annotation_counts_while_the_container_runs_and_so_does_the_setting() -> None:
    node = bursting(limit=None)
    await node.sampled(uses(a=1))
    assert node.limits == {"a": 512}
    node.demands("a", limit=1024)
    await node.sampled(uses(a=1024))
    assert node.limits == {"a": 1024}
    node.apply(memory_burst=False)
    await node.sampled(uses(a=1024))
    assert (node.limits, held(node)) == ({"a": 512}, {GPU: 512}), "it still holds that memory"
    node.demands("a")
    for used, burst in ((700, {GPU: 188}), (512, {}), (700, {})):  # at last above its limit, which is no burst
        await node.sampled(uses(a=used))
        assert held(node) == burst


def ignored() -> Node:
    node = bursting()
    node.demands("a", memory_limits_ignored="it is no JSON")
    return node


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (lambda: bursting(memory_burst=False), "enforcement.memory_burst is off"),
        (lambda: bursting(limit=2049), "2049 MiB for container main, and GPU 00000000 has only 2048 MiB"),
        (ignored, "it is no JSON"),
        (lambda: bursting(share("a", 0b11, mechanism="vcuda")), "the backend vcuda can't"),
        (
            lambda: bursting(max_growth_memory_mebibytes=1279),
            "the pod could have 1280 MiB above its requests, and this node allows 1279",
        ),
    ],
)
async def test_a_limit_that_is_not_used_is_reported_once_and_the_request_is_enforced(node: Callable[[], Node], why: str) -> None:
    made = node()
    for used in (512, 512, 513, 513, 513):
        await made.sampled(uses(a=used))
    (reason,) = made.events("GpuMemoryLimitIgnored")
    assert reason.startswith("the annotation gpumgr.io/memory-limit is not used, and the request stays the limit: ")
    assert why in reason
    assert (made.limits, held(made)) == ({"a": 512}, {})
    assert made.memory_watcher.over == {("a", GPU)}
    await made.make_room(T)  # at once


async def test_containers_that_share_a_claim_have_the_highest_of_their_limits() -> None:
    shared = replace(A, claim=ClaimRequest(uid="u", namespace="team", name="c", request="gpu"))
    node = bursting(shared, max_growth_memory_mebibytes=1024)
    asked = {WEB: {"main": 1024, "side": 1280, "third": 1100}, TRAIN: {"main": 2000, "free": 2048}}
    for (namespace, name), sizes in asked.items():
        used = tuple(ClaimUse(container=each, claim="c" if each != "free" else "other") for each in sizes)
        uid = "uid-a" if name == "web" else "uid-t"
        node.pods.views[namespace, name] = PodView(
            namespace=namespace, name=name, uid=uid, claims=used, memory_limits=tuple(sizes.items())
        )
    await node.sampled(uses(a=513), times=3)
    assert node.limits == {"a": 1280}
    (entry,) = node.told
    assert (entry.pod, entry.pod_uid, entry.container) == (TRAIN, "uid-t", "main")
    assert "could have 1488 MiB above its requests, and this node allows 1024" in entry.why
    del node.pods.views[WEB]  # the first one ends
    node.apply(max_growth_memory_mebibytes=0)
    await node.sampled(uses(a=513))
    assert node.limits == {"a": 2000}


async def test_what_a_container_holds_counts_until_its_pod_is_known() -> None:
    """The agent has restarted, and the API server does not answer yet."""
    node = bursting()
    view = node.pods.views.pop(WEB)
    await node.sampled(uses(a=1024))
    assert (node.limits, held(node)) == ({"a": 1024}, {GPU: 512})
    assert not node.memory_watcher.over, "nor is its pod evicted"
    node.pods.views[WEB] = view
    await node.sampled(uses(a=1024))
    assert (node.limits, held(node)) == ({"a": 1792}, {GPU: 512})
    other = bursting(memory_burst=False)
    other.pods.views.clear()
    await other.sampled(uses(a=1024))
    assert held(other) == {GPU: 512}, "the setting may have been on before the restart"


async def test_before_a_container_starts_others_get_no_more_than_they_use() -> None:
    node = bursting()
    await node.sampled(uses(a=1024))
    start = await node.start(T)
    await node.sampled(uses(a=1024))
    assert node.limits == {"a": 1024}
    assert not start.done(), "that sample is older than the lower limit"
    await node.sampled(uses(a=1024))
    await start
    node.holds(T)
    await node.sampled(uses(a=1024))
    assert node.limits == {"a": 1024}, "the rest is granted"


async def test_a_sample_from_before_slow_backends_lowered_the_limits_does_not_count() -> None:
    node = bursting()
    await node.sampled(uses(a=512))
    node.set_timeout(0.05)
    node.backends.ready.clear()
    start = await node.start(T)
    await node.sampled(uses(a=512))
    node.backends.ready.set()
    await breathe()
    assert node.limits == {"a": 512}, "now, after the sample that the next evaluation may have"
    node.backends.ready.clear()
    await node.sampled(uses(a=512))
    assert not start.done()
    node.backends.ready.set()
    await node.sampled(uses(a=1200))
    assert start.done()
    with pytest.raises(Refusal, match=r"team/web \(main\) holds 688 MiB above its request"):
        await start


async def test_a_start_waits_for_a_limit_that_the_driver_refuses_and_is_refused_with_its_reason() -> None:
    node = bursting()
    late = "the memory limits of other containers on GPU 00000000 were not lowered within 0.01 s"
    assert await node.refusal(T) == f"{late}; the kubelet tries again by itself"
    node.backends.obstacles = {"a": "the driver reports 0/1792 MiB", "t": "no other container"}
    await node.sampled(uses(a=512))
    start = await node.start(T)
    for _ in range(3):
        await node.sampled(uses(a=512))
        assert not start.done()
    why = "team/web (main): the driver reports 0/1792 MiB"
    assert await node.refusal(T) == f"{late}: {why}; the kubelet tries again by itself"
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
    assert node.limits == {"a": 1200}
    assert await node.refusal(T) == str(refusal.value), "at once, since no limit can allow more"
    await node.sampled(uses(a=900))
    again = await node.start(T)
    await node.sampled(uses(a=900), times=3)
    await again


async def test_a_holder_within_the_tolerance_of_the_limit_prevents_no_start() -> None:
    """Its contexts need memory, too."""
    node = bursting(over_limit_slack_mebibytes=200)
    node.holds(T)
    await node.sampled(replace_used(uses(a=712), 1100), times=2)
    await node.make_room(T)
    await node.sampled(replace_used(uses(a=713), 1100), times=2)
    assert "lacks 76 MiB of memory for the container: team/web (main) holds 201 MiB above" in await node.refusal(T)


def replace_used(sample: NodeSample, mebibytes: int) -> NodeSample:
    """With so much memory in use on GPU 0, also by processes outside of containers."""
    (gpu,) = sample.gpus.values()
    return NodeSample(gpus={gpu.uuid: replace(gpu, memory_used_bytes=mebibytes * MIB)})


async def test_a_start_that_has_a_part_of_its_memory_needs_the_rest() -> None:
    """The container was started again, and a process of its first start is still there."""
    node = bursting(A, T)
    await node.sampled(uses(a=1024, t=256), times=2)
    await node.make_room(T)


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
    node, other = bursting(limit=None), bursting(T, limit=None)
    for each in (node, other):
        await each.sampled(uses(a=1, t=1), times=2)
    await node.make_room(T)
    await other.make_room(A)


async def test_after_a_restart_a_start_waits_for_nothing_where_nobody_was_resized_or_could_burst() -> None:
    for node in (node_of(A), bursting(share("a", 0b11, mechanism="vcuda"))):
        await node.make_room(T)


async def test_what_an_earlier_agent_let_a_container_have_is_lowered_and_counted() -> None:
    """The annotation was removed while no agent ran: the former limit is in force until the first evaluation has ended."""
    node = bursting(A, T, limit=None)
    start = await node.start(T)
    await node.sampled(uses(a=600, t=0))
    assert (held(node), node.limits["a"], start.done()) == ({GPU: 88}, 512, False)
    await node.sampled(uses(a=1536, t=0))
    assert (held(node), start.done()) == ({GPU: 1024}, True), "it grew before its limit was lowered"
    with pytest.raises(Refusal, match=r"team/web .main. holds 1024 MiB above its request"):
        await start


async def test_before_the_runtime_has_listed_the_containers_no_limit_is_in_force() -> None:
    """The agent has restarted, and sets limits only of containers that it knows. A runtime that never answers prevents no start for which
    there is memory."""
    node = bursting(limit=None)
    containers, node.runtime.containers = node.runtime.containers, []
    node.runtime.answers.clear()
    node.set_timeout(0.01)
    await node.sampled(uses(a=512), times=3)
    with impatient():
        await node.make_room(T)
        # The rest of the GPU: the container that is not listed uses all that it was granted.
        await node.make_room(share("t", 0b11111100))
    await node.sampled(uses(a=1536))
    assert "team/web (main): the container runtime has not listed it yet; the kubelet tries again" in await node.refusal(T)
    await node.sampled(uses(a=512))
    node.runtime.containers = containers
    node.runtime.answers.set()
    await node.starts_with_sample(2, T, uses(a=512))


async def test_memory_above_the_ids_counts_though_the_setting_was_switched_off_with_the_restart() -> None:
    node = bursting(A, T, limit=None, memory_burst=False)
    await node.make_room(replace(T, id="new"))  # the first sample shows it
    await node.sampled(uses(a=1536, t=0))
    assert (held(node), node.limits["a"]) == ({GPU: 1024}, 512)
    start = await node.start(T)
    assert not start.done(), "its former limit may be in force"
    await node.sampled(uses(a=1540, t=0))
    with pytest.raises(Refusal, match=r"team/web .main. holds 1028 MiB above its request"):
        await start
    other = bursting(A, T, limit=None, memory_burst=False, over_limit_slack_mebibytes=100)
    await other.sampled(uses(a=600, t=0))
    assert held(other) == {}, "the tolerance of the limit"


async def test_a_start_waits_for_the_limit_of_an_earlier_agent_though_the_setting_was_switched_off() -> None:
    """No sample was read yet, and the annotation is still there."""
    node = bursting(A, T, memory_burst=False)
    await node.starts_with_sample(2, replace(T, id="new"), uses(a=100, t=0))


async def test_a_start_waits_until_the_limit_of_an_ended_burst_is_not_in_force() -> None:
    """The annotation is gone and the memory is free, but slow backends have not lowered the limit yet."""
    node = bursting()
    await node.sampled(uses(a=512), times=2)
    node.set_timeout(0.01)
    node.backends.ready.clear()
    node.demands("a")
    await node.sampled(uses(a=512))
    start = await node.start(T)
    await node.sampled(uses(a=512), times=2)
    assert not start.done()
    node.backends.ready.set()
    await node.sampled(uses(a=512), times=4)
    await start
    await node.make_room(T)  # at once
