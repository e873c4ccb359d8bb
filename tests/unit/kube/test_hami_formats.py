"""HAMi's annotations of a node, and of the MIG devices of a pod, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.kube.hami_formats import (
    MigAllocation,
    Placed,
    RegisteredGpu,
    allocation_of,
    decode_allocations,
    decode_register,
    encode_allocations,
    encode_register,
    encode_scores,
    registered_profiles,
    slices_in,
)
from gpumgr.kube.pod_annotations import with_driver_ids
from gpumgr.ledger.ledger import MigDevice
from gpumgr.placement.mig import place_named
from gpumgr.placement.requests import device_type
from tests import mig_profiles

REGISTER = (
    '[{"id":"GPU-0fc3","index":1,"count":10,"devmem":81559,"devcore":100,"type":"NVIDIA H100 80GB HBM3","mode":"hami-core",'
    '"health":true}]'
)
GPU = RegisteredGpu(
    uuid="GPU-0fc3", index=1, count=10, memory_mebibytes=81559, cores=100, model="NVIDIA H100 80GB HBM3", healthy=True
)
MIG_REGISTER = (
    '[{"id":"GPU-0fc3","count":7,"devmem":81559,"devcore":100,"type":"NVIDIA H100 80GB HBM3","mode":"mig","migProfiles":['
    '{"name":"7g.80gb","memoryMB":81152,"core":100,"sliceCount":7,"placements":[{"start":0,"size":8}]},'
    '{"name":"3g.40gb","memoryMB":40448,"core":42,"sliceCount":3,"placements":[{"start":0,"size":4},{"start":4,"size":4}]}],'
    '"health":true}]'
)

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters=",:", exclude_categories=["C"]), max_size=40)
NUMBERS = st.integers(0, 2**31)
GPUS = st.lists(
    st.builds(
        RegisteredGpu,
        uuid=TEXTS.filter(lambda text: text[:1] not in ("", "[")),
        index=st.integers(0, 999),
        count=NUMBERS,
        memory_mebibytes=NUMBERS,
        cores=NUMBERS,
        model=TEXTS,
        numa=st.integers(0, 63),
        mode=st.sampled_from(["hami-core", "mig"]),
        healthy=st.booleans(),
    ),
    max_size=4,
)


def test_the_list_is_hamis() -> None:
    assert encode_register([GPU]) == REGISTER
    assert decode_register(REGISTER) == [GPU]
    sick = RegisteredGpu(uuid="a", count=0, memory_mebibytes=0, cores=0, model="NVIDIA-T4", numa=1, healthy=False)
    assert encode_register([sick]) == '[{"id":"a","type":"NVIDIA-T4","numa":1,"mode":"hami-core"}]'
    assert (encode_register([]), decode_register("[]"), decode_register("null")) == ("[]", [], [])


def test_a_gpu_with_dynamic_mig_lists_its_profiles() -> None:
    profiles = registered_profiles((mig_profiles.H100[0], mig_profiles.H100[2]))
    gpu = replace(GPU, index=0, count=7, mode="mig", mig_profiles=profiles)
    assert encode_register([gpu]) == MIG_REGISTER
    assert decode_register(MIG_REGISTER) == [gpu]
    for before, after in (
        ('"sliceCount":7,', ""),
        ('"size":8', '"size":0'),
        ('"name":"7g.80gb"', '"name":7'),
        ("100,", '"100",'),
    ):
        with pytest.raises(ValueError, match=r"migProfiles|devcore"):
            decode_register(MIG_REGISTER.replace(before, after))


@given(GPUS)
def test_what_is_encoded_is_decoded(gpus: list[RegisteredGpu]) -> None:
    assert decode_register(encode_register(gpus)) == gpus


@pytest.mark.parametrize("text", [
    "",
    "GPU-ebe7,10,7680,100,NVIDIA-Tesla P4,0,true:",  # as HAMi 2.4 and older
    "[",
    "[1]",
    "{}",
    '[{"id":"a","devmem":"1"}]',
    '[{"id":"a","devmem":-1}]',
    '[{"id":"a","health":1}]',
    '[{"count":1}]',
])  # fmt: skip
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_register(text)


@pytest.mark.parametrize(("model", "expected"), [
    ("NVIDIA A100", "NVIDIA A100"),
    ("Tesla P4", "NVIDIA-Tesla P4"),
    (None, "NVIDIA-GPU"),
])  # fmt: skip
def test_the_type_begins_with_the_vendor(model: str | None, expected: str) -> None:
    assert device_type(model) == expected


def test_scores_are_hamis() -> None:
    assert encode_scores(["a", "b"], ((0, 120), (50, 0))) == '[{"uuid":"a","score":{"b":120}},{"uuid":"b","score":{"a":50}}]'
    assert encode_scores([], ()) == "[]"


#: As HAMi's EncodeMigAllocations writes it, and its plugin when the device is there.
GOLDEN = '[{"containerIndex":1,"deviceIndex":0,"gpuUUID":"GPU-0fc3","profile":"2g.20gb","placement":{"start":0,"size":2}}]'
REALIZED = GOLDEN[:-2] + ',"migUUID":"MIG-5d1f","gpuInstanceID":0,"computeInstanceID":0}]'


def test_the_text_is_hamis() -> None:
    place = place_named(mig_profiles.H100, "2g.20gb", 0)
    assert place is not None
    made = allocation_of("GPU-0fc3", place, container=1, device=0)
    assert made == MigAllocation(container=1, device=0, gpu="GPU-0fc3", profile="2g.20gb", placement=Placed(start=0, size=2))
    assert encode_allocations([made]) == GOLDEN
    assert list(decode_allocations(GOLDEN)) == [made]
    there = replace(made, mig_uuid="MIG-5d1f", gpu_instance=0, compute_instance=0)
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
