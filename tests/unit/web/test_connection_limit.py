"""Slots, their order and their timeouts, with transports that hold as many unread bytes as a test sets."""

import asyncio

import pytest

from gpumgr.web.connection_limit import ConnectionLimit, Slot, Stage, Timeouts

TIMEOUTS = Timeouts(request_seconds=10, idle_seconds=75, unread_seconds=30, half_closed_seconds=1)


class FakeTransport(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.unread = 0
        self.cut = False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.cut = True


def slot(stage: Stage = "receiving", *, now: float = 0.0) -> tuple[Slot, FakeTransport]:
    transport = FakeTransport()
    made = Slot(transport, now)
    made.enter(stage, now)
    return made, transport


def test_the_longest_unread_response_is_cut_before_idle_connections() -> None:
    limit = ConnectionLimit(4, TIMEOUTS)
    stages: tuple[Stage, ...] = ("idle", "responding", "streaming", "idle")
    made = [slot(stage) for stage in stages]
    for each, _ in made:
        assert limit.acquire(each, 0.0)
    made[2][1].unread = 1
    limit.check(1.0)
    made[1][1].unread = made[3][1].unread = 1
    limit.check(2.0)
    made[3][1].unread = 0
    for cut in (2, 1, 0, 3):
        assert limit.acquire(slot("responding")[0], 3.0)
        assert made[cut][1].cut
    assert not limit.acquire(slot()[0], 3.0)
    assert (limit.open, limit.refused) == (4, 1)


def fill(limit: ConnectionLimit, many: int, peer: str | None, stage: Stage = "responding") -> int:
    """How many of so many connections are open then, without the ones that were cut for others."""
    made = []
    for _ in range(many):
        transport = FakeTransport()
        each = Slot(transport, 0.0, peer=peer)
        each.enter(stage, 0.0)
        made.append((transport, limit.acquire(each, 0.0)))
    return sum(acquired and not transport.cut for transport, acquired in made)


def test_one_remote_address_has_a_quarter_of_the_slots() -> None:
    limit = ConnectionLimit(16, TIMEOUTS)
    assert fill(limit, 20, "192.0.2.1") == 4
    assert (limit.open, limit.refused) == (4, 16)
    assert fill(limit, 2, "192.0.2.2") == 2


def test_a_full_address_cuts_its_own_connections() -> None:
    limit = ConnectionLimit(16, TIMEOUTS)
    fill(limit, 1, "192.0.2.2", "idle")
    assert fill(limit, 20, "192.0.2.1", "idle") == 4
    assert (limit.open, limit.refused) == (5, 0)


def test_remote_clients_leave_an_eighth_to_this_host_which_may_have_all() -> None:
    limit = ConnectionLimit(16, TIMEOUTS)
    assert sum(fill(limit, 4, f"192.0.2.{number}") for number in range(8)) == 14
    assert fill(limit, 4, None) == 2
    assert fill(ConnectionLimit(16, TIMEOUTS), 20, None) == 16


def test_the_smallest_limits() -> None:
    limit = ConnectionLimit(1, TIMEOUTS)
    assert fill(limit, 1, None) == 1
    limit = ConnectionLimit(8, TIMEOUTS)
    assert [fill(limit, 8, f"192.0.2.{number}") for number in range(4)] == [2, 2, 2, 1]
    assert fill(limit, 8, None) == 1


def test_release_frees_the_slot_of_the_address() -> None:
    limit = ConnectionLimit(16, TIMEOUTS)
    for _ in range(3):
        made = [Slot(FakeTransport(), 0.0, peer="192.0.2.1") for _ in range(4)]
        for each in made:
            each.enter("responding", 0.0)
            assert limit.acquire(each, 0.0)
        for each in made:
            limit.release(each)
            limit.release(each)
    assert (limit.open, limit.refused) == (0, 0)


def test_the_unread_bytes_of_all_are_bounded() -> None:
    limit = ConnectionLimit(8, TIMEOUTS, max_unread_bytes=100)
    made = [slot("idle") for _ in range(4)]
    for second, (each, transport) in enumerate(made):
        limit.acquire(each, 0.0)
        transport.unread = 30
        limit.check(float(second))
    assert [transport.cut for _, transport in made] == [True, False, False, False]
    made[3][1].unread = 1000
    limit.check(5.0)
    assert [transport.cut for _, transport in made] == [True] * 4


@pytest.mark.parametrize(
    ("stage", "half_closed", "seconds"),
    [("receiving", False, 10.0), ("receiving", True, 1.0), ("idle", False, 75.0), ("idle", True, 1.0)],
)
def test_an_overdue_connection_is_cut(stage: Stage, half_closed: bool, seconds: float) -> None:
    limit = ConnectionLimit(8, TIMEOUTS)
    made, transport = slot(stage, now=100.0)
    made.half_closed = half_closed
    limit.acquire(made, 0.0)
    limit.check(100.0 + seconds - 0.1)
    assert not transport.cut
    limit.check(100.0 + seconds)
    assert transport.cut
    assert limit.open == 0


@pytest.mark.parametrize("stage", ["responding", "streaming"])
def test_a_response_in_progress_has_no_timeout(stage: Stage) -> None:
    made, _ = slot(stage)
    assert not made.overdue(10_000.0, TIMEOUTS)


@pytest.mark.parametrize("stage", ["responding", "streaming", "idle"])
def test_a_response_that_is_not_read(stage: Stage) -> None:
    made, transport = slot(stage)
    assert not made.overdue(100.0, Timeouts(idle_seconds=1000, unread_seconds=30))
    transport.unread = 5000
    assert not made.overdue(101.0, TIMEOUTS)
    assert not made.overdue(130.9, TIMEOUTS)
    assert made.overdue(131.0, TIMEOUTS)


def test_a_stream_may_progress_slowly_and_a_page_must_be_read_whole() -> None:
    stream, stream_transport = slot("streaming")
    page, page_transport = slot("responding")
    for second in range(40):
        stream_transport.unread = page_transport.unread = 10_000 - second
        assert not stream.overdue(float(second), TIMEOUTS)
        assert page.overdue(float(second), TIMEOUTS) == (second >= 30)


def test_reading_everything_restarts_the_timeout() -> None:
    made, transport = slot("streaming")
    for second, unread in enumerate([100, 100, 0, 100, 100]):
        transport.unread = unread
        assert not made.overdue(20.0 * second, TIMEOUTS)
    assert made.overdue(90.0, TIMEOUTS)
