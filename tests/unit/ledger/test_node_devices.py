"""The Healthy ids of a node, as far as replicas change them. (The rest is tested with a kubelet.)"""

import pytest

from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Request
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node import GpuDevices, NodeView, node_devices
from gpumgr.ledger.replicas import choose_replicas, grant_replicas
from gpumgr.placement.devices import Level, Topology

from .nodes import caller, gpu_of, pod, replicas

UUID = "GPU-0000000a-0000-0000-0000-000000000000"
GPU = "0000000a"


def devices(*allocations: Allocation, replicas: int, failed: bool = False, cordoned: bool = False) -> GpuDevices:
    ledger = Ledger(GpuRegistry().register(UUID, 1000, 10), {a.id: a for a in allocations})
    (found,) = node_devices(
        ledger,
        NodeView(topology=Topology((), ()), unschedulable={GPU: "closed"} if failed or cordoned else {}),
        failed=[GPU] * failed,
        replicas=replicas,
    )
    return found


def held(number: int, cores: int, mebibytes: int) -> Allocation:
    return Allocation(id=str(number), gpus={GPU: Amounts(cores, mebibytes)}, device_ids={"replica": {GPU: 1 << number}})


def test_fewer_replicas_than_before_leave_those_that_are_held() -> None:
    assert devices(held(7, 10, 100), replicas=3).healthy_replicas == 0b1000_0111


def test_without_cores_or_memory_only_held_replicas_are_healthy() -> None:
    assert devices(held(0, 100, 1000), replicas=10).healthy_replicas == 1
    assert devices(held(0, 0, 1000), replicas=10).healthy_replicas == 1
    assert devices(held(0, 0, 999), replicas=10).healthy_replicas == 0b11_1111_1111


def test_a_failed_gpu_has_none_and_a_cordoned_one_those_that_are_held() -> None:
    assert devices(held(2, 1, 1), replicas=10, failed=True).healthy_replicas == 0
    assert devices(held(2, 1, 1), replicas=10, cordoned=True).healthy_replicas == 0b100


def test_blocks_are_what_is_left_to_the_mebibyte() -> None:
    """1000 MiB are 3 blocks and 232 MiB in none."""
    assert [devices(held(0, 0, size), replicas=10).healthy_blocks.bit_count() for size in (232, 233, 488, 489)] == [3, 2, 2, 1]


def percent(percentage: int) -> Caller:
    return caller(pod("p", replicas(memory_percent=percentage)))


def test_replicas_count_with_the_memory_that_a_gpu_has_now() -> None:
    """ECC was turned on: 900 of the 1000 MiB are left. A container has 100 MiB of them or 850 MiB, or 900, so that none is left."""
    shown = gpu_of(memory_bytes=900 << 20)
    node = NodeView(topology=Topology(((Level.PSB,),), ((0,),)), rows={GPU: 0}, shown={GPU: shown})
    request = Request(resource="replica", available={GPU: 0b10}, must={}, size=1)
    for size, offered, fits in ((100, 10, True), (850, 10, False), (900, 1, False)):
        ledger = Ledger(GpuRegistry().register(UUID, 1000, 10), {"0": held(0, 10, size)})
        (found,) = node_devices(ledger, node, failed=(), replicas=10)
        assert found.healthy_replicas.bit_count() == offered
        if fits:
            assert choose_replicas(node, ledger, percent(50), request).masks == {GPU: 0b10}
            a = grant_replicas(node, ledger, percent(50), {GPU: 0b10}, new_id="a", now=0.0, why="test")
            assert a.gpus[GPU].memory_mebibytes == 450
            continue
        with pytest.raises(Refusal, match=f"has 90 cores and {900 - size} MiB left, and 0 cores and 450 MiB are needed"):
            choose_replicas(node, ledger, percent(50), request)
        with pytest.raises(Refusal, match="450 MiB are needed"):
            grant_replicas(node, ledger, percent(50), {GPU: 0b10}, new_id="a", now=0.0, why="test")
