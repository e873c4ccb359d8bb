"""Room, order and patience at the door, with lines that hold as many bytes as a test says."""

import pytest

from gpumgr.web.doorman import Doorman, Patience, Stage, Visit

PATIENCE = Patience(request_seconds=10, idle_seconds=75, unsent_seconds=30, half_closed_seconds=1)


class Line:
    def __init__(self) -> None:
        self.unsent = 0
        self.cut = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.cut = True


def visit(stage: Stage = "asking", *, now: float = 0.0) -> tuple[Visit, Line]:
    line = Line()
    made = Visit(line, now)
    made.became(stage, now)
    return made, line


def test_the_oldest_that_is_not_busy_makes_room() -> None:
    doorman = Doorman(4, PATIENCE)
    lines = []
    stages: tuple[Stage, ...] = ("streaming", "answering", "idle", "asking")
    for stage in stages:
        made, line = visit(stage)
        assert doorman.admit(made)
        lines.append(line)
    assert doorman.admit(visit()[0])
    assert [line.cut for line in lines] == [False, False, True, False]
    assert (doorman.inside, doorman.refused) == (4, 0)


def test_an_answer_that_is_not_taken_yet_is_busy() -> None:
    doorman = Doorman(1, PATIENCE)
    made, line = visit("idle")
    assert doorman.admit(made)
    line.unsent = 1
    assert not doorman.admit(visit()[0])
    line.unsent = 0
    assert doorman.admit(visit()[0])
    assert made.ended


def test_without_room_the_new_one_is_refused_and_counted() -> None:
    doorman = Doorman(1, PATIENCE)
    first, line = visit("streaming")
    assert doorman.admit(first)
    assert not doorman.admit(visit()[0])
    assert (doorman.inside, doorman.refused, line.cut) == (1, 1, False)
    doorman.leave(first)
    assert doorman.admit(visit()[0])


@pytest.mark.parametrize(
    ("stage", "half_closed", "seconds"),
    [("asking", False, 10.0), ("asking", True, 1.0), ("idle", False, 75.0), ("idle", True, 1.0)],
)
def test_who_stays_too_long_is_cut(stage: Stage, half_closed: bool, seconds: float) -> None:
    doorman = Doorman(8, PATIENCE)
    made, line = visit(stage, now=100.0)
    made.half_closed = half_closed
    doorman.admit(made)
    doorman.look(100.0 + seconds - 0.1)
    assert not line.cut
    doorman.look(100.0 + seconds)
    assert line.cut
    assert doorman.inside == 0


@pytest.mark.parametrize("stage", ["answering", "streaming"])
def test_an_answer_under_way_may_take_its_time(stage: Stage) -> None:
    made, _ = visit(stage)
    assert not made.overdue(10_000.0, PATIENCE)


@pytest.mark.parametrize("stage", ["answering", "streaming", "idle"])
def test_an_answer_of_which_nothing_is_taken(stage: Stage) -> None:
    made, line = visit(stage)
    assert not made.overdue(100.0, Patience(idle_seconds=1000, unsent_seconds=30))
    line.unsent = 5000
    assert not made.overdue(101.0, PATIENCE)
    assert not made.overdue(130.9, PATIENCE)
    assert made.overdue(131.0, PATIENCE)


def test_a_stream_goes_on_while_something_is_taken_and_a_page_must_be_taken_whole() -> None:
    stream, stream_line = visit("streaming")
    page, page_line = visit("answering")
    for second in range(40):
        stream_line.unsent = page_line.unsent = 10_000 - second
        assert not stream.overdue(float(second), PATIENCE)
        assert page.overdue(float(second), PATIENCE) == (second >= 30)


def test_what_was_taken_counts_no_more() -> None:
    made, line = visit("streaming")
    for second, unsent in enumerate([100, 100, 0, 100, 100]):
        line.unsent = unsent
        assert not made.overdue(20.0 * second, PATIENCE)
    assert made.overdue(90.0, PATIENCE)


def test_end_all() -> None:
    doorman = Doorman(8, PATIENCE)
    lines = []
    for stage in ("idle", "streaming"):
        made, line = visit(stage)
        doorman.admit(made)
        lines.append(line)
    doorman.end_all()
    assert all(line.cut for line in lines)
    assert doorman.inside == 0
