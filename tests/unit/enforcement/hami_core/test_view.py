"""What is taken from a region's bytes, in every layout, and what is not."""

import pytest

from gpumgr.enforcement.hami_core.layouts import LAYOUTS, V1_1, V1_2, Layout
from tests.unit.enforcement.hami_core.pieces import GRANTED, Pieces

UUID = b"GPU-0fe1c342-aaaa-bbbb-cccc-0123456789ab"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_decodes_to_the_same_view(layout: Layout) -> None:
    pieces = Pieces(layout)
    pieces.put(layout.device_num, "<Q", 2)
    pieces.put_uuid(0, UUID)
    pieces.add(pid=7, hostpid=1007, used=(300, 5))
    pieces.add(pid=0, hostpid=1008, status=0, used=(40, 0))
    pieces.add(pid=9, status=2, used=(1, 2))
    seen = pieces.view()
    assert [(slot.index, slot.pid, slot.hostpid, slot.status, slot.used_bytes) for slot in seen.slots] == [
        (0, 7, 1007, 1, (300, 5)),
        (2, 9, 0, 2, (1, 2)),
    ]
    assert (seen.used_bytes, seen.stale_bytes) == ((301, 7), (40, 0))
    assert (seen.limits_bytes, seen.core_limits_percent) == (GRANTED.memory_bytes, GRANTED.core_percent)
    assert (seen.utilization_switch, seen.recent_kernel, seen.priority) == (1, 2, 1)
    assert seen.uuids == (UUID.decode(),)
    assert seen.problems == ()
    assert seen.last_kernel_time == (0 if layout.last_kernel_time else None)


@pytest.mark.parametrize(("said", "read"), [(-5, 0), (1025, 1024), (2**31 - 1, 1024)])
def test_an_invalid_process_count_is_bounded_and_reported(said: int, read: int) -> None:
    pieces = Pieces(V1_2)
    for pid in range(1, 1025):
        pieces.add(pid=pid)
    pieces.put(V1_2.proc_num, "<i", said)
    seen = pieces.view()
    assert len(seen.slots) == read
    assert [problem.code for problem in seen.problems] == ["process_count"]


@pytest.mark.parametrize(("said", "devices"), [(0, 1), (3, 3), (17, 16), (2**64 - 1, 16)])
def test_the_device_count_is_bounded(said: int, devices: int) -> None:
    pieces = Pieces(V1_2)
    pieces.put(V1_2.device_num, "<Q", said)
    pieces.add(pid=1)
    assert len(pieces.view().used_bytes) == pieces.view().device_count == devices


@pytest.mark.parametrize("total", [1 << 48, 2**63 - 1, 2**63, 2**64 - 4096])
def test_counters_that_ran_below_zero_count_as_nothing(total: int) -> None:
    pieces = Pieces(V1_2)
    pieces.add(pid=1, used=(total,))
    pieces.add(pid=2, used=(100,))
    seen = pieces.view()
    assert seen.used_bytes == (100,)
    assert [problem.code for problem in seen.problems] == ["counter"]


@pytest.mark.parametrize(
    "text",
    [
        b"GPU-\n} evil",
        b"\n" * 96,
        UUID + b"\n",
        b"x" + UUID,
        b"GPU-" + b"\xff" * 36,
        b"GPU-" + b"a" * 35,
    ],
)
def test_a_name_that_is_no_uuid_goes_nowhere(text: bytes) -> None:
    pieces = Pieces(V1_2)
    pieces.put_uuid(3, text)
    seen = pieces.view()
    assert seen.uuids == ()
    assert [(problem.code, problem.message) for problem in seen.problems] == [
        ("uuid", "the name of device 3 is not a GPU's UUID")
    ]


def test_a_name_ends_at_its_first_zero() -> None:
    pieces = Pieces(V1_2)
    pieces.put_uuid(0, UUID + b"\0\n} evil")
    assert pieces.view().uuids == (UUID.decode(),)


def test_a_region_that_calls_itself_something_else_is_still_read_as_what_it_is() -> None:
    pieces = Pieces(V1_2)
    pieces.put(4, "<II", *(V1_1.version or ()))
    seen = pieces.view()
    assert seen.layout is V1_2
    assert [problem.code for problem in seen.problems] == ["header"]
    pieces.put(0, "<i", 1)
    assert [problem.code for problem in pieces.view().problems] == ["header"]


def test_a_slot_without_a_process_is_shown_while_it_is_stuck() -> None:
    pieces = Pieces(V1_2)
    pieces.add(pid=0, status=0, seqlock=7, used=(10,))
    (slot,) = pieces.view().slots
    assert (slot.stuck, slot.live) == (True, False)
    assert (pieces.view().used_bytes, pieces.view().stale_bytes) == ((0,), (10,))
