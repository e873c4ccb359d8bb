"""pids.config: ascending, never empty, at most 1,024."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.compat.gpu_manager.vcuda.files import MOST_PIDS, pack_pids, unpack_pids

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
