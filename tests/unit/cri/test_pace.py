"""How often the runtime is asked."""

from gpumgr.cri.pace import Pace


def questions(pace: Pace, seconds: range) -> list[int]:
    """Looks once a second; the seconds in which a question was due."""
    asked = []
    for now in seconds:
        if pace.due(now):
            pace.ask(now)
            asked.append(now)
    return asked


def test_the_first_question_is_due_then_every_ten_seconds() -> None:
    assert questions(Pace(), range(1000, 1031)) == [1000, 1010, 1020, 1030]


def test_awake_it_asks_each_second_for_fifteen() -> None:
    pace = Pace()
    pace.ask(100)
    pace.wake(103)
    assert questions(pace, range(103, 141)) == [*range(103, 118), 127, 137]


def test_a_second_wake_starts_the_time_anew() -> None:
    pace = Pace()
    pace.ask(100)
    pace.wake(100)
    pace.wake(110)
    assert questions(pace, range(101, 136)) == [*range(101, 125), 134]


def test_no_more_than_once_a_second() -> None:
    pace = Pace()
    pace.wake(100)
    pace.ask(100)
    assert not pace.due(100.9)
    assert pace.due(101)
