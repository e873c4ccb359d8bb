"""What is read from a region's bytes, and which limits a new one can have. (A compiler checks the bytes in the component tests.)"""

import pytest

from gpumgr.enforcement.hami_core import layout
from gpumgr.enforcement.hami_core.region import limits
from tests.shares import TWO_GPUS, shared_gpu
from tests.unit.enforcement.hami_core.pieces import GRANTED, Pieces


def test_a_region_decodes_to_its_limits_and_processes() -> None:
    pieces = Pieces()
    pieces.add(pid=7, hostpid=1007)
    pieces.add(pid=0, hostpid=1008, status=0)
    pieces.add(pid=9, status=2)
    seen = pieces.view()
    assert [(slot.index, slot.pid, slot.hostpid, slot.status) for slot in seen.slots] == [(0, 7, 1007, 1), (2, 9, 0, 2)]
    assert (seen.limits_bytes, seen.core_limits_percent) == (GRANTED.memory_bytes, GRANTED.core_percent)
    assert (seen.utilization_switch, seen.priority, seen.problem) == (1, 1, None)


@pytest.mark.parametrize(("said", "read"), [(-5, 0), (1025, 1024), (2**31 - 1, 1024)])
def test_an_invalid_process_count_is_bounded_and_reported(said: int, read: int) -> None:
    pieces = Pieces()
    for pid in range(1, 1025):
        pieces.add(pid=pid)
    pieces.put(layout.PROC_NUM, "<i", said)
    assert len(pieces.view().slots) == read
    assert "processes of at most 1024" in str(pieces.view().problem)


def test_a_slot_without_a_process_is_shown_while_it_is_stuck() -> None:
    pieces = Pieces()
    pieces.add(pid=0, status=0, seqlock=7)
    (slot,) = pieces.view().slots
    assert (slot.stuck, slot.live) == (True, False)


@pytest.mark.parametrize("cores", [-1, 100, 150])
def test_cores_that_the_library_takes_for_unlimited_are_refused(cores: int) -> None:
    with pytest.raises(ValueError, match="not a share of a GPU"):
        limits([shared_gpu(cores=cores)])


@pytest.mark.parametrize("memory_bytes", [-1, 0, 1, (1 << 20) + 1, 1 << 63])
def test_memory_that_the_library_treats_as_unlimited_or_can_not_represent_is_refused(memory_bytes: int) -> None:
    with pytest.raises(ValueError, match="not a memory limit"):
        limits([shared_gpu(memory_bytes=memory_bytes)])


def test_each_gpu_has_its_own_limits_and_a_whole_one_has_none() -> None:
    first, second = TWO_GPUS
    whole = shared_gpu("GPU-33333333", cores=100, memory_bytes=80 << 30, bus_id="0000:2a:00.0")
    wanted = limits([first, whole, second])
    assert wanted.memory_bytes == (2 << 30, 0, 1 << 30, *[0] * 13)
    assert wanted.core_percent == (20, 100, 70, *[100] * 13)


def test_several_gpus_in_an_unknown_order_are_no_limits() -> None:
    with pytest.raises(ValueError, match="PCI bus id of GPU 0fe1c342"):
        limits([*TWO_GPUS, shared_gpu()])
    with pytest.raises(ValueError, match="17 GPUs: at most 16"):
        limits([TWO_GPUS[0]] * 17)


def test_memory_without_cores_has_no_core_limit() -> None:
    assert limits([shared_gpu(cores=0)]).core_percent == (100,) * 16
