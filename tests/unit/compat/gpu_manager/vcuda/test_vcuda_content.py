"""vcuda.config: names, and what does not fit; pids.config. A C program reads the numbers in the component tests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.compat.gpu_manager.vcuda.files import MOST_PIDS, pack_config, pack_pids, unpack_pids
from tests.shares import TWO_GPUS
from tests.unit.compat.gpu_manager.vcuda.tenants import ALLOCATION, GPU, TENANT


def text_at(config: bytes, offset: int) -> str:
    return config[offset : config.index(b"\0", offset)].decode()


def test_unknown_names_are_replaced_by_the_allocation_id() -> None:
    config = pack_config(replace(TENANT, pod_uid=None, container=None, gpus=(replace(GPU, bus_id=None),)))
    assert (text_at(config, 0), text_at(config, 4096), text_at(config, 8192)) == (ALLOCATION, ALLOCATION, "")


def test_names_may_fill_their_fields() -> None:
    config = pack_config(replace(TENANT, pod_uid="u" * 47, container="c" * 4095, gpus=(replace(GPU, bus_id="b" * 15),)))
    assert (text_at(config, 0), text_at(config, 4096), text_at(config, 8192)) == ("u" * 47, "c" * 4095, "b" * 15)


@pytest.mark.parametrize(
    ("tenant", "sentence"),
    [
        (replace(TENANT, pod_uid="u" * 48), "the pod's uid has 48 bytes and vcuda.config holds 47"),
        (replace(TENANT, container="ü" * 2048), "the container's name has 4096 bytes and vcuda.config holds 4095"),
        (
            replace(TENANT, gpus=(replace(GPU, bus_id="00000000:18:00.0"),)),
            "the GPU's PCI id has 16 bytes and vcuda.config holds 15",
        ),
        (replace(TENANT, container="a\0b"), "the container's name has a zero byte"),
        (
            replace(TENANT, gpus=TWO_GPUS),
            "vcuda limits a container on one GPU only, and .* shares 2 GPUs: request a share of one GPU",
        ),
    ],
)
def test_names_that_do_not_fit_are_refused(tenant: object, sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence):
        pack_config(tenant)  # type: ignore[arg-type]


PIDS = st.integers(min_value=1, max_value=2**22)


@given(st.sets(PIDS, min_size=1, max_size=MOST_PIDS + 300), st.sets(PIDS, max_size=50))
def test_what_is_written_is_ascending_and_fits(pids: set[int], first: set[int]) -> None:
    written = unpack_pids(pack_pids(list(pids), first))
    assert list(written) == sorted(set(written))
    assert set(written) <= pids
    assert len(written) == min(len(pids), MOST_PIDS)
    assert first & pids <= set(written)


def test_the_bytes() -> None:
    assert pack_pids([258, 1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_of_too_many_the_users_of_the_gpu_come_first_and_then_the_lowest() -> None:
    assert unpack_pids(pack_pids(range(1, 2001), first=[1500, 2000, 9999])) == (*range(1, 1023), 1500, 2000)


def test_an_empty_file_would_lift_the_limit() -> None:
    with pytest.raises(ValueError, match="at least one"):
        pack_pids([])


def test_a_damaged_file_names_no_process() -> None:
    assert unpack_pids(b"\x01\0\0") == unpack_pids(b"") == ()
