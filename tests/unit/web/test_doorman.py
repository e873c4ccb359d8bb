"""Room, order and patience at the door, with lines that hold as many bytes as a test says."""

import pytest

from gpumgr.web.door.doorman import Doorman, Patience, Stage, Visit

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
        assert doorman.admit(made, 0.0)
        lines.append(line)
    assert doorman.admit(visit()[0], 0.0)
    assert [line.cut for line in lines] == [False, False, True, False]
    assert (doorman.inside, doorman.refused) == (4, 0)


def test_who_lets_an_answer_lie_the_longest_goes_before_those_who_wait() -> None:
    doorman = Doorman(4, PATIENCE)
    stages: tuple[Stage, ...] = ("idle", "answering", "streaming", "idle")
    made = [visit(stage) for stage in stages]
    for each, _ in made:
        assert doorman.admit(each, 0.0)
    made[2][1].unsent = 1
    doorman.look(1.0)
    made[1][1].unsent = made[3][1].unsent = 1
    doorman.look(2.0)
    made[3][1].unsent = 0
    for cut in (2, 1, 0, 3):
        assert doorman.admit(visit("answering")[0], 3.0)
        assert made[cut][0].ended
        assert made[cut][1].cut
    assert not doorman.admit(visit()[0], 3.0)
    assert (doorman.inside, doorman.refused) == (4, 1)


def fill(doorman: Doorman, many: int, peer: str | None, stage: Stage = "answering") -> int:
    """How many of so many are inside then, without those that made room for others."""
    made = []
    for _ in range(many):
        each = Visit(Line(), 0.0, peer=peer)
        each.became(stage, 0.0)
        made.append((each, doorman.admit(each, 0.0)))
    return sum(admitted and not each.ended for each, admitted in made)


def test_one_address_beyond_this_host_has_a_quarter_of_the_places() -> None:
    doorman = Doorman(16, PATIENCE)
    assert fill(doorman, 20, "192.0.2.1") == 4
    assert (doorman.inside, doorman.refused) == (4, 16)
    assert fill(doorman, 2, "192.0.2.2") == 2


def test_one_address_makes_room_for_itself_among_its_own() -> None:
    doorman = Doorman(16, PATIENCE)
    fill(doorman, 1, "192.0.2.2", "idle")
    assert fill(doorman, 20, "192.0.2.1", "idle") == 4
    assert (doorman.inside, doorman.refused) == (5, 0)


def test_those_beyond_leave_an_eighth_to_this_host_and_it_may_have_all() -> None:
    doorman = Doorman(16, PATIENCE)
    assert sum(fill(doorman, 4, f"192.0.2.{number}") for number in range(8)) == 14
    assert fill(doorman, 4, None) == 2
    assert fill(Doorman(16, PATIENCE), 20, None) == 16


def test_the_smallest_door_has_room_for_each_kind() -> None:
    doorman = Doorman(1, PATIENCE)
    assert fill(doorman, 1, None) == 1
    doorman = Doorman(8, PATIENCE)
    assert [fill(doorman, 8, f"192.0.2.{number}") for number in range(4)] == [2, 2, 2, 1]
    assert fill(doorman, 8, None) == 1


def test_who_left_frees_the_place_of_the_address() -> None:
    doorman = Doorman(16, PATIENCE)
    for _ in range(3):
        made = [Visit(Line(), 0.0, peer="192.0.2.1") for _ in range(4)]
        for each in made:
            each.became("answering", 0.0)
            assert doorman.admit(each, 0.0)
        for each in made:
            doorman.leave(each)
            doorman.leave(each)
    assert (doorman.inside, doorman.refused) == (0, 0)


def test_what_all_let_lie_is_bounded() -> None:
    doorman = Doorman(8, PATIENCE, most_unread_bytes=100)
    made = [visit("idle") for _ in range(4)]
    for second, (each, line) in enumerate(made):
        doorman.admit(each, 0.0)
        line.unsent = 30
        doorman.look(float(second))
    assert [line.cut for _, line in made] == [True, False, False, False]
    made[3][1].unsent = 1000
    doorman.look(5.0)
    assert [line.cut for _, line in made] == [True] * 4


def test_without_room_the_new_one_is_refused_and_counted() -> None:
    doorman = Doorman(1, PATIENCE)
    first, line = visit("streaming")
    assert doorman.admit(first, 0.0)
    assert not doorman.admit(visit()[0], 0.0)
    assert (doorman.inside, doorman.refused, line.cut) == (1, 1, False)
    doorman.leave(first)
    assert doorman.admit(visit()[0], 0.0)


@pytest.mark.parametrize(
    ("stage", "half_closed", "seconds"),
    [("asking", False, 10.0), ("asking", True, 1.0), ("idle", False, 75.0), ("idle", True, 1.0)],
)
def test_who_stays_too_long_is_cut(stage: Stage, half_closed: bool, seconds: float) -> None:
    doorman = Doorman(8, PATIENCE)
    made, line = visit(stage, now=100.0)
    made.half_closed = half_closed
    doorman.admit(made, 0.0)
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
        doorman.admit(made, 0.0)
        lines.append(line)
    doorman.end_all()
    assert all(line.cut for line in lines)
    assert doorman.inside == 0
