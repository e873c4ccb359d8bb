"""The Healthy ids of a node, as far as replicas change them. (The rest is tested with a kubelet.)"""

from gpumgr.common.units import Amounts
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node import GpuDevices, NodeView, node_devices
from gpumgr.placement.topology.devices import Topology

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
