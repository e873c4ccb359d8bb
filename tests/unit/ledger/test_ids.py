"""The id code and sets of ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.errors import Refusal
from gpumgr.common.units import ALL_RESOURCES, BLOCK_MEBIBYTES
from gpumgr.ledger.ids import GpuRegistry, RegisteredInstance, common, count, gpu_name, lowest, minus, union
from gpumgr.placement.tree import indices

from .nodes import cards_of

MASKS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 2**100), max_size=3)


def test_ids_name_their_gpu() -> None:
    gpu_registry = GpuRegistry().register("GPU-1f2e3d4c-0000-0000-0000-000000000000", 3 * BLOCK_MEBIBYTES)
    assert gpu_registry.ids["core"]["1f2e3d4c"][:2] == ("1f2e3d4c-c00", "1f2e3d4c-c01")
    assert gpu_registry.ids["core"]["1f2e3d4c"][-1] == "1f2e3d4c-c99"
    assert gpu_registry.ids["memory"]["1f2e3d4c"] == ("1f2e3d4c-m0", "1f2e3d4c-m1", "1f2e3d4c-m2")


def test_names_that_collide_take_more_digits_and_never_change() -> None:
    gpu_registry = (
        GpuRegistry()
        .register("GPU-aaaaaaaa-1111", 1 * BLOCK_MEBIBYTES)
        .register("GPU-aaaaaaaa-2222", 1 * BLOCK_MEBIBYTES)
        .register("GPU-AAAAAAAA-1111", 1 * BLOCK_MEBIBYTES)
    )
    assert [gpu.name for gpu in gpu_registry.gpus] == ["aaaaaaaa", "aaaaaaaa2", "aaaaaaaa1"]
    assert gpu_name("GPU-aaaaaaaa", ["aaaaaaaa", "aaaaaaaax0"]) == "aaaaaaaax1"


def test_a_known_gpu_keeps_its_place_and_never_shrinks() -> None:
    gpu_registry = cards_of([4, 4])
    first, second = gpu_registry.gpus
    assert gpu_registry.register(first.uuid, 2 * BLOCK_MEBIBYTES) is gpu_registry
    grown = gpu_registry.register(first.uuid, 6 * BLOCK_MEBIBYTES)
    assert [(gpu.name, gpu.memory_blocks) for gpu in grown.gpus] == [(first.name, 6), (second.name, 4)]
    assert grown.ids["memory"][first.name][:4] == gpu_registry.ids["memory"][first.name]


def test_a_mig_device_keeps_its_position_and_gets_a_new_profile_with_the_same_uuid() -> None:
    one, other = RegisteredInstance("MIG-1", "1g.10gb", 9000), RegisteredInstance("MIG-2", "1g.10gb", 9000)
    gpu_registry = GpuRegistry().register("GPU-3", 40960, instances=[one, other])
    assert gpu_registry.register("GPU-3", 40960, instances=[other]) is gpu_registry
    larger = RegisteredInstance("MIG-1", "2g.20gb", 18000)
    assert gpu_registry.register("GPU-3", 40960, instances=[larger]).gpus[0].instances == (larger, other)


@given(st.data())
def test_ids_and_masks_are_equivalent(data: st.DataObject) -> None:
    instances = [RegisteredInstance(f"MIG-{number}", "1g.10gb", 9000) for number in range(5)]
    gpu_registry = cards_of([5, 7]).register("GPU-3", 4096, 3, instances)
    for kind in ALL_RESOURCES:
        every = [text for texts in gpu_registry.ids[kind].values() for text in texts]
        chosen = data.draw(st.lists(st.sampled_from(every), unique=True))
        masks = gpu_registry.parse(kind, chosen)
        assert sorted(gpu_registry.format(kind, masks)) == sorted(chosen)
        assert masks == gpu_registry.known(kind, [*chosen, "stranger-c00"])
        assert count(masks) == len(chosen)


@pytest.mark.parametrize(
    ("ids", "code", "sentence"),
    [
        (["00000000-c00", "nonsense"], "unknown_device", "device id 'nonsense' is none of this node's core ids"),
        (["00000000-m0"], "unknown_device", "none of this node's core ids"),
        (["00000000-c100"], "unknown_device", "none of this node's core ids"),
        (["00000000-c00", "00000001-c00", "00000000-c00"], "invalid_request", "'00000000-c00' occurs twice in one request"),
        (["00000000-c00"] * 100_000, "invalid_request", "occurs twice"),
        ([f"{n}-c00" for n in range(100_000)], "unknown_device", "'0-c00'"),
    ],
)
def test_invalid_ids_are_named(ids: list[str], code: str, sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence) as refused:
        cards_of([4, 4]).parse("core", ids)
    assert refused.value.code == code


@given(MASKS, MASKS)
def test_masks_have_set_operations(left: dict[str, int], right: dict[str, int]) -> None:
    assert count(union(left, right)) == count(left) + count(right) - count(common(left, right))
    assert union(minus(left, right), common(left, right)) == left
    assert not minus(common(left, right), right)
    assert (not minus(left, right)) == (common(left, right) == left)
    assert not common(minus(left, right), right)


@given(st.integers(0, 2**100), st.integers(0, 110))
def test_the_lowest_bits(mask: int, wanted: int) -> None:
    found = list(indices(mask))[:wanted]
    assert lowest(mask, wanted) == sum(1 << bit for bit in found)
