"""Allocations survive the way into a row and back; a row that was damaged is never read as another allocation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.units import RESOURCES, Amounts
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.tables import CorruptError, checksum, decode_allocation, encode_allocation

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
MASKS = st.dictionaries(NAMES, st.integers(1, (1 << 800) - 1), max_size=3)
ALLOCATIONS = st.builds(
    Allocation,
    id=NAMES,
    pod=st.none() | st.tuples(NAMES, NAMES),
    uid=st.none() | NAMES,
    container=st.none() | NAMES,
    init=st.booleans(),
    gpus=st.dictionaries(NAMES, st.builds(Amounts, st.integers(0, 100), st.integers(0, 1 << 20)), max_size=3),
    device_ids=st.dictionaries(st.sampled_from(RESOURCES), MASKS.filter(bool)),
    granted_at=st.floats(0, 1e12),
    why=NAMES,
    anonymous=st.booleans(),
)


@given(ALLOCATIONS)
def test_round_trip(allocation: Allocation) -> None:
    assert decode_allocation(*encode_allocation(allocation)) == allocation


@given(ALLOCATIONS, st.data())
def test_a_damaged_row_is_never_read(allocation: Allocation, data: st.DataObject) -> None:
    allocation_id, record, sum_ = encode_allocation(allocation)
    place = data.draw(st.integers(0, len(record) - 1))
    damaged = record[:place] + chr(ord(record[place]) ^ 1) + record[place + 1 :]
    with pytest.raises(CorruptError, match="its checksum is wrong"):
        decode_allocation(allocation_id, damaged, sum_)
    with pytest.raises(CorruptError):
        decode_allocation(allocation_id + "x", record, sum_)


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        '{"gpus": {"g": 5}}',
        "{",
        "null",
        '{"device_ids": {"core": {"g": "xyz"}}}',
        '{"device_ids": {"core": {"g": 5}}}',
        '{"pod": ["a"]}',
        '{"surprise": 1}',
        "[" * 5000,
    ],
)
def test_an_invalid_row_is_named(record: str) -> None:
    with pytest.raises(CorruptError, match="the row of allocation 'a1' can't be read"):
        decode_allocation("a1", record, checksum("a1", record))
