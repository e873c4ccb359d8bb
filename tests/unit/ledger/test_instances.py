"""MIG devices: what is offered, choice, grant and the answer."""

import pytest
from msgspec.structs import replace

from gpumgr.agent.inventory import HardwareHealth, Inventory
from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts
from gpumgr.ledger.callers import UNKNOWN_CALLER
from gpumgr.ledger.choose import Request
from gpumgr.ledger.instances import choose_instances, grant_instances, obstacle_of_single, offered_instances, resource_of
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.quarantine import Quarantine
from gpumgr.placement.devices import Gpu, MigInstance, NodeSnapshot, Topology

from .nodes import gpu_of


def mig(uuid: str, profile: str = "1g.10gb", number: int = 1) -> MigInstance:
    return MigInstance(uuid=uuid, profile=profile, gpu_instance=number, compute_instance=0, memory_bytes=9 << 30)


def gpu(index: int, *instances: MigInstance, enabled: bool = True) -> Gpu:
    return gpu_of(index, mig_enabled=enabled, mig_instances=instances)


GPUS = (gpu(0, mig("MIG-a"), mig("MIG-b")), gpu(1, mig("MIG-c")))


def inventory_of(*gpus: Gpu) -> Inventory:
    levels = tuple((0,) * len(gpus) for _ in gpus)
    return Inventory(snapshot=NodeSnapshot(gpus=gpus, topology=Topology((), levels)), mig_strategy="mixed")


def node_of(inventory: Inventory) -> tuple[Inventory, Ledger]:
    return inventory, Ledger(inventory.register(Ledger().gpu_registry))


def grant(node: tuple[Inventory, Ledger], *uuids: str) -> Allocation:
    inventory, ledger = node
    view = inventory.view(ledger.gpu_registry)
    masks = ledger.gpu_registry.parse("mig", uuids)
    return grant_instances(view, ledger, UNKNOWN_CALLER, masks, new_id="new", now=1.0)


def healthy(inventory: Inventory, ledger: Ledger) -> list[int]:
    return [each.healthy_instances for each in inventory.node_devices(ledger, ())]


def test_a_resource_is_named_after_the_profile_as_in_nvidias_plugin() -> None:
    assert [resource_of(name) for name in ("1g.10gb", "1g.10gb+me", "1c.3g.40gb")] == [
        "nvidia.com/mig-1g.10gb",
        "nvidia.com/mig-1g.10gb.me",
        "nvidia.com/mig-1c.3g.40gb",
    ]


@pytest.mark.parametrize(
    ("gpus", "obstacle"),
    [
        ((gpu(0, enabled=False), gpu(1, enabled=False)), None),
        (GPUS, None),
        ((GPUS[0], gpu(1, enabled=False)), "GPU1 has no MIG devices"),
        ((GPUS[0], gpu(1, mig("MIG-c", "2g.20gb"))), "must have the same profile, and have 1g.10gb, 2g.20gb"),
    ],
)
def test_single_needs_equal_mig_devices_on_all_gpus(gpus: tuple[Gpu, ...], obstacle: str | None) -> None:
    found = obstacle_of_single(gpus)
    assert (obstacle or "") in (found or "")
    assert (obstacle is None) == (found is None)
    assert bool(obstacle) == (offered_instances(gpus, "single") == {})
    assert offered_instances(gpus, "none") == {}


def test_compute_instances_count_their_part_of_the_memory_that_they_share() -> None:
    (found,) = offered_instances([gpu(0, mig("MIG-a", "1c.3g.40gb"), mig("MIG-b", "3g.40gb"))], "mixed").values()
    assert [each.memory_mebibytes for each in found] == [3072, 9216]


def test_free_mig_devices_are_chosen_and_one_has_one_holder() -> None:
    inventory, ledger = node_of(inventory_of(*GPUS))
    first = grant((inventory, ledger), "MIG-a")
    assert (first.gpus, first.why) == ({"00000000": Amounts(0, 9216)}, "MIG 1g.10gb MIG-a")
    ledger = ledger.occupy(first).check()
    everything = ledger.gpu_registry.parse("mig", ["MIG-a", "MIG-b", "MIG-c"])
    request = Request(resource="mig", available=everything, must={}, size=2)
    assert ledger.gpu_registry.format("mig", choose_instances(ledger, request).masks) == ["MIG-b", "MIG-c"]
    must = replace(request, must=ledger.gpu_registry.parse("mig", ["MIG-c"]))
    assert ledger.gpu_registry.format("mig", choose_instances(ledger, must).masks) == ["MIG-b", "MIG-c"]
    with pytest.raises(Refusal, match="3 MIG devices requested, and 2 of this profile are free"):
        choose_instances(ledger, replace(request, size=3))
    with pytest.raises(Refusal, match="still holds"):
        grant((inventory, ledger), "MIG-a")


def test_a_destroyed_mig_device_is_unhealthy_and_keeps_its_holder_and_its_place() -> None:
    inventory, ledger = node_of(inventory_of(*GPUS))
    ledger = ledger.occupy(grant((inventory, ledger), "MIG-a"))
    inventory = inventory_of(gpu(0, mig("MIG-new"), mig("MIG-b")), GPUS[1])
    ledger = ledger.with_gpu_registry(inventory.register(ledger.gpu_registry)).check()
    assert ledger.gpu_registry.ids["mig"]["00000000"] == ("MIG-a", "MIG-b", "MIG-new")
    assert healthy(inventory, ledger) == [0b110, 0b1]
    assert ledger.gpu_registry.format("mig", ledger.held("mig")) == ["MIG-a"]
    with pytest.raises(Refusal, match=r"GPU0 \(00000000\) no longer has the MIG device MIG-a"):
        grant((inventory, ledger.free(["new"])), "MIG-a")


def test_a_mig_device_with_a_fault_of_its_own_is_unhealthy_alone() -> None:
    inventory, ledger = node_of(inventory_of(*GPUS))
    inventory = replace(inventory, health=HardwareHealth(failed={"MIG-a": "XID 95"}))
    assert healthy(inventory, ledger) == [0b10, 0b1]
    with pytest.raises(Refusal, match=r"the MIG device MIG-a of GPU0 \(00000000\) can't be granted: XID 95"):
        grant((inventory, ledger), "MIG-a")
    grant((inventory, ledger), "MIG-b")


def test_the_mode_alone_does_not_close_a_gpu_and_a_fault_or_a_cordon_does() -> None:
    inventory, ledger = node_of(inventory_of(*GPUS))
    ledger = ledger.occupy(grant((inventory, ledger), "MIG-a"))
    uuid = GPUS[0].uuid
    in_mode = replace(inventory, health=HardwareHealth(cordoned={uuid: "MIG is enabled"}, in_mig_mode=[uuid]))
    assert healthy(in_mode, ledger) == [0b11, 0b1]
    assert grant((in_mode, ledger), "MIG-b").gpus
    quarantined = replace(in_mode, quarantine=Quarantine(held={"00000000": frozenset({(7, 1)})}))
    assert healthy(quarantined, ledger) == [0b01, 0b1]
    with pytest.raises(Refusal, match=r"the MIG devices of GPU0 .* can't be granted: in quarantine: .* \(pid 7\)"):
        grant((quarantined, ledger), "MIG-b")
    cordoned = replace(inventory, health=HardwareHealth(cordoned={uuid: "an operator"}))
    assert healthy(cordoned, ledger) == [0b01, 0b1]
    failed = replace(in_mode, health=replace(in_mode.health, failed={uuid: "its device node is missing"}))
    assert healthy(failed, ledger) == [0, 0b1]
    with pytest.raises(Refusal, match=r"the MIG devices of GPU0 .* can't be granted: its device node is missing"):
        grant((failed, ledger), "MIG-b")
    for each in (cordoned, replace(cordoned, quarantine=quarantined.quarantine)):
        with pytest.raises(Refusal, match=r"the MIG devices of GPU0 .* can't be granted: an operator"):
            grant((each, ledger), "MIG-b")
