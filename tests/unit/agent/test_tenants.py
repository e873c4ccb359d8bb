"""What enforcement gets of an allocation."""

from msgspec.structs import replace

from gpumgr.agent.container_starts import others_on_gpus, tenant_of
from gpumgr.common.units import Amounts
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import Allocation, ClaimRequest, Ledger
from gpumgr.placement.pods import ContainerSpec, PodView
from tests.unit.web.metrics.pictures import name_of, uuid_of, view_of

FIRST, SECOND = name_of(0), name_of(1)
PARTS = Allocation(id="a", gpus={SECOND: Amounts(20, 512), FIRST: Amounts(70, 256)}, mechanisms=("hami-core",))
VIEW = view_of()
WATCH = ClaimRequest(namespace="team", name="watch", uid="c", request="gpu", admin=True)
SHOWN = VIEW.inventory.gpus(VIEW.ledger.gpu_registry)


def tenant(allocation: Allocation) -> GpuShare | None:
    return tenant_of(allocation, VIEW.ledger.gpu_registry, SHOWN, None)


def test_a_share_has_the_amounts_of_each_gpu_in_the_order_of_the_bus_ids() -> None:
    share = tenant(PARTS)
    assert share is not None
    assert [(gpu.uuid, gpu.bus_id, gpu.cores, gpu.memory_bytes >> 20) for gpu in share.gpus] == [
        (uuid_of(0), "0000:00:00.0", 70, 256),
        (uuid_of(1), "0000:01:00.0", 20, 512),
    ]


def test_the_priority_is_that_of_the_container() -> None:
    containers = (ContainerSpec(name="other", priority=5), ContainerSpec(name="main", priority=0))
    view = PodView(namespace="team", name="p", uid="u", containers=containers)
    for container, priority in (("main", 0), ("gone", 1), (None, 1)):
        found = tenant_of(replace(PARTS, container=container), VIEW.ledger.gpu_registry, SHOWN, view)
        assert found is not None
        assert found.priority == priority
    unknown = tenant(PARTS)
    assert unknown is not None
    assert unknown.priority == 1


def test_a_whole_gpu_beside_a_part_of_another_is_not_limited() -> None:
    share = tenant(replace(PARTS, gpus={FIRST: Amounts(100, 2048), SECOND: Amounts(20, 512)}))
    assert share is not None
    assert [gpu.whole for gpu in share.gpus] == [True, False]


def test_whole_gpus_only_and_gpu_managers_records_are_no_tenants() -> None:
    assert tenant(replace(PARTS, gpus={FIRST: Amounts(100, 2048), SECOND: Amounts(100, 2048)})) is None
    assert tenant(replace(PARTS, anonymous=True)) is None
    assert tenant(replace(PARTS, gpus={})) is None


def test_a_container_that_another_program_admitted_is_a_neighbour_without_mechanisms() -> None:
    mine = Allocation(id="m", gpus={FIRST: Amounts(20, 256)}, mechanisms=("mps",), pod=("team", "new"))
    share = tenant(mine)
    assert share is not None
    others = [
        replace(mine, id="a", pod=("team", "old"), mechanisms=(), anonymous=True),
        replace(mine, id="h", pod=("team", "of-hami"), mechanisms=()),
        replace(mine, id="n", pod=("team", "next")),
        replace(mine, id="i", init=True),
        replace(mine, id="w", pod=None, mechanisms=(), claim=WATCH),
        replace(mine, id="e", gpus={SECOND: Amounts(20, 256)}, pod=("team", "elsewhere")),
    ]
    ledger = Ledger(VIEW.ledger.gpu_registry)
    for each in (mine, *others):
        ledger = ledger.occupy(each)
    assert list(others_on_gpus(ledger, share)) == [("team/old", ("none",)), ("team/of-hami", ("none",)), ("team/next", ("mps",))]
