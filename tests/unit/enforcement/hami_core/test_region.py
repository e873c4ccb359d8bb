"""What is read from a region's bytes, which limits a new one can have, which words are written back, and which containers wait for launches
of others. (A compiler checks the bytes in the component tests.)"""

import struct
from collections.abc import Callable

import pytest

from gpumgr.enforcement.container_processes import HostsOf
from gpumgr.enforcement.hami_core import layout, repairs
from gpumgr.enforcement.hami_core.region import RegionLimits, RegionView, decode, limits, seed
from gpumgr.enforcement.hami_core.repairs import due as due_words
from gpumgr.ledger.gpu_share import GpuShare
from tests.shares import TWO_GPUS, gpu_share, shared_gpu

GRANTED: RegionLimits = limits([shared_gpu()])


class Pieces:
    """One region's bytes: at first a seed."""

    def __init__(self) -> None:
        self.content = bytearray(seed(GRANTED))

    def put(self, offset: int, form: str, *values: int | bytes) -> None:
        struct.pack_into(form, self.content, offset, *values)

    def add(self, *, pid: int, hostpid: int = 0, status: int = 1, seqlock: int = 0) -> None:
        """One more slot."""
        (count,) = struct.unpack_from("<i", self.content, layout.PROC_NUM)
        self.put(layout.slot_at(count), "<ii", pid, hostpid)
        self.put(layout.slot_at(count) + layout.SLOT_STATUS, "<i4xQ", status, seqlock)
        self.put(layout.PROC_NUM, "<i", count + 1)

    def view(self) -> RegionView:
        return decode(lambda offset, size: bytes(self.content[offset : offset + size]))


def table(**numbers: int | tuple[int, ...]) -> Callable[[int], tuple[int, ...]]:
    """`p7=1007`: the process that its container calls 7 is the host's 1007."""
    hosts = {int(name[1:]): host if isinstance(host, tuple) else (host,) for name, host in numbers.items()}
    return lambda pid: hosts.get(pid, ())


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


# -- repairs ------------------------------------------------------------------------------------------------------------------


def mend(pieces: Pieces, due: list[repairs.Repair]) -> None:
    for each in due:
        pieces.content[each.offset : each.offset + len(each.data)] = each.data


def due(pieces: Pieces, hosts_of: HostsOf) -> list[repairs.Repair]:
    """The pids on the host to be written now."""
    return [repair for _, later, repair in repairs.wrong_hosts(pieces.view(), hosts_of) if not later]


def test_an_untouched_region_needs_nothing() -> None:
    assert list(repairs.drifted(Pieces().view(), GRANTED)) == []


def test_changed_words_are_reset_one_by_one() -> None:
    pieces = Pieces()
    before = bytes(pieces.content)
    pieces.put(layout.LIMIT, "<QQ", 1 << 36, 5)
    pieces.put(layout.SM_LIMIT, "<Q", 100)
    pieces.put(layout.PRIORITY, "<i", 0)
    pieces.put(layout.UTILIZATION_SWITCH, "<i", 0)
    due = list(repairs.drifted(pieces.view(), GRANTED))
    assert [each.code for each in due] == ["memory_limit", "memory_limit", "core_limit", "priority", "switch"]
    assert due[0].message == "memory limit 65536 MiB instead of 1024 MiB (device 0)"
    assert all(each.offset % len(each.data) == 0 for each in due)
    mend(pieces, due)
    assert bytes(pieces.content) == before


def test_a_missing_or_wrong_host_pid_is_written_and_a_correct_one_is_not() -> None:
    pieces = Pieces()
    pieces.add(pid=7, hostpid=0)
    pieces.add(pid=8, hostpid=1008)
    pieces.add(pid=9, hostpid=555)
    pieces.add(pid=10, hostpid=0)
    pieces.add(pid=11, hostpid=1008)  # a sibling's
    pieces.add(pid=0, hostpid=0, status=0)
    mend(pieces, due(pieces, table(p7=1007, p8=1008, p9=1009, p11=1011)))
    found = [(slot.pid, slot.hostpid) for slot in pieces.view().slots]
    assert found == [(7, 1007), (8, 1008), (9, 1009), (10, 0), (11, 1011)]


@pytest.mark.parametrize("hostpid", [0, 1007, 1107, 555])
def test_nothing_is_written_while_two_processes_have_the_pid(hostpid: int) -> None:
    """In nested pid namespaces."""
    pieces = Pieces()
    pieces.add(pid=7, hostpid=hostpid)
    assert list(repairs.wrong_hosts(pieces.view(), table(p7=(1007, 1107)))) == []


def test_a_process_that_looks_for_its_host_pid_is_not_helped() -> None:
    pieces = Pieces()
    pieces.add(pid=7)
    pieces.add(pid=8, hostpid=1007)
    pieces.put(layout.SEM_POSTINIT, "<II", 0, 1)
    (repair,) = due(pieces, table(p7=1007, p8=1008))
    assert repair.message == "host pid 1007 of process 8 instead of 1008"


@pytest.mark.parametrize(("waiters", "may_run"), [(0, True), (1, True), (2, False), (3, False)])
def test_who_holds_postinit_is_one_more_than_those_that_wait(waiters: int, may_run: bool) -> None:
    pieces = Pieces()
    pieces.put(layout.SEM_POSTINIT, "<II", 0, waiters)
    pieces.add(pid=7)
    pieces.add(pid=8)
    pieces.add(pid=9)  # was killed
    pieces.add(pid=1, hostpid=1001)
    assert repairs.holder_may_run(pieces.view(), table(p1=1001, p7=1007, p8=1008)) is may_run


def test_a_stuck_slot_keeps_its_old_host_number() -> None:
    pieces = Pieces()
    pieces.add(pid=1, hostpid=555, seqlock=3)
    assert due(pieces, table(p1=1001)) == []


def test_a_lock_of_an_ended_writer_is_released() -> None:
    pieces = Pieces()
    pieces.add(pid=1, hostpid=555, seqlock=2**64 - 1)  # its pid in the container is used again, as the host pid shows
    pieces.add(pid=2, hostpid=1002, seqlock=5)  # runs
    pieces.add(pid=3, hostpid=0, seqlock=7)  # runs, its host pid was never found
    pieces.add(pid=4, hostpid=0, seqlock=9)
    pieces.add(pid=0, status=0, seqlock=11)
    seen = pieces.view()
    found = list(repairs.abandoned(seen, table(p1=1001, p2=1002, p3=1003)))
    assert [slot.index for slot in found] == [0, 3, 4]
    mend(pieces, [repairs.unstuck(slot) for slot in found])
    assert [(slot.index, slot.seqlock) for slot in pieces.view().slots] == [(0, 0), (1, 5), (2, 7), (3, 10)]
    assert struct.unpack_from("<Q", pieces.content, layout.slot_at(4) + layout.SLOT_SEQLOCK) == (12,)


def share(name: str, priority: int, *gpus: int) -> GpuShare:
    return gpu_share(name, *(TWO_GPUS[gpu] for gpu in gpus), priority=priority)


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        # (priority, GPUs, recent_kernel) of each, and the words to write
        pytest.param([(1, [0], 2), (1, [0], 2)], [None, None], id="one priority: nothing is written"),
        pytest.param([(1, [0], -1), (1, [0], 2)], [0, None], id="one priority: none waits"),
        pytest.param([(0, [0], 2), (1, [0], 2)], [1, -1], id="the higher one launches"),
        pytest.param([(0, [0], 2), (1, [0], -1)], [1, None], id="and still does"),
        pytest.param([(0, [0], 1), (1, [0], -1)], [0, 0], id="it has stopped"),
        pytest.param([(0, [0], 0), (1, [0], -1)], [None, 0], id="it has not launched for a while"),
        pytest.param([(0, [0], 2), (1, [1], 2)], [1, 1], id="on another GPU"),
        pytest.param([(0, [0], 2), (1, [0, 1], -1), (2, [1], 2)], [1, None, 1], id="one that waits delays none"),
        pytest.param([(0, [0], 0), (1, [0], 2), (2, [0], 2)], [None, 1, -1], id="the highest that launches counts"),
        pytest.param([(0, [0], 2), (0, [0], 2), (5, [0], 0)], [1, 1, -1], id="equals do not wait for each other"),
        pytest.param([(0, [0], 2**31 - 1), (1, [0], 2)], [1, -1], id="no word counts for longer"),
        pytest.param([(0, [0], -(2**31)), (1, [0], 2)], [0, 1], id="and no container keeps itself waiting"),
    ],
)
def test_words(containers: list[tuple[int, list[int], int]], expected: list[int | None]) -> None:
    shares = [share(f"a{number}", priority, *gpus) for number, (priority, gpus, _) in enumerate(containers)]
    found = dict(zip(shares, (word for *_, word in containers), strict=True))
    written = due_words(found)
    assert [written.get(each) for each in shares] == expected
