"""The text of both annotations, and what their readers refuse."""

import msgspec
import pytest

from gpumgr.common.units import Amounts
from gpumgr.kube.cluster_annotations import (
    MAX_ANNOTATIONS_BYTES,
    Inventory,
    InventoryGpu,
    Placement,
    Share,
    decode_inventory,
    decode_placement,
    encode,
    mig_rows,
)
from gpumgr.placement.devices import score_matrix
from tests.mig_profiles import H100
from tests.topologies import topology_from_matrix

TOPOLOGY = topology_from_matrix([["X", "NV4+NODE"], ["NV4+NODE", "X"]])
INVENTORY = Inventory(
    driver="580.65.06",
    enforcement="mps",
    topology_manager="none",
    gpus=(
        InventoryGpu(uuid="GPU-a", model="NVIDIA H100 80GB HBM3", memory=81408, numa=0),
        InventoryGpu(uuid="GPU-b", model="NVIDIA H100 80GB HBM3", memory=81408, numa=1, healthy=False, cordoned=True),
    ),
    levels=score_matrix(TOPOLOGY),
    other={"uid-1": (Share(1, 50, 1024),)},
)
INVENTORY_TEXT = (
    '{"driver":"580.65.06","enforcement":"mps","gpus":['
    '{"cordoned":false,"healthy":true,"memory":81408,"model":"NVIDIA H100 80GB HBM3","numa":0,"replicas":0,"uuid":"GPU-a"},'
    '{"cordoned":true,"healthy":false,"memory":81408,"model":"NVIDIA H100 80GB HBM3","numa":1,"replicas":0,"uuid":"GPU-b"}],'
    '"levels":[[0,420],[420,0]],"other":{"uid-1":[[1,50,1024,0,0]]},"topologyManager":"none","version":1}'
)
PLACEMENT = Placement(node="node-1", containers={"main": (Share("GPU-a", 100, 81408), Share("GPU-b", 100, 81408))})
PLACEMENT_TEXT = '{"containers":{"main":[["GPU-a",100,81408,0,0],["GPU-b",100,81408,0,0]]},"node":"node-1","version":1}'


def test_an_inventory_has_this_text() -> None:
    assert encode(INVENTORY) == INVENTORY_TEXT
    assert decode_inventory(INVENTORY_TEXT) == INVENTORY
    assert decode_inventory(INVENTORY_TEXT).topology() == TOPOLOGY


def test_an_index_is_written_where_it_is_not_the_position() -> None:
    shifted = msgspec.structs.replace(INVENTORY, gpus=(INVENTORY.gpus[0], msgspec.structs.replace(INVENTORY.gpus[1], index=3)))
    text = INVENTORY_TEXT.replace('"healthy":false', '"healthy":false,"index":3')
    assert encode(shifted) == text
    assert decode_inventory(text) == shifted
    with pytest.raises(ValueError, match="an index appears twice in gpus"):
        decode_inventory(text.replace('"index":3', '"index":0'))


def test_what_hamis_pods_need_is_optional() -> None:
    gpus = tuple(msgspec.structs.replace(gpu, replicas=10) for gpu in INVENTORY.gpus)
    shared = msgspec.structs.replace(INVENTORY, gpus=gpus, other={"uid-1": (Share(1, 50, 1024, replicas=2),)}, scaling=(1.5, 1.0))
    text = INVENTORY_TEXT.replace('"replicas":0', '"replicas":10').replace(
        '[[1,50,1024,0,0]]},"topologyManager"', '[[1,50,1024,0,2]]},"scaling":[1.5,1.0],"topologyManager"'
    )
    assert encode(shared) == text
    assert decode_inventory(text) == shared
    assert decode_inventory(text).held == {"uid-1": ((1, Amounts(50, 1024, replicas=2)),)}
    with pytest.raises(ValueError, match="<= 100"):
        decode_inventory(text.replace("[1.5,1.0]", "[1.5,1000.0]"))


def test_a_placement_has_this_text() -> None:
    assert encode(PLACEMENT) == PLACEMENT_TEXT
    assert decode_placement(PLACEMENT_TEXT) == PLACEMENT


MIG_INVENTORY = msgspec.structs.replace(
    INVENTORY,
    gpus=(INVENTORY.gpus[0], msgspec.structs.replace(INVENTORY.gpus[1], mig=mig_rows(H100[-2:]))),
    other={"uid-1": (Share(1, 14, 9984, 64),), "uid-2": (Share(0, 10, 256),)},
)
MIG_INVENTORY_TEXT = INVENTORY_TEXT.replace(
    '"healthy":false,"memory":81408,',
    '"healthy":false,"memory":81408,"mig":[["1g.20gb",15,20096,1,2,[0,2,4,6]],["1g.10gb",19,9984,1,1,[0,1,2,3,4,5,6]]],',
).replace('"other":{"uid-1":[[1,50,1024,0,0]]}', '"other":{"uid-1":[[1,14,9984,64,0]],"uid-2":[[0,10,256,0,0]]}')


def test_an_inventory_with_dynamic_mig_has_this_text() -> None:
    assert encode(MIG_INVENTORY) == MIG_INVENTORY_TEXT
    found = decode_inventory(MIG_INVENTORY_TEXT)
    assert found == MIG_INVENTORY
    assert [gpu.mig_profiles for gpu in found.gpus] == [(), H100[-2:]]
    assert found.held == {"uid-1": ((1, Amounts(14, 9984, slices=64)),), "uid-2": ((0, Amounts(10, 256)),)}
    assert mig_rows(()) is msgspec.UNSET


def test_a_placement_of_mig_devices_has_this_text() -> None:
    made = msgspec.structs.replace(PLACEMENT, containers={"main": (Share("GPU-a", 14, 9984, 1), Share("GPU-b", 100, 81408, 255))})
    text = PLACEMENT_TEXT.replace('"GPU-a",100,81408,0', '"GPU-a",14,9984,1').replace("81408,0", "81408,255")
    assert encode(made) == text
    assert decode_placement(text) == made
    first, second = Amounts(14, 9984, slices=1), Amounts(100, 81408, slices=255)
    assert decode_placement(text).named == {"main": (("GPU-a", first), ("GPU-b", second))}


def test_the_numbers_at_the_end_of_a_share_may_be_missing() -> None:
    assert decode_placement(PLACEMENT_TEXT.replace("81408,0,0", "81408")) == PLACEMENT
    assert decode_placement(PLACEMENT_TEXT.replace("81408,0,0", "81408,0,0,7")) == PLACEMENT


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[0,2,4,6]", "[0,4,2]"),
        ("[0,2,4,6]", "[0,0]"),
        ("[0,2,4,6]", "[31]"),
        ("[0,2,4,6]", "[32]"),
        ("[0,2,4,6]", "[-1]"),
        ("20096,1,2", "20096,1,0"),
        ("20096,1,2", "20096,0,2"),
        ("20096,1,2", "0,1,2"),
        ('"1g.20gb",15', '"1g.10gb",15'),
        ('"1g.20gb",15', '"",15'),
        ('"1g.20gb",15,', '"1g.20gb",'),
        ("9984,64", "9984,-1"),
        ("9984,64", "9984,4294967296"),
        ("9984,64", '9984,"2"'),
        ("9984,64,0", "9984,64,-1"),
    ],
)
def test_wrong_mig_profiles_and_slices_are_refused(before: str, after: str) -> None:
    assert before in MIG_INVENTORY_TEXT
    with pytest.raises(ValueError, match=r"not valid|mig has a profile twice"):
        decode_inventory(MIG_INVENTORY_TEXT.replace(before, after))


def test_a_field_that_a_later_program_adds_is_ignored() -> None:
    assert decode_placement(PLACEMENT_TEXT.replace('"version"', '"later":{},"version"')) == PLACEMENT


def test_the_inventory_of_16_gpus_with_allocations_has_at_most_16_kib() -> None:
    gpus = tuple(
        InventoryGpu(uuid=f"GPU-{number:08x}-0000-0000-0000-000000000000", model="NVIDIA H100 80GB HBM3", memory=81408, numa=0)
        for number in range(16)
    )
    levels = tuple(tuple(0 if a == b else 1860 for b in range(16)) for a in range(16))
    other = {f"{number:08d}-0000-0000-0000-000000000000": (Share(number % 16, 10, 4096),) for number in range(160)}
    assert len(encode(Inventory(gpus=gpus, levels=levels, other=other))) <= 16 << 10


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (INVENTORY_TEXT, "", "not valid"),
        (INVENTORY_TEXT, "[" * 100_000, "not valid"),
        (INVENTORY_TEXT, "\ud800", "not valid"),
        (INVENTORY_TEXT, " " * (MAX_ANNOTATIONS_BYTES + 1), "too long"),
        ('"version":1', '"version":2', "enum value 2"),
        ("81408", "-1", ">= 0"),
        ("81408", "1e30", "not valid"),
        ('"uuid":"GPU-b"', '"uuid":"GPU-a"', "twice in gpus"),
        ("[[0,420],[420,0]]", "[[0,420]]", "2 x 2"),
        ("[[0,420],[420,0]]", "[[0,420],[410,0]]", "not symmetric"),
        ("[[0,420],[420,0]]", "[[0,405],[405,0]]", "405 in levels"),
        ("[[1,50", "[[2,50", "not in gpus"),
        ("[[1,50,", "[[1,50,1024],[1,50,", "twice"),
        ("[[1,50", "[[1,101", "<= 100"),
        ("[[1,50", "[[1000000000,50", "<= 63"),
    ],
)
def test_a_wrong_inventory_is_refused_with_the_reason(before: str, after: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_inventory(INVENTORY_TEXT.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('"version":1', '"version":9', "enum value 9"),
        ('"node":"node-1"', '"node":""', "length >= 1"),
        ('"GPU-b"', '"GPU-a"', "one twice"),
        ('[["GPU-a",100,81408,0,0],["GPU-b",100,81408,0,0]]', "[]", "names no GPU"),
        ("100,81408", "100,-5", ">= 0"),
        ("100,81408,0,0", "100", "not valid"),
    ],
)
def test_a_wrong_placement_is_refused_with_the_reason(before: str, after: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_placement(PLACEMENT_TEXT.replace(before, after))
