"""HAMi's annotations of a node, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.kube.hami_formats import (
    RegisteredGpu,
    decode_register,
    encode_register,
    encode_scores,
    registered_profiles,
)
from gpumgr.placement.requests import device_type
from tests import mig_profiles

GOLDEN = (
    '[{"id":"GPU-0fc3","index":1,"count":10,"devmem":81559,"devcore":100,"type":"NVIDIA H100 80GB HBM3","mode":"hami-core",'
    '"health":true}]'
)
H100 = RegisteredGpu(
    uuid="GPU-0fc3", index=1, count=10, memory_mebibytes=81559, cores=100, model="NVIDIA H100 80GB HBM3", healthy=True
)
MIG_GOLDEN = (
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
    assert encode_register([H100]) == GOLDEN
    assert decode_register(GOLDEN) == [H100]
    sick = RegisteredGpu(uuid="a", count=0, memory_mebibytes=0, cores=0, model="NVIDIA-T4", numa=1, healthy=False)
    assert encode_register([sick]) == '[{"id":"a","type":"NVIDIA-T4","numa":1,"mode":"hami-core"}]'
    assert (encode_register([]), decode_register("[]"), decode_register("null")) == ("[]", [], [])


def test_a_gpu_with_dynamic_mig_lists_its_profiles() -> None:
    profiles = registered_profiles((mig_profiles.H100[0], mig_profiles.H100[2]))
    gpu = replace(H100, index=0, count=7, mode="mig", mig_profiles=profiles)
    assert encode_register([gpu]) == MIG_GOLDEN
    assert decode_register(MIG_GOLDEN) == [gpu]
    for before, after in (
        ('"sliceCount":7,', ""),
        ('"size":8', '"size":0'),
        ('"name":"7g.80gb"', '"name":7'),
        ("100,", '"100",'),
    ):
        with pytest.raises(ValueError, match=r"migProfiles|devcore"):
            decode_register(MIG_GOLDEN.replace(before, after))


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
