"""Bursts: what a pod may demand, how far its containers may go now, and what that leaves for others."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts, Resource
from gpumgr.ledger.burst import ContainerMemory, GpuMemory, wanted_limits
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Request, candidates, choose
from gpumgr.ledger.ids import ALL_CORES, Masks, count
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node import node_devices
from gpumgr.ledger.replicas import choose_replicas
from gpumgr.placement.pods import PodView
from tests.unit.ledger.nodes import ONE as GPU
from tests.unit.ledger.nodes import TWO, app, caller, cards_of, empty, node_of, pod, replicas

GIB = 1 << 30
SHARE = Allocation(id="a", container="main", gpus={GPU: Amounts(30, 1024)})


def memory(request: int, limit: int, used: int | None) -> ContainerMemory:
    """In GiB."""
    return ContainerMemory(request_bytes=request * GIB, limit_bytes=limit * GIB, used_bytes=None if used is None else used * GIB)


def on_gpu(memories: list[ContainerMemory], free: int | None, granted: int) -> GpuMemory:
    """`free`, `granted`: in GiB."""
    containers = {str(number): each for number, each in enumerate(memories)}
    return GpuMemory(containers=containers, free_bytes=None if free is None else free * GIB, granted_bytes=granted * GIB)


@pytest.mark.parametrize(
    ("limits", "allocation", "why"),
    [
        ({"main": 1023}, SHARE, "1023 MiB for container main, less than the 1024 MiB that"),
        ({"main": 4097}, SHARE, "4097 MiB for container main, and GPU 00000000 has only 4096 MiB"),
        ({"main": 2048}, replace(SHARE, limits={GPU: Amounts(30, 2048)}), "granted more than once"),
    ],
)
def test_a_limit_that_can_not_be(limits: dict[str, int], allocation: Allocation, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        wanted(allocation, limits)


@pytest.mark.parametrize(
    ("limits", "expected"), [({"main": 1024}, 1024), ({"main": 4096}, 4096), ({"other": 9}, None), ({}, None)]
)
def test_a_limit_is_one_of_its_own_container(limits: dict[str, int], expected: int | None) -> None:
    assert wanted(SHARE, limits) == ({} if expected is None else {GPU: expected})


def wanted(allocation: Allocation, limits: dict[str, int]) -> Mapping[str, int]:
    view = PodView(namespace="team", name="p", uid="u", memory_limits=tuple(limits.items()))
    return wanted_limits(allocation, view, (), {GPU: 4096}, obstacle=None, most_mebibytes=0)


@pytest.mark.parametrize(
    ("memories", "free", "granted", "limits"),
    [
        # Alone: as far as its limit, or the GPU, goes.
        ([memory(4, 12, 0)], 16, 4, [12]),
        ([memory(4, 12, 3)], 5, 4, [8]),
        ([memory(4, 12, 9)], 0, 4, [9]),
        # What others were granted and do not use yet is kept for them.
        ([memory(4, 16, 4), memory(8, 8, 0)], 12, 12, [8, 8]),
        ([memory(4, 16, 4), memory(8, 8, 8)], 4, 12, [8, 8]),
        ([memory(4, 16, 6), memory(8, 8, 8)], 1, 12, [7, 8]),
        # Two that burst: each may take what is left.
        ([memory(2, 16, 4), memory(2, 16, 2)], 4, 4, [8, 6]),
        # A reservation without a container yet.
        ([memory(4, 16, 4)], 12, 10, [10]),
        # Use that is not known counts as none, and the free memory does not have it.
        ([memory(4, 16, None)], 10, 4, [10]),
        # The GPU's memory is not known: no burst.
        ([memory(4, 16, 4)], None, 4, [4]),
    ],
)
def test_how_far_containers_may_go_now(
    memories: list[ContainerMemory], free: int | None, granted: int, limits: list[int]
) -> None:
    now = on_gpu(memories, free, granted).limits(starting=False)
    assert [size / GIB for size in now.values()] == limits


def test_while_a_container_starts_nobody_gets_more_than_it_uses_or_requests() -> None:
    memories = {
        "a": memory(4, 16, 6),
        "b": memory(4, 16, 1),
        "c": ContainerMemory(request_bytes=GIB, limit_bytes=4 * GIB, used_bytes=GIB + 1),
    }
    now = GpuMemory(containers=memories, free_bytes=9 * GIB, granted_bytes=9 * GIB).limits(starting=True)
    assert now == {"a": 6 * GIB, "b": 4 * GIB, "c": GIB + (1 << 20)}


@pytest.mark.parametrize(
    ("memories", "free", "granted", "need", "missing"),
    [
        ([memory(4, 16, 8)], 4, 4, 4, 0),
        ([memory(4, 16, 9), memory(1, 16, 3)], 3, 5, 4, 1),
        # What others were granted is not left for it.
        ([memory(4, 16, 8), memory(2, 2, 1)], 4, 6, 4, 1),
        ([memory(2, 2, None)], 8, 4, 4, 0),
        ([memory(2, 2, None)], 8, 5, 4, 1),
        # Its own init container had the same memory, and so had another pod's.
        ([memory(4, 16, 8), memory(4, 4, None)], 4, 4, 4, 0),
        ([memory(4, 16, 8), memory(2, 2, 2), memory(2, 2, None)], 4, 6, 4, 0),
        ([], 1, 0, 4, 3),
        ([memory(2, 2, None)], 1, 9, 4, 4),
    ],
)
def test_what_the_gpu_lacks_for_another_container(
    memories: list[ContainerMemory], free: int, granted: int, need: int, missing: int
) -> None:
    assert on_gpu(memories, free, granted).missing_bytes(need * GIB, need * GIB) == missing * GIB


@pytest.mark.parametrize(
    ("need", "guaranteed", "free", "unused", "missing"),
    [(6, 2, 6, 4, 0), (6, 2, 5, 0, 1), (0, 4, 3, 0, 1), (6, 3, 6, 4, 1)],
)
def test_only_a_part_of_oversubscribed_memory_is_guaranteed(
    need: int, guaranteed: int, free: int, unused: int, missing: int
) -> None:
    gpu = on_gpu([], free, unused)
    assert gpu.missing_bytes(need * GIB, guaranteed * GIB) == missing * GIB


def test_what_others_may_take_is_missing_too() -> None:
    assert on_gpu([memory(4, 16, 8)], 6, 4).missing_bytes(4 * GIB, 4 * GIB, 3 * GIB) == 1 * GIB
    assert on_gpu([memory(4, 16, 8)], None, 4).missing_bytes(4 * GIB, 4 * GIB, 3 * GIB) == 3 * GIB
    assert on_gpu([memory(4, 16, 8)], None, 4).missing_bytes(4 * GIB, 4 * GIB) == 0


@pytest.mark.parametrize(("mebibytes", "closed"), [(0, 0), (1, 1), (256, 1), (257, 2), (4096, 14)])
def test_what_a_burst_holds_closes_free_ids(mebibytes: int, closed: int) -> None:
    ledger = Ledger(cards_of([16]))
    ids: dict[Resource, Masks] = {"core": {GPU: 0b1}, "memory": {GPU: 0b11}}
    ledger = ledger.occupy(Allocation(id="a").with_ids(ledger.gpu_registry, ids, [GPU]))
    node = replace(node_of(ledger.gpu_registry), burst_mebibytes={GPU: mebibytes} if mebibytes else {})
    (devices,) = node_devices(ledger, node, failed=())
    assert devices.healthy_blocks.bit_count() == 16 - closed
    assert devices.healthy_blocks & 0b11 == 0b11, "ids in use stay"
    assert devices.healthy_cores.bit_count() == 100, "a burst has memory only"
    assert candidates(node, ledger)[0].memory_mebibytes_free == max(0, 14 * 256 - mebibytes)


def test_what_a_burst_holds_is_not_granted() -> None:
    """The kubelet may still offer ids that have just closed."""
    ledger = empty([16, 16])
    node = replace(node_of(ledger.gpu_registry), burst_mebibytes={GPU: 15 * 256})
    request = Request(resource="core", available=dict.fromkeys((GPU, TWO), ALL_CORES), must={}, size=10)
    choice = choose(node, ledger, caller(pod("p", app(10, 2))), request)
    assert ([*choice.masks], count(choice.masks)) == ([TWO], 10)


def test_replicas_are_chosen_and_offered_without_what_a_burst_holds() -> None:
    """A GPU of 4096 MiB: 1024 are granted by amount, and a burst holds 1000 or 3072 more."""
    ledger = empty([16])
    ledger = ledger.occupy(Allocation(id="a", pod=("team", "a"), gpus={GPU: Amounts(10, 1024)}, device_ids={"replica": {GPU: 1}}))
    free = node_of(ledger.gpu_registry)
    node = replace(free, burst_mebibytes={GPU: 1000})
    assert choose_replicas(node, ledger, replica(2072), FREE_REPLICAS).masks.keys() == {GPU}
    assert choose_replicas(free, ledger, replica(2073), FREE_REPLICAS).masks.keys() == {GPU}
    with pytest.raises(Refusal, match=r"3072 MiB left \(1000 MiB of it are in use by containers above their requests\)"):
        choose_replicas(node, ledger, replica(2073), FREE_REPLICAS)
    for burst, offered in ((3071, 10), (3072, 1)):
        (devices,) = node_devices(ledger, replace(free, burst_mebibytes={GPU: burst}), failed=(), replicas=10)
        assert devices.healthy_replicas.bit_count() == offered


FREE_REPLICAS = Request(resource="replica", available={GPU: 0b11_1111_1110}, must={}, size=1)


def replica(mebibytes: int) -> Caller:
    return caller(pod("p", replicas(cores=10, memory_mebibytes=mebibytes)))
