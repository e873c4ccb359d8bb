"""HAMi's annotation of the MIG devices of a pod, both ways."""

import msgspec
import pytest
from msgspec.structs import replace

from gpumgr.kube.hami_formats import (
    MigAllocation,
    Placed,
    allocation_of,
    decode_allocations,
    encode_allocations,
    slices_in,
)
from gpumgr.kube.pod_annotations import with_driver_ids
from gpumgr.ledger.ledger import MigDevice
from gpumgr.placement.mig import place_named
from tests.mig_profiles import H100

#: As HAMi's EncodeMigAllocations writes it, and its plugin when the device is there.
GOLDEN = '[{"containerIndex":1,"deviceIndex":0,"gpuUUID":"GPU-0fc3","profile":"2g.20gb","placement":{"start":0,"size":2}}]'
REALIZED = GOLDEN[:-2] + ',"migUUID":"MIG-5d1f","gpuInstanceID":0,"computeInstanceID":0}]'


def test_the_text_is_hamis() -> None:
    place = place_named(H100, "2g.20gb", 0)
    assert place is not None
    made = allocation_of("GPU-0fc3", place, container=1, device=0)
    assert made == MigAllocation(container=1, device=0, gpu="GPU-0fc3", profile="2g.20gb", placement=Placed(start=0, size=2))
    assert encode_allocations([made]) == GOLDEN
    assert list(decode_allocations(GOLDEN)) == [made]
    there = msgspec.structs.replace(made, mig_uuid="MIG-5d1f", gpu_instance=0, compute_instance=0)
    assert encode_allocations([there]) == REALIZED
    assert list(decode_allocations(REALIZED)) == [there]
    assert (list(decode_allocations("")), list(decode_allocations("[]"))) == ([], [])


def test_the_agent_adds_the_ids_of_the_device_at_the_place() -> None:
    device = MigDevice(gpu="0fc3", profile="2g.20gb", memory_slices=0b11, uuid="MIG-5d1f", gpu_instance=0, compute_instance=0)
    assert with_driver_ids(GOLDEN, [("GPU-0fc3", device)]) == REALIZED
    elsewhere = replace(device, memory_slices=0b1100)
    assert with_driver_ids(GOLDEN, [("GPU-0fc3", elsewhere), ("GPU-1", device)]) == GOLDEN
    assert slices_in(REALIZED) == {(1, 0): 0b11}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('"gpuUUID":"GPU-0fc3",', "", "missing required field"),
        ('"GPU-0fc3"', '""', "length >= 1"),
        ('"2g.20gb"', '""', "length >= 1"),
        ('"size":2', '"size":0', ">= 1"),
        ('"start":0', '"start":-1', ">= 0"),
        ('"start":0', '"start":32', "<= 31"),
        ('"containerIndex":1', '"containerIndex":-1', ">= 0"),
        ('"deviceIndex":0', '"deviceIndex":"0"', "Expected `int`"),
        (',"gpuInstanceID":0', "", "only a part"),
        (',"computeInstanceID":0', "", "only a part"),
        (',"migUUID":"MIG-5d1f"', "", "only a part"),
        ('"gpuInstanceID":0', '"gpuInstanceID":4294967296', "<= 4294967295"),
        ("[{", '[{"containerIndex":1,"deviceIndex":0,"gpuUUID":"b","profile":"7g","placement":{"start":0,"size":8}},{', "twice"),
        ("[{", "null{", "no MIG allocations"),
        ("[{", "[" * 100_000, "no MIG allocations"),
        ("GPU", "\ud800", "no MIG allocations"),
    ],
)
def test_what_hamis_plugin_refuses_is_refused(before: str, after: str, reason: str) -> None:
    assert before in REALIZED
    with pytest.raises(ValueError, match=reason):
        decode_allocations(REALIZED.replace(before, after))
