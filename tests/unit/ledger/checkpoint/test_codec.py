"""Allocations survive the way into a row and back; a row that was damaged is never read as another allocation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.units import BLOCK_MEBIBYTES, RESOURCES, Amounts
from gpumgr.ledger.checkpoint.codec import (
    CorruptRowError,
    checksum,
    decode_allocation,
    decode_entry,
    encode_allocation,
    encode_entry,
)
from gpumgr.ledger.history import Candidate, HistoryEntry
from gpumgr.ledger.ids import ALL_CORES, GpuRegistry, RegisteredGpu
from gpumgr.ledger.ledger import Allocation
from tests.allocations import allocated

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
MASKS = st.dictionaries(NAMES, st.integers(1, (1 << 800) - 1), max_size=3)
REGISTRY = GpuRegistry((RegisteredGpu("g", "GPU-1", 16 * BLOCK_MEBIBYTES), RegisteredGpu("h", "GPU-2", 16 * BLOCK_MEBIBYTES)))
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
    assert decode_allocation(REGISTRY, *encode_allocation(allocation)) == allocation


@given(ALLOCATIONS, st.data())
def test_a_damaged_row_is_never_read(allocation: Allocation, data: st.DataObject) -> None:
    allocation_id, record, sum_ = encode_allocation(allocation)
    place = data.draw(st.integers(0, len(record) - 1))
    damaged = record[:place] + chr(ord(record[place]) ^ 1) + record[place + 1 :]
    with pytest.raises(CorruptRowError, match="its checksum is wrong"):
        decode_allocation(REGISTRY, allocation_id, damaged, sum_)
    with pytest.raises(CorruptRowError):
        decode_allocation(REGISTRY, allocation_id + "x", record, sum_)


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        '{"gpus": {"g": 5}}',
        "{",
        "null",
        '{"cores": {"g": "xyz"}}',
        '{"cores": {"g": 5}}',
        '{"pod": ["a"]}',
        '{"surprise": 1}',
        "[" * 5000,
    ],
)
def test_an_invalid_row_is_named(record: str) -> None:
    with pytest.raises(CorruptRowError, match="the row of allocation 'a1' can't be read"):
        decode_allocation(REGISTRY, "a1", record, checksum("a1", record))


@pytest.mark.parametrize(
    ("record", "allocation"),
    [
        (
            '{"pod":["team","a"],"uid":"u","container":"main","cores":{"g":"3ff"},"blocks":{"g":"f"},"gpus":["g"],"granted_at":5.0,'
            '"why":"x","mechanisms":["mps"]}',
            allocated(
                id="a1",
                pod=("team", "a"),
                uid="u",
                container="main",
                cores={"g": 0x3FF},
                blocks={"g": 0xF},
                granted_at=5.0,
                why="x",
                mechanisms=("mps",),
            ),
        ),
        (
            f'{{"cores":{{"g":"{ALL_CORES:x}","h":"{ALL_CORES:x}"}},"gpus":["g","h"],"anonymous":true}}',
            allocated(id="a1", cores={"g": ALL_CORES, "h": ALL_CORES}, anonymous=True),
        ),
    ],
    ids=["a share", "whole GPUs"],
)
def test_a_row_of_schema_2_gets_the_amounts_of_its_ids(record: str, allocation: Allocation) -> None:
    assert decode_allocation(REGISTRY, "a1", record, checksum("a1", record)) == allocation


def test_an_allocation_without_ids_is_stored() -> None:
    claim = Allocation(id="claim/gpu", gpus={"g": Amounts(100, 4096), "h": Amounts(30, 1000)})
    assert decode_allocation(REGISTRY, *encode_allocation(claim)) == claim


def test_an_entry_of_schema_2_counts_free_memory_in_blocks() -> None:
    entry = HistoryEntry(
        number=7, at=1.0, what="granted", candidates=(Candidate(gpu="g", memory_mebibytes_free=768), Candidate(gpu="h"))
    )
    number, record, _ = encode_entry(entry)
    old = record.replace('"memory_mebibytes_free":768', '"memory_blocks_free":3').replace('"memory_mebibytes_free":0,', "")
    assert old != record
    assert decode_entry(number, old.encode(), checksum("7", old)) == entry
